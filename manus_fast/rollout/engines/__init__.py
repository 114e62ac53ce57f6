"""The engines by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from manus_fast.rollout.engine import Engine
from manus_fast.rollout.scheduler import RolloutConfig

ENGINES = ("hf", "openai")
"""openai is an endpoint's model, which plays (`TeacherPlayer`) and is not trained."""


def make_engine(config: RolloutConfig, model: Any, end_ids: Collection[int]) -> Engine:
    """The engine that `config.engine` names, over `model`.

    Raises:
        ValueError: an engine that is not here, or limits it cannot serve.
    """
    if config.engine not in ENGINES:
        raise ValueError(f"rollout.engine: expected one of {', '.join(ENGINES)}, got {config.engine!r}")
    if config.engine == "openai":
        raise ValueError("rollout.engine: expected hf, which samples from the model itself, got 'openai', which only "
                         "eval and data distill can use")  # fmt: skip
    from manus_fast.rollout.engines.hf import HFEngine

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or config.max_length
    return HFEngine(model, frozenset(end_ids), max_slots=config.slots, max_length=min(config.max_length, positions))
