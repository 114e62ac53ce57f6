"""Adapters where they are meant to train: packed rows, the fused log-probabilities and bfloat16, on a GPU."""

import numpy as np
import pytest
import torch
from learning import random_rows
from tolerances import relative_error
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import pack
from manus_fast.learn.backend import SingleProcessBackend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy, Reference
from manus_fast.learn.update import PolicyGradientUpdate
from manus_fast.modeling.lora import LoRAConfig
from manus_fast.ops import dispatch
from manus_fast.rollout.engine import Request, generate
from manus_fast.rollout.engines.hf import HFEngine

pytest.importorskip("peft")

ROWS = random_rows(8, seed=3)
PLACES = [
    pytest.param("cpu", "float32", id="cpu"),
    pytest.param("cuda", "float32", id="cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "bfloat16", id="cuda bfloat16", marks=pytest.mark.gpu),
]


def backend_on(device, dtype="float32", **options):
    """Over a model wide enough for every kernel, with adapters that change something."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=384, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float().to(device)
        adapted = LoRAConfig(rank=4, alpha=8.0).adapt(model, seed=1)
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.data = (0.02 * torch.randn(parameter.shape)).to(device)
    return SingleProcessBackend(Policy(adapted, **options), dtype=dtype)


def gradient(backend, rows_each=8):
    """Of the mean log-probability with respect to all adapters, float32 on the CPU, in micro-batches."""
    packed = pack(ROWS).to(backend.policy.device)
    for index in np.split(np.arange(len(ROWS)), len(ROWS) // rows_each):
        part = packed.select(index)
        backend.backward(-backend.policy.score(part, entropy=True).log_prob.sum() / packed.trainable_tokens)
    found = backend.gradients()
    assert found and all(".lora_" in name for name in found)
    flat = torch.cat([found[name].cpu().flatten() for name in sorted(found)])
    backend.discard()
    return flat


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_gradient_is_that_of_plain_torch_and_of_every_packing(device, dtype):
    with dispatch.forced("reference"):
        exact = gradient(backend_on("cpu"))
        plain = gradient(backend_on(device, dtype))
    backend = backend_on(device, dtype)
    whole, parts = gradient(backend), gradient(backend, rows_each=2)
    if dtype == "float32":
        assert relative_error(whole, exact) < 1e-3 and relative_error(parts, whole) < 1e-3
    else:
        bound = 2 * relative_error(plain, exact)
        assert 0 < bound < 0.5 and relative_error(whole, exact) < bound and relative_error(parts, exact) < bound


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_an_update_moves_adapters_alone_away_from_the_base(device, dtype):
    backend = backend_on(device, dtype, critic="shared")
    policy, base = backend.policy, Reference(backend.policy).log_prob(pack(ROWS).to(device))
    frozen = {n: p.detach().clone() for n, p in policy.named_parameters() if not p.requires_grad}
    before = {name: master.clone() for name, master in backend.named_masters()}
    config = PPOConfig(batch_size=4, kl_coef=0.1, epochs=2)
    update = PolicyGradientUpdate(policy, backend, config, temperature=1.0, gradient_accumulation_steps=2, seed=1)
    for iteration in range(2):
        stats = update.run(ROWS, iteration=iteration, progress=0.0, learning_rate=1e-2)
        assert (
            stats["update/steps"] == 4
            and stats["update/skipped_steps"] == 0
            and np.isfinite(list(stats.values())).all()
        )
    assert stats["policy/ref_kl"] != 0 and stats["update/grad_norm"] > 0
    assert all(torch.equal(p, frozen[n]) for n, p in policy.named_parameters() if n in frozen)
    assert all(not torch.equal(master, before[name]) for name, master in backend.named_masters())
    assert torch.equal(Reference(policy).log_prob(pack(ROWS).to(device)), base)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_what_is_sampled_through_adapters_is_what_is_scored(device, dtype):
    backend = backend_on(device, dtype)
    policy = backend.policy
    engine = HFEngine(policy.model.get_base_model(), [999], max_slots=4, max_length=64)
    engine.load(policy.weights_for(engine), 1)
    prompts = [np.arange(1, 9 + n, dtype=np.int32) for n in range(4)]
    asked = [Request(n, prompt, seed=n, max_tokens=20) for n, prompt in enumerate(prompts)]
    rows, sampled = [], []
    for prompt, done in zip(prompts, generate(engine, asked), strict=True):
        ids = np.concatenate([prompt, done.ids]).astype(np.int64)
        mask, zeros = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
        rows.append(Row(ids, mask, np.where(mask, 0, -1).astype(np.int32), zeros, zeros, episode=len(rows)))
        sampled.append(done.log_probs)
    packed = pack(rows)
    scored = policy.score_all(packed.to(device)).log_prob.cpu().numpy()[packed.loss_mask.numpy()]
    gap = np.abs(np.concatenate(sampled) - scored)
    assert len(gap) > 40 and (gap.max() < 2e-3 if dtype == "float32" else gap.mean() < 0.05)
