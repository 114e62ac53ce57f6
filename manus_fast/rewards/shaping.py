"""Rewards of a turn beyond the environment's own: named parts, each added as written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manus_fast.envs.config import RewardConfig


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
