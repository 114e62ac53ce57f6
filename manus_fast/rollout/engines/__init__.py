"""The engines by name."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from manus_fast.rollout.engine import Engine
from manus_fast.rollout.scheduler import RolloutConfig

log = logging.getLogger("manus_fast.rollout")

ENGINES = ("hf", "vllm", "openai")
"""openai is an endpoint's model, which plays (`TeacherPlayer`) and is not trained."""

NAMES = (*ENGINES, "auto")


def make_engine(
    config: RolloutConfig,
    model: Any,
    end_ids: Collection[int],
    dtype: torch.dtype | None = None,
    adapter_rank: int = 0,
) -> Engine:
    """The engine that `config.engine` names, over `model`.

    Args:
        config: its engine, slots, max_length, sleep and what is said of vllm are used.
        model: a Hugging Face causal LM. `hf` samples from these very weights, vLLM copies them.
        end_ids: token ids that end a reply.
        dtype: what vLLM computes in; None: the model's own.
        adapter_rank: of the adapters that are trained; 0: none are.

    Raises:
        ValueError: an engine that is not here, or limits it cannot serve.
    """
    if config.engine not in NAMES:
        raise ValueError(f"rollout.engine: expected one of {', '.join(NAMES)}, got {config.engine!r}")
    if config.engine == "openai":
        raise ValueError("rollout.engine: expected hf, vllm or auto, which sample from the model itself, got 'openai', "
                         "which only eval and data distill can use")  # fmt: skip
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or config.max_length
    limits = {"max_slots": config.slots, "max_length": min(config.max_length, positions)}
    if choose(config.engine, next(model.parameters()).device) == "vllm":
        from manus_fast.rollout.engines.vllm import VLLMEngine

        if config.vllm_adapters and not adapter_rank:
            raise ValueError("rollout.vllm_adapters: expected false without model.lora, got true")
        more = {"eager": config.vllm_eager, "can_sleep": config.sleep > 0}
        more |= {"adapter_rank": adapter_rank if config.vllm_adapters else 0}
        more |= {"prefill_every": config.vllm_prefill_every}
        return VLLMEngine(model, frozenset(end_ids), dtype=dtype, **limits, **more)
    from manus_fast.rollout.engines.hf import HFEngine

    return HFEngine(model, frozenset(end_ids), **limits)


def choose(name: str, device: torch.device) -> str:
    """What serves: `auto` is vLLM for a model on a GPU where a supported version is installed, else hf."""
    if name != "auto":
        return name
    from manus_fast.rollout.engines.vllm_core import missing

    reason = "the model is on the CPU" if device.type != "cuda" else missing()
    log.info("rollout.engine auto: %s", "vllm" if reason is None else f"hf, because {reason}")
    return "vllm" if reason is None else "hf"
