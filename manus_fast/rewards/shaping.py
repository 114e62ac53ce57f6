"""Rewards of a turn: named parts, each a weight times an amount, logged apart.

| part           | amount                                                                          | default weight   |
|----------------|---------------------------------------------------------------------------------|------------------|
| environment    | what the environment pays                                                       | 1                |
| success        | 1 on the turn that solves the task                                              | success_bonus    |
| progress       | change of the share of subgoals fulfilled, where the environment tells it       | progress_bonus   |
| format         | 1 for a reply of the right form                                                 | format_bonus     |
| step_penalty   | -1                                                                              | 0.01             |
| invalid_action | -1 for an action that is missing or not admissible, unless a token limit cut it | 0.1              |

The default weights come from `environment.reward_config`, whose numbers are added as they are written (a step_penalty
of -0.01 is a weight of 0.01 here). The config's `rewards` block names parts and weights: a part named there has its
weight from there, and `environment` counts only if it is named. `rewards/episode.py` has the parts that look at a whole
episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from manus_fast.envs.config import RewardConfig

TURN_PARTS = ("environment", "success", "progress", "format", "step_penalty", "invalid_action")
# Their amounts are negative: a weight below 0 would reward what it is meant to punish.
PENALTIES = ("step_penalty", "invalid_action")


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
    progress: float = 0.0
    """Change of the share of the task's subgoals that are fulfilled, where the environment tells it."""


Shape = Callable[[TurnFacts], dict[str, float]]
"""Named reward parts of a turn; a part that does not apply is left out."""


def turn_weights(config: RewardConfig, rewards: Mapping[str, float]) -> dict[str, float]:
    """The weight of every turn part: what `rewards` gives it, else what `config` adds."""
    weights = {
        "environment": 0.0 if rewards else 1.0,
        "success": config.success_bonus,
        "progress": config.progress_bonus,
        "format": config.format_bonus,
        "step_penalty": -config.step_penalty,
        "invalid_action": -config.invalid_action_penalty,
    }
    return {name: rewards.get(name, weight) for name, weight in weights.items()}


def make_shape(config: RewardConfig, rewards: Mapping[str, float] | None = None) -> Shape:
    """The reward of a turn by parts, for `environment.reward_config` and the `rewards` block."""
    weights = turn_weights(config, rewards or {})

    def shape(facts: TurnFacts) -> dict[str, float]:
        amounts = {
            "environment": facts.env_reward,
            "success": float(facts.success),
            "progress": facts.progress,
            "format": float(facts.format_ok),
            "step_penalty": -1.0,
            "invalid_action": -1.0 if not facts.admissible and not facts.excused else 0.0,
        }
        parts = {name: weights[name] * amount for name, amount in amounts.items()}
        return {name: value for name, value in parts.items() if value or (name == "environment" and weights[name])}

    return shape
