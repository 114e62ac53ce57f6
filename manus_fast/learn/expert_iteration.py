"""What expert iteration learns from a round's trees: the `expert_iteration` block, and the rows of solved episodes.

The run itself is manus_fast/expert_iteration.py. After Anthony et al., "Thinking Fast and Slow with Deep Learning and
Tree Search" (NeurIPS 2017): search is the expert that the policy imitates, and a better policy makes a better expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manus_fast.agent.trajectory import Row, Trajectory
from manus_fast.search.base import Tree
from manus_fast.search.targets import rows_once


@dataclass
class ExpertIterationConfig:
    """The `expert_iteration` block. How a task is searched is in `search`, how episodes are imitated in `sft`.

    Raises:
        ValueError: a number out of range.
    """

    rounds: int = 2
    tasks: int = 400
    """Training tasks that a round searches, none of them twice in a run."""
    keep: int = 1
    """Solved episodes of one tree that are imitated, those of highest return; above 1 it takes
    search.stop_on_success: false to have several."""
    replay: bool = True
    """Whether the episodes of earlier rounds are imitated again."""
    restart: bool = False
    """Whether each round trains the run's first policy instead of the one before."""
    fit_values: bool = False
    """Fit a value model to each round's trees; from the second round on the search takes its values from it."""

    def __post_init__(self) -> None:
        for name in ("rounds", "tasks", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"expert_iteration.{name}: expected an integer >= 1, got {getattr(self, name)}")


def solved_episodes(trees: Sequence[Tree], keep: int = 1) -> list[Trajectory]:
    """The solved episodes of each tree, at most `keep`, those of highest discounted return first, then the earliest."""
    episodes = []
    for tree in trees:
        solved = [node for node in tree.nodes if node.success and node.error is None]
        solved.sort(key=tree.return_of, reverse=True)  # stable: nodes are in the order in which they were found
        episodes += [tree.trajectory(node, member=member) for member, node in enumerate(solved[:keep])]
    return episodes


def imitation_rows(rounds: Sequence[Sequence[Trajectory]]) -> list[Row]:
    """Rows of all rounds' episodes, every turn of a tree trained on once.

    Node ids tell the turns of one round apart; those of two rounds have nothing to do with each other, though the
    numbers are the same. `Row.episode` and `Row.group` count through.
    """
    rows: list[Row] = []
    before = groups = 0
    for episodes in rounds:
        for row in rows_once(episodes):
            row.episode += before
            row.group = groups + episodes[row.episode - before].group
            rows.append(row)
        before += len(episodes)
        groups += 1 + max((episode.group for episode in episodes), default=-1)
    return rows
