"""Rewards of a turn beyond the environment's own: named parts, each added as written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnFacts:
    """What is known about a turn once its environment has answered."""

    env_reward: float
    success: bool
    """The task was solved by this turn."""
    action: str
    format_ok: bool
    """The reply has exactly the asked form."""
    admissible: bool
    excused: bool
    """The reply was cut by a token limit, and such replies are not held against the agent."""


Shape = Callable[[TurnFacts], dict[str, float]]
"""Named reward parts of a turn; a part that does not apply is left out."""


@dataclass
class RewardConfig:
    """Reward per turn in the environment's own unit (a solved household task gives 1). Everything is added as written,
    so penalties are negative.

    Raises:
        ValueError: a positive penalty, or a value that is not finite.
    """

    success_bonus: float = 1.0
    """Added to the turn that solves the task."""
    step_penalty: float = -0.01
    """Added to every turn."""
    format_bonus: float = 0.0
    """Added to every turn whose reply has exactly the asked form."""
    invalid_action_penalty: float = -0.1
    """Added to every turn whose action is missing or not admissible, unless a token limit cut it."""

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if not math.isfinite(value):
                raise ValueError(f"reward_config.{name}: expected a finite number, got {value}")
            if name.endswith("_penalty") and value > 0:
                raise ValueError(f"reward_config.{name}: expected a number <= 0 (added as written), got {value}")


def make_shape(config: RewardConfig) -> Shape:
    """The shaping function of a config."""

    def shape(facts: TurnFacts) -> dict[str, float]:
        parts = {"step": config.step_penalty}
        if facts.success:
            parts["success"] = config.success_bonus
        if facts.format_ok:
            parts["format"] = config.format_bonus
        if not facts.admissible and not facts.excused:
            parts["invalid_action"] = config.invalid_action_penalty
        return {name: value for name, value in parts.items() if value}

    return shape
