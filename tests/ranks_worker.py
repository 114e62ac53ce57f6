"""One rank of the run that test_ranks.py starts: `python ranks_worker.py KIND,… FILE`; rank 0 writes FILE."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from learning import random_rows, tiny_model
from test_update import FULL, ROWS, make_policy

from manus_fast.learn.backend import BackendConfig, SingleProcessBackend, make_backend
from manus_fast.learn.guard import NonFiniteError
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy
from manus_fast.learn.update import PolicyGradientUpdate
from manus_fast.modeling.lora import LoRAConfig
from manus_fast.ranks import connect

CASES = {
    "turn": ({**FULL}, 12, 1),
    "cut small": ({"max_tokens": 40, **FULL}, 12, 2),
    "sequence mean": ({"aggregation": "seq-mean-token-mean", **FULL}, 12, 3),
    "separate critic": ({"advantage": "token", "critic": "separate"}, 12, 1),
    "fewer rows than ranks": ({**FULL}, 1, 1),
    "three rows": ({"max_tokens": 10, **FULL}, 3, 1),
}


ALONE = {}


def recorded(backend):
    """Has a backend keep its gradients instead of stepping."""
    kept = []

    def step(lr, norm):
        kept.append({name: gradient.clone() for name, gradient in backend.gradients().items()} | {"norm": norm.clone()})
        backend.discard()

    backend.step = step
    return kept


def config_of(kind):
    """ "ddp", or "fsdp" with its stage: "fsdp3"."""
    return (
        BackendConfig(kind=kind[:4], zero_stage=int(kind[4:])) if kind.startswith("fsdp") else BackendConfig(kind=kind)
    )


def gradients(ranks, options, count, accumulation, kind):
    """Gradient and statistics of one update on the first `count` rows."""
    parts = ranks.size * accumulation
    config = PPOConfig(batch_size=-(-count // parts) * parts, **options)
    policy, reference = make_policy(config)
    if kind == "alone":
        backend = SingleProcessBackend(policy)
    else:
        backend = make_backend(policy, config_of(kind), None, "float32", ranks)
    kept = recorded(backend)
    update = PolicyGradientUpdate(
        policy, backend, config, gradient_accumulation_steps=accumulation, reference=reference, correction="none"
    )
    # Episodes that failed count as collected: fewer rows than the batch size asks for are left then.
    collected = SimpleNamespace(reward=torch.zeros(config.batch_size))
    stats = update.run(ROWS[:count], collected, iteration=0, progress=0.0, learning_rate=0.0)
    assert len(kept) == 1
    return kept[0], stats


def compare(ranks, kind):
    """Worst relative difference to the gradient of one process, and of statistics, by case."""
    results = {}
    # Stages differ in when gradients are summed and weights forgotten: two cases of several micro-batches tell.
    names = ("cut small", "three rows") if kind in ("fsdp1", "fsdp3") else CASES
    for name in names:
        options, count, accumulation = CASES[name]
        ours, stats = gradients(ranks, options, count, accumulation, kind)
        if name not in ALONE:
            ALONE[name] = gradients(ranks, options, count, accumulation, "alone")
        alone, expected = ALONE[name]
        worst = max(float((ours[n] - g).norm() / (g.norm() + 1e-8)) for n, g in alone.items())
        shift = max(
            abs(stats[n] - expected[n]) / (abs(expected[n]) + 1e-3)
            for n in expected
            if not n.startswith(("policy/ratio_p95", "critic/explained")) and not n.endswith("_seconds")
        )
        results[name] = {"gradient": worst, "statistics": shift, "tensors": len(alone)}
    return results


def weights_after(ranks, kind, dtype="float32", rank=None):
    """Master weights after four clipped optimizer steps, in one vector, without those that they started from; `rank` of
    adapters that train in the weights' place, measured by a KL from their base."""
    adapters = None if rank is None else LoRAConfig(rank)
    config = PPOConfig(batch_size=6, epochs=2, max_grad_norm=0.05, weight_decay=0.1, kl_coef=0.1 if rank else 0.0)

    def fresh():
        model = tiny_model() if adapters is None else adapters.adapt(tiny_model(), seed=1)
        return Policy(model, critic="shared", gradient_checkpointing=kind == "fsdp3")

    policy = fresh()
    if kind == "alone":
        backend = SingleProcessBackend(policy, None, config.optimizer(), dtype)
    else:
        backend = make_backend(policy, config_of(kind), config.optimizer(), dtype, ranks)
    update = PolicyGradientUpdate(policy, backend, config, correction="none", seed=3)
    stats = update.run(ROWS, iteration=0, progress=0.0, learning_rate=1e-3)
    assert stats["update/steps"] == 4
    start = dict(fresh().named_parameters())
    return torch.cat([(weight.detach() - start[name].detach()).flatten() for name, weight in backend.named_masters()])


def equality(ranks, kind):
    """How far this kind of backend is from one process, and the ranks from each other."""
    result = {"cases": compare(ranks, kind)}
    for dtype in ("float32", "bfloat16"):
        if dtype not in ALONE:
            ALONE[dtype] = weights_after(ranks, "alone", dtype)
        ours, alone = weights_after(ranks, kind, dtype), ALONE[dtype]
        everybodys = torch.stack(ranks.gather([ours]))
        result[dtype] = {
            "weights": float((ours - alone).norm() / alone.norm()),
            "spread": float((everybodys - everybodys[0]).abs().max()),
        }
    return result


def adapters(ranks, kind):
    """`equality` of adapters' weights after a few steps, and of what is merged for an engine."""
    if "adapters" not in ALONE:
        ALONE["adapters"] = weights_after(ranks, "alone", rank=2)
    ours, alone = weights_after(ranks, kind, rank=2), ALONE["adapters"]
    policy = Policy(LoRAConfig(2).adapt(tiny_model(), seed=1))
    expected = dict(policy.named_weights())
    make_backend(policy, config_of(kind), None, "float32", ranks)
    merged = dict(policy.named_weights())
    same = merged.keys() == expected.keys() and all(torch.equal(merged[n], w) for n, w in expected.items())
    return {"weights": float((ours - alone).norm() / alone.norm()), "numbers": len(ours), "merged": same}


def bad_rank(ranks, kind):
    """A loss that only rank 1 sees as not finite stops every rank with the same name for it."""
    policy = Policy(tiny_model())
    backend = make_backend(policy, config_of(kind), None, "float32", ranks)
    config = PPOConfig(advantage="return", batch_size=4, max_bad_steps=1)
    update = PolicyGradientUpdate(policy, backend, config, correction="none")
    score = policy.score

    def broken(part, **options):
        output = score(part, **options)
        if torch.is_grad_enabled() and ranks.rank == 1:
            output.log_prob = output.log_prob * float("nan")
        return output

    policy.score = broken
    try:
        update.run(random_rows(4), iteration=0, progress=0.0, learning_rate=1.0)
    except NonFiniteError as error:
        return {"told": ranks.gather([str(error)]), "skipped": update.guard.skipped}
    return {"told": [], "skipped": update.guard.skipped}


def main(kinds, file):
    ranks = connect()
    result = {kind: equality(ranks, kind) | {"bad_rank": bad_rank(ranks, kind)} for kind in kinds.split(",")}
    if importlib.util.find_spec("peft") is not None:
        for kind, found in result.items():
            found["adapters"] = adapters(ranks, kind)
    if ranks.first:
        Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
