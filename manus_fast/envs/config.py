"""Config of the environment: which world, which tasks, and what is added to its rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RewardConfig:
    """The config's `environment.reward_config` block. Everything is added as it is written: a penalty is negative.

    Raises:
        ValueError: a positive penalty, or a number that isn't finite.
    """

    success_bonus: float = 0.0
    """Added to the turn that solves the task, on top of the environment's own reward, which is 1 for a solved task in
    every environment here: success is worth 1 in all."""
    progress_bonus: float = 0.0
    """Times the change of `info["progress"]`, the share of subgoals that are fulfilled: potential-based shaping without
    discount (Ng, Harada and Russell 1999), whose sum over an episode is the progress at its end. Losing ground costs
    what gaining it paid."""
    step_penalty: float = -0.01
    """Added to every turn."""
    format_bonus: float = 0.0
    """Added to a turn whose reply has the right form."""
    invalid_action_penalty: float = -0.1
    """Added to a turn whose action is missing or not admissible, unless a token limit cut the reply."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value):
                raise ValueError(f"environment.reward_config.{name}: expected a finite number, got {value}")
        for name in ("step_penalty", "invalid_action_penalty"):
            value = getattr(self, name)
            if value > 0:
                raise ValueError(
                    f"environment.reward_config.{name}: expected a number <= 0 (it is added as written), got {value}"
                )


@dataclass
class EnvironmentConfig:
    """The config's `environment` block.

    Raises:
        ValueError: a `max_steps` below 1.
    """

    name: str = "household"
    """A registered environment."""
    split: str = "train"
    """The tasks to train on."""
    max_steps: int | None = None
    """Turns after which an episode is cut; null: the environment's own limit."""
    backend: Literal["native", "textworld", "auto"] = "auto"
    """Which implementation serves the environment, where it has several."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the environment takes besides: see its own page."""
    reward_config: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"environment.max_steps: expected an integer >= 1 or null, got {self.max_steps}")
