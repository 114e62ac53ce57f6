"""ALFWorld's games in the native engine (`csrc/household`): the same files, the same text, batched and cloneable.

`NativeBatch` plays what `problem.py` accepts. A game that it refuses is a failure of its slot here, and a game for
the real engine under `backend: auto`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manus_fast.envs.alfworld.grammar import grammar_of
from manus_fast.envs.alfworld.problem import Problem, read_problem
from manus_fast.envs.alfworld.textworld import read_game
from manus_fast.envs.base import Task
from manus_fast.envs.worker import describe

_KEPT = 2048
"""Games kept in memory, some tens of kilobytes each."""

Worlds = OrderedDict[tuple[Path, int], tuple[Any, str]]
"""Games that were read: file and time of change → the world as it begins, which nothing changes, and its grammar."""

_MAGIC = b"mfalfw1\n"


def make_world(problem: Problem) -> Any:
    """The native world of a problem. Raises ValueError where the native engine's limits are exceeded."""
    from manus_fast import _C

    table = dataclasses.asdict(problem)
    for thing in table["objects"]:
        extra = [name for name in ("holds", "knife") if thing[name]]
        thing["properties"] = thing.pop("abilities") + extra
    return _C.household.World(table)


class NativeBatch:
    """`EnvBatch` of `slots` worlds over game files below `root`; a step of all of them is one call into C++.

    info of every answer: `admissible`, `success`, `steps`; of a reset also `type`, `grammar`, `backend`, `engine`,
    as in the real engine's; and `progress`, the share of subgoals that are fulfilled, which the real engine does not
    tell. A game that cannot be played is `info["error"]` of its slot.

    worlds: where games are kept that were read, shared with whoever has it too; None: of this batch alone.
    """

    def __init__(self, root: str | os.PathLike[str], slots: int, max_steps: int = 50, worlds: Worlds | None = None):
        from manus_fast import _C

        self.root = Path(root)
        self.slots = slots
        self.max_steps = max_steps
        self._batch = _C.household.Batch(slots, max_steps)
        self._worlds: Worlds = OrderedDict() if worlds is None else worlds
        self._tasks: list[Task | None] = [None] * slots

    def _world(self, task: Task) -> tuple[Any, str]:
        """The world of a task and its grammar."""
        path = self.root / str(task.data.get("game", ""))
        key = (path, path.stat().st_mtime_ns if path.is_file() else 0)
        if key not in self._worlds:
            game = read_game(path)
            try:
                self._worlds[key] = (make_world(read_problem(game)), grammar_of(game["grammar"]))
            except ValueError as error:
                raise ValueError(f"native engine: {error} ({path})") from error
        self._worlds.move_to_end(key)
        while len(self._worlds) > _KEPT:
            self._worlds.popitem(last=False)
        return self._worlds[key]

    def refusal(self, task: Task) -> str | None:
        """Why this engine does not play a task's game; None when it does."""
        try:
            self._world(task)
        except ValueError as error:
            return str(error)
        return None

    def expert(self, slots: Sequence[int], kind: str | None = None) -> tuple[list[str], list[str]]:
        """The next command of an expert and its thought, per slot: planner | explorer (default) | sweep, as
        `HouseholdBatch.expert` has them."""
        return self._batch.expert(slots, kind or "explorer")

    def reset(
        self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Starts the games; they have no chance in them, so `seeds` change nothing."""
        answers: dict[int, tuple[str, dict[str, Any]]] = {}
        worlds: dict[int, Any] = {}
        for slot, task, _ in zip(slots, tasks, seeds, strict=True):
            self._tasks[slot] = None
            try:
                worlds[slot], grammar = self._world(task)
            except ValueError as error:
                answers[slot] = ("", {"error": describe(error)})
                continue
            self._tasks[slot] = task
            more = {"type": task.type, "grammar": grammar, "backend": "native", "engine": "manus_fast household"}
            answers[slot] = ("", more)
        running = list(worlds)
        self._batch.load(running, list(worlds.values()))
        found = (self._batch.texts(running), self._batch.admissible(running), self._batch.progress(running))
        for slot, text, admissible, progress in zip(running, *found, strict=True):
            info = {"admissible": admissible, "success": False, "steps": 0, "progress": progress} | answers[slot][1]
            answers[slot] = (text, info)
        return [answers[slot][0] for slot in slots], [answers[slot][1] for slot in slots]

    def step(
        self, slots: Sequence[int], actions: Sequence[str]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """One command per slot; space around it is ignored. Raises ValueError for a slot without a running game."""
        for slot in slots:
            if self._tasks[slot] is None:
                raise ValueError(f"slot: expected one with a running game, got {slot}")
        reward, terminated, truncated = self._batch.step(slots, [action.strip() for action in actions])
        found = (self._batch.admissible(slots), terminated.tolist(), self._batch.progress(slots))
        infos = [
            {"admissible": admissible, "success": won, "steps": self._batch.steps(slot), "progress": progress}
            for slot, admissible, won, progress in zip(slots, *found, strict=True)
        ]
        return self._batch.texts(slots), reward, terminated, truncated, infos

    def clone(self, src: int, dst: int) -> None:
        self._batch.clone(src, dst)
        self._tasks[dst] = self._tasks[src]

    def save(self, slot: int) -> bytes:
        """The state with the task it belongs to; fit for `restore` in any batch over the same games."""
        task = self._tasks[slot]
        if task is None:
            raise ValueError(f"slot: expected one with a running game, got {slot}")
        head = {"id": task.id, "type": task.type, "split": task.split, "data": dict(task.data)}
        return _MAGIC + json.dumps(head).encode() + b"\n" + self._batch.save(slot)

    def restore(self, slot: int, state: bytes) -> None:
        """Raises ValueError on bytes that `save` did not make, or when the game file has changed since."""
        magic, head, rest = state[: len(_MAGIC)], *state[len(_MAGIC) :].partition(b"\n")[::2]
        try:
            task = Task(**json.loads(head)) if magic == _MAGIC else None
        except (ValueError, TypeError):
            task = None
        if task is None:
            raise ValueError(f"state: expected bytes made by save, got {state[:20]!r}…")
        self._batch.load([slot], [self._world(task)[0]])
        self._tasks[slot] = task
        self._batch.restore(slot, rest)

    def close(self) -> None:
        self._worlds = OrderedDict()
        self._tasks = [None] * self.slots
        self._batch = None


class NativeEnv:
    """One world of a `NativeBatch`, as an `Env`."""

    def __init__(self, root: str | os.PathLike[str], max_steps: int = 50):
        self._batch = NativeBatch(root, 1, max_steps)

    def reset(self, task: Task, seed: int) -> tuple[str, dict[str, Any]]:
        """Raises ValueError for a game that the native engine does not play."""
        observations, infos = self._batch.reset([0], [task], [seed])
        if "error" in infos[0]:
            raise ValueError(infos[0]["error"].removeprefix("ValueError: "))
        return observations[0], infos[0]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observations, reward, terminated, truncated, infos = self._batch.step([0], [action])
        return observations[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), infos[0]

    def expert(self, kind: str | None = None) -> tuple[str, str]:
        """The next command of an expert and its thought: planner | explorer (default) | sweep."""
        commands, thoughts = self._batch.expert([0], kind)
        return commands[0], thoughts[0]

    def clone(self) -> NativeEnv:
        copy = NativeEnv(self._batch.root, self._batch.max_steps)
        # Its game is read already: a clone need not read it again.
        copy._batch._worlds = self._batch._worlds.copy()
        copy._batch.restore(0, self._batch.save(0))
        return copy

    def save(self) -> bytes:
        return self._batch.save(0)

    def restore(self, state: bytes) -> None:
        self._batch.restore(0, state)

    def close(self) -> None:
        self._batch.close()
