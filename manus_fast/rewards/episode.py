"""Rewards that look at a whole episode, added once it is over: a reward model, functions of the user, overlength."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from manus_fast.agent.trajectory import Row, Trajectory, build_rows
from manus_fast.rewards.functions import load_function
from manus_fast.rewards.shaping import PENALTIES, TURN_PARTS

Scorer = Callable[[Sequence[Row]], np.ndarray]
"""What a reward or value model is to the rest of the house: rows → float32 [n]."""

EPISODE_PARTS = ("reward_model",)


def check_rewards(rewards: Mapping[str, float]) -> None:
    """Raises ValueError for a name that is neither a part nor "module:function" (the nearest part is named), a weight
    that isn't finite, or a negative weight of a penalty."""
    names = (*TURN_PARTS, *EPISODE_PARTS)
    for name, weight in rewards.items():
        if name not in names and ":" not in name:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"rewards: expected {', '.join(names)} or module:function, got {name!r}{hint}")
        if not math.isfinite(weight):
            raise ValueError(f"rewards.{name}: expected a finite number, got {weight}")
        if name in PENALTIES and weight < 0:
            raise ValueError(
                f"rewards.{name}: expected a weight >= 0 (the part itself is -1 a time), got {weight}; "
                "environment.reward_config is where penalties are negative numbers"
            )


class EpisodeRewards:
    """The parts of the `rewards` block that judge whole episodes.

    Args:
        rewards: the block; its turn parts are left to the rollout.
        score: of a reward model, where the block names one. An episode's score is that of its last row.
        overlong: sampled tokens an episode may have, over how many of them before that the penalty grows, and the
            penalty at the end (DAPO, arXiv 2503.14476, equation 13); None: no such part.

    Raises:
        ValueError: what `check_rewards` and `load_function` refuse; a reward model without a model, or the reverse.
    """

    def __init__(
        self,
        rewards: Mapping[str, float],
        score: Scorer | None = None,
        overlong: tuple[int, float, float] | None = None,
    ):
        check_rewards(rewards)
        if "reward_model" in rewards and score is None:
            raise ValueError(
                "rewards.reward_model: expected a reward model to score with, got none (set reward_model.path)"
            )
        self._weights = {name: weight for name, weight in rewards.items() if name not in TURN_PARTS}
        self._functions = {name: load_function(name) for name in self._weights if ":" in name}
        self._score = score
        self._overlong = overlong

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds every part to the turns of the valid episodes, in place. An episode that cannot be judged (None or a
        number that isn't finite) becomes invalid, with the reason in `error`.

        Raises:
            ValueError: a function raised, or returned neither a number nor one number a turn.
        """
        for name, function in self._functions.items():
            for trajectory in trajectories:
                if trajectory.valid and trajectory.turns:
                    self._add(trajectory, name, _call(name, function, trajectory))
        if "reward_model" in self._weights:
            for trajectory, value in self._scores(trajectories):
                self._add(trajectory, "reward_model", value)
        if self._overlong is not None:
            for trajectory in trajectories:
                penalty = overlong_penalty(trajectory.sampled_tokens, *self._overlong)
                if trajectory.valid and penalty:
                    _put(trajectory.turns[-1], "overlong", penalty)

    def _scores(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, float]]:
        rows = {row.episode: row for row in build_rows(trajectories)}  # the last row of each episode
        if not rows:
            return []
        scores = np.asarray(self._score(list(rows.values())), np.float32)
        if scores.shape != (len(rows),):
            raise ValueError(f"rewards.reward_model: expected scores [{len(rows)}], got {list(scores.shape)}")
        return [(trajectories[episode], float(value)) for episode, value in zip(rows, scores, strict=True)]

    def _add(self, trajectory: Trajectory, name: str, value: float | Sequence[float]) -> None:
        values = [value] if isinstance(value, float) else list(value)
        if not all(math.isfinite(v) for v in values):
            trajectory.error = f"reward {name}: expected a finite number, got {value}"
            return
        for turn, amount in zip(trajectory.turns[-len(values) :], values, strict=True):
            _put(turn, name, self._weights[name] * amount)


def overlong_penalty(tokens: int, limit: int, buffer: float, penalty: float) -> float:
    """0 up to limit - buffer tokens, then falling linearly to -penalty at the limit (and beyond)."""
    if buffer <= 0:
        return 0.0
    return -penalty * min(max((tokens - (limit - buffer)) / buffer, 0.0), 1.0)


def _call(name: str, function: Callable, trajectory: Trajectory) -> float | list[float]:
    """What the function says, as a float, or a list of one float a turn; nan for None."""
    try:
        value = function(trajectory)
    except Exception as error:
        raise ValueError(
            f"rewards.{name}: expected a number for {trajectory.id}, got {type(error).__name__}: {error}"
        ) from error
    if value is None:
        return math.nan
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = None
    if array is None or array.shape not in ((), (len(trajectory.turns),)):
        raise ValueError(
            f"rewards.{name}: expected a number or {len(trajectory.turns)} numbers, one a turn, got {value!r}"
        )
    return float(array) if array.shape == () else array.tolist()


def _put(turn, name: str, value: float) -> None:
    turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + value
    turn.reward += value
