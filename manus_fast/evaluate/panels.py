"""Fixed task panels: each task once, in the same order on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manus_fast.agent.trajectory import Trajectory
from manus_fast.envs.base import Environment, Task
from manus_fast.evaluate.metrics import Report, TaskRecord, summarize

Play = Callable[[Sequence[Task]], list[Trajectory]]
"""Plays each task once with one model and returns the episodes in any order (the trainer builds it)."""


@dataclass(frozen=True)
class Panel:
    """The tasks that a model is measured on.

    Raises:
        ValueError: no task, or two tasks with one id.
    """

    suite: str
    split: str
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"panel: expected at least one task in {self.suite}/{self.split}, got none")
        if len({task.id for task in self.tasks}) != len(self.tasks):
            raise ValueError(f"panel: expected distinct task ids in {self.suite}/{self.split}, got some twice")


def make_panel(environment: Environment, split: str, limit: int | None = None) -> Panel:
    """The panel of an environment's split.

    Args:
        environment: a registered environment.
        split: one of its splits.
        limit: take this many tasks, spread evenly over the split's order; None takes all.

    Raises:
        ValueError: unknown split, an empty split, or a limit outside 1 … number of tasks.
    """
    tasks = environment.tasks(split)
    if limit is not None and not 1 <= limit <= len(tasks):
        raise ValueError(
            f"panel.limit: expected 1 to {len(tasks)} (the tasks of {environment.name}/{split}), got {limit}"
        )
    # By index, because a split may make its tasks only when they are asked for.
    chosen = range(len(tasks)) if limit is None else spread(len(tasks), limit)
    return Panel(environment.name, split, tuple(tasks[index] for index in chosen))


def spread(n: int, k: int) -> list[int]:
    """k of the numbers 0 … n-1, rising: one from each of k equal stretches, at a place that varies by the golden ratio,
    so that tasks which go round their types in turn are not met in one type only."""
    chosen = []
    for index in range(k):
        start, end = index * n // k, (index + 1) * n // k
        chosen.append(start + int(index * 0.6180339887498949 % 1 * (end - start)))
    return chosen


def evaluate(
    panel: Panel,
    play: Play,
    model: str,
    score: Callable[[Trajectory], float] | None = None,
) -> Report:
    """Plays the panel and reports, task by task in the panel's order.

    Args:
        panel: the tasks.
        play: gets the panel's tasks and returns one trajectory for each, in any order.
        model: the name that stands in the report.
        score: of an episode; None: the environment's own where it has one, else 1 for success and 0 without.

    Raises:
        RuntimeError: `play` left tasks out, or returned some twice.
    """
    episodes: dict[str, Trajectory] = {}
    for trajectory in play(panel.tasks):
        if trajectory.task in episodes:
            raise RuntimeError(f"evaluate: play returned two episodes of task {trajectory.task!r}")
        episodes[trajectory.task] = trajectory
    missing = [task.id for task in panel.tasks if task.id not in episodes]
    if missing or len(episodes) != len(panel.tasks):
        raise RuntimeError(
            f"evaluate: expected one episode for each of {len(panel.tasks)} tasks, got {len(episodes)} "
            f"(missing: {', '.join(missing[:3]) or 'none'})"
        )
    records = [TaskRecord.of(task, episodes[task.id], score) for task in panel.tasks]
    return Report(panel.suite, panel.split, model, records, summarize(records))
