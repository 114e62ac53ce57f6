"""Which groups of episodes an update learns from, and whether more of them have to be played.

A group whose episodes all earned the same has no group advantage: its tokens carry no gradient, and count in the loss's
denominator all the same. `drop_zero_variance` leaves such groups out; `dynamic_sampling` (DAPO, Yu et al. 2025, arXiv
2503.14476, section 3.2) plays new groups in their place; `variance_top_p` keeps the groups whose rewards vary most
(RAGEN, Wang et al. 2025, arXiv 2504.20073, section 3.3).

    selection = Selection(config, groups=16)
    while selection.wants_more:
        selection.add(play(16 more groups))
    selection.trajectories, selection.kept     # all that were played, and which of them to learn from
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from manus_fast.agent.trajectory import Trajectory

if TYPE_CHECKING:
    from manus_fast.learn.losses import PPOConfig

# Rewards that differ by less are equal: sums of the same parts in another order.
_SAME = 1e-6


class NothingToLearnError(ValueError):
    """Too many iterations in a row without an episode to learn from."""


class Selection:
    """The episodes of one iteration.

    Args:
        config: its filters are used.
        groups: how many groups an update is to learn from.
    """

    def __init__(self, config: PPOConfig, groups: int):
        self._config, self._groups = config, groups
        self.trajectories: list[Trajectory] = []
        self.batches = 0
        """How many times episodes were played for this iteration."""

    @property
    def wants_more(self) -> bool:
        """Whether another batch of groups is to be played."""
        if self.batches == 0:
            return True
        if not self._config.dynamic_sampling or self.batches >= self._config.max_num_gen_batches:
            return False
        return len(self._telling()) < self._groups

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Takes in whole groups, each with a number of its own."""
        self.trajectories += trajectories
        self.batches += 1

    @property
    def kept(self) -> list[bool]:
        """For each trajectory, whether to learn from it. Failed episodes never are."""
        config = self._config
        chosen = {t.group for t in self.trajectories}
        if config.filters_groups:
            telling = self._telling()
            chosen = set(telling[: self._groups] if config.dynamic_sampling else telling)
        if config.variance_top_p is not None:
            spread = {group: std for group, std in self._spread().items() if group in chosen}
            chosen = _top_share(spread, config.variance_top_p)
        return [t.valid and t.group in chosen for t in self.trajectories]

    def metrics(self) -> dict[str, float]:
        """Named figures for tracking, over all that was played; none where episodes are alone in their groups."""
        spread = self._spread()
        if len(self.trajectories) == len({t.group for t in self.trajectories}):
            return {}
        kept = self.kept
        return {
            "filter/zero_variance_share": 1.0 - len(self._telling()) / len(spread) if spread else 0.0,
            "filter/kept_share": float(np.mean(kept)) if kept else 0.0,
            "filter/gen_batches": float(self.batches),
        }

    def _spread(self) -> dict[int, float]:
        """Standard deviation of the rewards of each group with a valid episode, in the order of play."""
        rewards: dict[int, list[float]] = {}
        for t in self.trajectories:
            if t.valid:
                rewards.setdefault(t.group, []).append(t.reward)
        return {group: float(np.std(r)) if max(r) - min(r) > _SAME else 0.0 for group, r in rewards.items()}

    def _telling(self) -> list[int]:
        """Groups whose rewards differ."""
        return [group for group, std in self._spread().items() if std > 0]


def _top_share(spread: dict[int, float], share: float) -> set[int]:
    """The fewest groups, those that vary most, whose deviations add up to `share` of all; ties go to the first."""
    order = sorted(spread, key=lambda group: -spread[group])
    total, reached, chosen = sum(spread.values()), 0.0, set()
    for group in order:
        if reached >= share * total - 1e-12:
            break
        reached += spread[group]
        chosen.add(group)
    return chosen


class EmptySteps:
    """Counts iterations without an episode to learn from, and ends a run that has too many of them in a row.

    Args:
        limit: iterations in a row after which `check` raises.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.in_row = 0

    def check(self, selection: Selection) -> None:
        """Takes an iteration into account.

        Raises:
            NothingToLearnError: it was the `limit`-th empty one in a row.
        """
        if any(selection.kept):
            self.in_row = 0
            return
        self.in_row += 1
        if self.in_row >= self.limit:
            valid = [t.reward for t in selection.trajectories if t.valid]
            if valid:
                why = (
                    f"every group's episodes earned the same (rewards from {min(valid):.3g} to {max(valid):.3g} in the "
                    "last one): use easier tasks, a larger training.group_size or a reward with more steps"
                )
            else:
                errors = [t.error for t in selection.trajectories if t.error]
                why = "every episode failed" + (f" ({errors[0]})" if errors else "")
            raise NothingToLearnError(
                f"training stopped after {self.in_row} iterations in a row with nothing to learn from: {why}"
            )
