"""Low-rank adapters: what trains, what the reference and the engines see, what is on disk, and how a run goes on."""

import copy
import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
from learning import household_policy, random_rows, tiny_model
from safetensors.torch import load_file, save_file

from manus_fast import cli
from manus_fast.agent.trajectory import Row
from manus_fast.checkpoint import latest, load
from manus_fast.data.packing import pack
from manus_fast.finetune import FineTune
from manus_fast.learn.backend import SingleProcessBackend
from manus_fast.learn.dpo import reference_log_prob
from manus_fast.learn.policy import Policy, Reference
from manus_fast.modeling.load import load_model
from manus_fast.modeling.lora import AdapterFolder, LoRAConfig, apart_weights, load_adapter, merged_weights
from manus_fast.preference import RewardTune
from manus_fast.rollout.engine import Request, generate
from manus_fast.rollout.engines.hf import HFEngine
from manus_fast.run_config import Config
from manus_fast.trainer import Trainer

peft = pytest.importorskip("peft")

ROWS = pack(random_rows(6, seed=3))
LORA = LoRAConfig(rank=2, alpha=6.0, target_modules=["q_proj", "v_proj", "down_proj"])


def adapted(config=LORA, moved=True, **options):
    """A small model with adapters; `moved`: as if they had been trained, so that they change something."""
    model = config.adapt(tiny_model(**options), seed=1)
    if moved:
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def log_probs(policy):
    return policy.score_all(ROWS).log_prob


def trained(backend, steps=1):
    """The policy after a few steps towards the rows; the gradients of the last one."""
    for _ in range(steps):
        backend.backward(-backend.policy.score(ROWS).log_prob.sum() / ROWS.trainable_tokens)
        gradients = {name: gradient.clone() for name, gradient in backend.gradients().items()}
        backend.step(0.05, backend.gradient_norm())
    return gradients


def test_adapters_begin_as_the_model_itself_and_leave_the_generator_alone():
    plain = log_probs(Policy(tiny_model()))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    policy = Policy(adapted(moved=False))
    assert torch.equal(torch.rand(3), expected) and torch.equal(log_probs(policy), plain)
    again = dict(adapted(moved=False).named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in policy.model.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_and_the_value_head_train_and_the_reference_is_the_base(dtype):
    """Also after the reference was scored with adapters off, which switches their gradients off and on again."""
    plain = Policy(tiny_model())
    plain.cast(getattr(torch, dtype))
    base = log_probs(plain)
    policy = Policy(adapted(moved=False), critic="shared")
    backend = SingleProcessBackend(policy, dtype=dtype)
    frozen = {n: p.detach().clone() for n, p in policy.named_parameters() if not p.requires_grad}
    reference = Reference(policy)
    assert reference.state_dict() == {} and reference._policy is policy
    before = trained(backend)
    assert torch.equal(reference.log_prob(ROWS), base) and torch.equal(reference_log_prob(policy, ROWS), base)
    after = trained(backend, steps=2)
    names = {name for name in policy.state_dict() if ".lora_" in name}
    assert before.keys() == after.keys() == names and len(names) == 2 * 3 * 2
    assert all(gradient.dtype == torch.float32 and gradient.any() for gradient in after.values())
    assert {name for name, _ in backend.named_masters()} == names | {"value_head.weight", "value_head.bias"}
    assert all(torch.equal(p, frozen[n]) for n, p in policy.named_parameters() if n in frozen)
    assert (log_probs(policy) - base).abs().max() > 0.05
    assert torch.equal(reference.log_prob(ROWS), base)


def test_the_gradient_is_that_of_the_product_written_out():
    """Of W + 3·B·A with respect to B and A, by autograd on plain weights; also under gradient checkpointing."""
    plain = tiny_model()
    policy = Policy(adapted())
    weights = dict(plain.named_parameters())
    leaves, merged = {}, {}
    for name, parameter in policy.model.get_base_model().named_parameters():
        if ".lora_" in name:
            leaves[name] = parameter.detach().clone().requires_grad_(True)
    for name in leaves:
        if ".lora_A." in name:
            owner = name.partition(".lora_A.")[0] + ".weight"
            merged[owner] = weights[owner].detach() + 3.0 * leaves[name.replace("lora_A", "lora_B")] @ leaves[name]
    score = Policy(plain)
    # Leaves in place of parameters: what torch.func calls the model with.
    loss = torch.func.functional_call(_Loss(score), {f"policy.model.{n}": w for n, w in merged.items()}, ())
    loss.backward()
    for checkpointing in (False, True):
        backend = SingleProcessBackend(Policy(adapted(), gradient_checkpointing=checkpointing))
        ours = trained(backend)
        for name, leaf in leaves.items():
            torch.testing.assert_close(ours[f"model.base_model.model.{name}"], leaf.grad, rtol=1e-4, atol=1e-6)


class _Loss(torch.nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self):
        return -self.policy.score(ROWS).log_prob.sum() / ROWS.trainable_tokens


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_the_sum_under_the_names_of_the_plain_model(tied):
    plain, model = tiny_model(tied=tied), adapted(tied=tied)
    merged = dict(merged_weights(model))
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    changed = 0
    for name, weight in plain.named_parameters():
        layer = model.get_base_model().get_submodule(name.rpartition(".")[0])
        expected = weight.double()
        if hasattr(layer, "lora_A"):
            expected = expected + 3.0 * layer.lora_B.default.weight.double() @ layer.lora_A.default.weight.double()
            changed += 1
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert changed == 6  # three of each of two layers
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(merged[name])
    torch.testing.assert_close(log_probs(Policy(plain)), log_probs(Policy(model)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False], ids=["the model itself", "a model of its own"])
def test_what_an_engine_samples_is_what_the_policy_scores(shared):
    """An engine over the very model computes through the adapters; any other one is given merged weights."""
    base = tiny_model()
    engine = HFEngine(base if shared else copy.deepcopy(base), [36], max_slots=2, max_length=64)
    policy = Policy(LORA.adapt(base))
    trained(SingleProcessBackend(policy), steps=3)
    engine.load(policy.weights_for(engine), 1)
    prompt = np.arange(1, 9, dtype=np.int32)
    found = generate(engine, [Request(0, prompt, seed=3, max_tokens=12)])[0]
    ids, mask = np.concatenate([prompt, found.ids]).astype(np.int64), np.arange(8 + len(found.ids)) >= 8
    zeros = np.zeros(len(ids), np.float32)
    row = Row(ids, mask, np.where(mask, 0, -1).astype(np.int32), zeros, zeros, episode=0)
    scored = policy.score_all(pack([row])).log_prob[8:]
    assert found.version == 1 and len(found.ids) > 1
    np.testing.assert_allclose(found.log_probs, scored.numpy(), rtol=1e-4, atol=1e-4)


def test_a_separate_critic_is_a_plain_decoder_that_starts_as_the_merged_one():
    policy = Policy(adapted(), critic="separate")
    merged = dict(merged_weights(policy.model))
    for name, parameter in policy.critic.named_parameters():
        assert parameter.requires_grad and ".lora_" not in name
        torch.testing.assert_close(parameter.detach(), merged[f"model.{name}"])


def test_an_adapter_is_written_in_pefts_own_format(tmp_path):
    model = adapted()
    AdapterFolder.of(model).save_pretrained(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    theirs = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    assert torch.equal(log_probs(Policy(theirs)), log_probs(Policy(model)))
    assert theirs.peft_config["default"].r == 2 and theirs.peft_config["default"].lora_alpha == 6.0


def test_a_model_opened_from_an_adapter_trains_whole(tmp_path):
    AdapterFolder.of(adapted()).save_pretrained(tmp_path / "adapter")
    model = tiny_model()
    load_adapter(model, tmp_path / "adapter")
    gradients = trained(SingleProcessBackend(Policy(model)))
    names = {name for name, _ in model.named_parameters()}
    assert all(parameter.requires_grad for parameter in model.parameters()) and len(gradients) == len(names)


def test_an_adapter_that_lacks_tensors_is_refused(tmp_path):
    AdapterFolder.of(adapted()).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file)
    model = tiny_model()
    with pytest.raises(ValueError, match=r"model: expected all 12 tensors of the adapter in .* \(1 are missing\)"):
        load_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, r"model.lora.rank: expected an integer >= 1, got 0"),
        ({"alpha": 0.0}, r"model.lora.alpha: expected a number above 0, got 0.0"),
        ({"target_modules": []}, r"model.lora.target_modules: expected null or at least one name"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"of the decoder's linear layers \(down_proj, .*got 'lm_head'"),
        ({"target_modules": ["embed_tokens"]}, r"of the decoder's linear layers .*, got 'embed_tokens'"),
    ],
)
def test_what_cannot_be_adapted_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        LoRAConfig(**options).adapt(tiny_model(tied=False))


def test_a_model_is_adapted_once():
    with pytest.raises(ValueError, match=r"model.lora: expected a model without adapters"):
        LORA.adapt(adapted().get_base_model())


# Runs

BASE = [
    "environment.name=household", "environment.options={num_train: 60, num_valid: 4}", "agent.instructions=Household.",
    "rollout.slots=8", "rollout.max_turn_tokens=6", "rollout.max_traj_tokens=40", "rollout.max_length=512",
    "evaluation.tasks=2", "training.keep_checkpoints=9", "training.save_strategy=epoch", "model.lora={rank: 2}",
]  # fmt: skip
PPO = [
    "environment.max_steps=2", "ppo.batch_size=4", "ppo.kl_coef=0.5", "training.num_rollouts=4",
    "training.learning_rate=1e-2", "training.total_steps=24", "environment.reward_config.format_bonus=0.5",
]  # fmt: skip
SFT = [
    "environment.max_steps=30",
    "evaluation.tasks=1",
    "data.demonstrations=6",
    "sft.batch_size=3",
    "sft.epochs=2",
    "sft.eval_every=100",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return household_policy(tmp_path_factory.mktemp("model") / "tiny")


def config_of(folder, out, *more):
    return Config.load(None, [*BASE, f"model.path={folder}", f"training.output_dir={out}", *more])


def cut(run, to):
    """A run as it was after its first checkpoint."""
    shutil.copytree(run, to)
    for path in sorted(to.glob("step-*"))[1:]:
        shutil.rmtree(path)
    return latest(to)


def same_tensors(a, b):
    ours, theirs = load_file(a), load_file(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_ppo_run_keeps_adapters_goes_on_exactly_and_leaves_a_plain_model(folder, tmp_path):
    first = Trainer(config_of(folder, tmp_path / "whole", *PPO))
    first.run()
    part = cut(tmp_path / "whole", tmp_path / "cut")
    again = Trainer(config_of(folder, tmp_path / "cut", *PPO, "training.resume=true"))
    assert again.counters.iteration == 1
    again.run()
    assert first.counters.iteration == again.counters.iteration >= 3
    # What a checkpoint holds: adapters, the critic, their moments, and no weight of the base.
    tensors = load(part).tensors("optimizer")
    names = {name.partition(".")[2] for name in tensors}
    assert {name for name in names if ".lora_" not in name} == {"value_head.weight", "value_head.bias"}
    assert {path.name for path in part.joinpath("model").iterdir() if path.suffix == ".safetensors"} == {
        "adapter_model.safetensors"
    }
    last = [sorted((tmp_path / run).glob("step-*"))[-1] for run in ("whole", "cut")]
    for file in ("optimizer-00001.safetensors", "model/adapter_model.safetensors"):
        assert same_tensors(last[0] / file, last[1] / file)
    assert same_tensors(*(tmp_path / run / "model" / "model.safetensors" for run in ("whole", "cut")))
    # The model that is left is plain, and the last checkpoint's adapter opens as the same weights.
    started, _ = load_model(folder)
    merged, opened = load_model(tmp_path / "whole" / "model")[0], load_model(last[0] / "model")[0]
    theirs, begun = dict(opened.named_parameters()), dict(started.named_parameters())
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(weight, begun[name]) == (not name.endswith("proj.weight"))
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()]
    kl = [record["policy/ref_kl"] for record in records if "policy/ref_kl" in record]
    assert kl[0] == 0.0 and kl[-1] != 0.0  # the reference is the base


def test_an_sft_run_goes_on_exactly_and_can_leave_an_adapter(folder, tmp_path):
    lines = (*SFT, "model.lora.export=adapter", "sft.learning_rate=1e-2", "model.dtype=bfloat16")
    FineTune(config_of(folder, tmp_path / "whole", *lines)).run()
    cut(tmp_path / "whole", tmp_path / "cut")
    FineTune(config_of(folder, tmp_path / "cut", *lines, "training.resume=true")).run()
    file = "model/adapter_model.safetensors"
    assert same_tensors(tmp_path / "whole" / file, tmp_path / "cut" / file)
    facts = json.loads((tmp_path / "whole" / "model" / "adapter_config.json").read_text())
    assert facts["base_model_name_or_path"] == str(folder.resolve()) and facts["r"] == 2
    # An adapter upon an adapter: the second run begins from what the first one came to.
    FineTune(config_of(tmp_path / "whole" / "model", tmp_path / "next", *lines, "sft.learning_rate=0.0")).run()
    ours, theirs = (load_model(tmp_path / run / "model")[0] for run in ("next", "whole"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("more", [(), ("model.lora=null",)], ids=["adapters again", "weights"])
def test_an_engine_of_a_run_with_adapters_plays_for_the_next(folder, tmp_path, more):
    """It samples from the first run's model, whose adapters have to go before another's weights come."""
    short = (*PPO, "training.total_steps=8", "training.save_strategy=no")
    earlier = Trainer(config_of(folder, tmp_path / "earlier", *short))
    earlier.run()
    Trainer(config_of(folder, tmp_path / "own", *short, *more)).run()
    again = Trainer(config_of(folder, tmp_path / "shared", *short, *more), engine=earlier.player.engine)
    again.run()
    assert again.player.engine is earlier.player.engine
    own, shared = ((tmp_path / name / "trajectories.jsonl").read_text() for name in ("own", "shared"))
    assert own == shared
    sft = FineTune(config_of(folder, tmp_path / "sft", *SFT, "sft.epochs=1", *more), engine=again.player.engine)
    assert sft.run().report.summary.success.n == 1 and sft.player.engine is earlier.player.engine


def test_dpo_trains_adapters_from_the_command_line(folder, tmp_path):
    user, replies = "Your task is to : look", ("Think: find it\nAct: look", "Think: find it\nAct: find it")
    lines = [
        {"prompt": [{"role": "user", "content": f"{user} {n}"}],
         "chosen": [{"role": "assistant", "content": replies[0]}],
         "rejected": [{"role": "assistant", "content": replies[1]}]}
        for n in range(8)
    ]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    words = ["dpo", *BASE, "environment.max_steps=2", f"training.output_dir={tmp_path / 'run'}", "dpo.batch_size=4"]
    words += ["dpo.epochs=3", "dpo.learning_rate=5e-2", "training.save_strategy=no"]
    assert cli.main([*words, "--model_path", str(folder), "--dataset_name", str(tmp_path / "pairs.jsonl")]) == 0
    start, *records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert start["step"] == 0
    assert records[0]["dpo/loss"] == pytest.approx(np.log(2), abs=1e-6)  # policy and reference are one
    assert records[-1]["dpo/margin"] > 0 and records[-1]["dpo/loss"] < records[0]["dpo/loss"]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_missing_package_and_a_reward_model_are_refused_in_one_sentence(folder, tmp_path, monkeypatch):
    config = config_of(folder, tmp_path / "run")
    with pytest.raises(ValueError, match=r"model.lora: expected null for a reward model"):
        RewardTune(config)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(ValueError, match=r"model.lora: expected the package peft \(pip install 'manus-fast\[lora\]'\)"):
        FineTune(config)


def test_what_an_engine_keeps_apart_adds_up_to_the_merged_weights():
    model = adapted()
    merged, apart = dict(merged_weights(model)), dict(apart_weights(model, base=True))
    pairs = {name for name in apart if ".lora_" in name}
    assert len(pairs) == 2 * 3 * 2 and pairs == set(dict(apart_weights(model, base=False)))
    for name, weight in merged.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        own = apart.pop(name)
        if f"{stem}A.weight" in apart:
            assert not torch.equal(own, weight)
            own = own + apart.pop(f"{stem}B.weight") @ apart.pop(f"{stem}A.weight")
        torch.testing.assert_close(own, weight)
    assert not apart
