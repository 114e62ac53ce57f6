"""ALFWorld (Shridhar et al., ICLR 2021): household tasks in text, on the published games or on our own.

Games come from `alfworld-download` or from `make_games`. They are played by the real engine in worker processes
(`backend: textworld`), by the native one (`native`), or by whichever a game needs (`auto`). The visual mode
(AI2-THOR) is out of scope.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from manus_fast.envs.alfworld.auto import AutoBatch, AutoEnvs
from manus_fast.envs.alfworld.grammar import grammar_of
from manus_fast.envs.alfworld.layout import TASK_TYPES
from manus_fast.envs.alfworld.native import NativeBatch, Worlds
from manus_fast.envs.alfworld.panels import SPLITS, find_root, find_tasks
from manus_fast.envs.alfworld.textworld import TextWorldEnv, engine_version, read_game
from manus_fast.envs.base import AsyncEnvs, EnvBatch, InlineEnvs, Task, register
from manus_fast.envs.batch import EnvList
from manus_fast.envs.pool import WorkerPool
from manus_fast.versions import cores

_BACKENDS = ("native", "textworld", "auto")
_INSTRUCTIONS = """You are in a household and have a task to complete. Commands:
look; inventory; help; go to R; open R; close R; examine R; examine O; take O from R; {put}; use O;
clean O with R; heat O with R; cool O with R; slice O with O.
R is a receptacle and O an object, each with its number, as in "take mug 1 from desk 2". You carry one object at a
time. Objects in a closed receptacle are seen and taken once it is open."""
_PUT = {"0.3": "put O in/on R", "0.4": "move O to R"}


class AlfWorld:
    """The environment `alfworld`.

    backend: textworld, native, or auto: native for the games that it plays exactly, the others textworld.
    data_path: folder of the games; by default `$ALFWORLD_DATA`, then `~/.cache/alfworld`.
    max_steps: commands per episode, 50 as in the literature; None means 50.
    task_types: some of the six, by default all.
    workers, reset_timeout, step_timeout, recycle_after: of the `WorkerPool` that plays the real engine; `workers`
        defaults to `training.rollout_workers`, and without that to one per core.
    fast: memoise what the engine parses again and again (the text is the same, see `fast.py`).
    Raises ValueError on a bad option, and where no games or no engine are found.
    """

    name = "alfworld"
    splits = SPLITS

    def __init__(
        self,
        backend: str = "auto",
        data_path: str | None = None,
        max_steps: int | None = None,
        task_types: Sequence[str] = TASK_TYPES,
        workers: int | None = None,
        reset_timeout: float = 120.0,
        step_timeout: float = 60.0,
        recycle_after: int | None = 200,
        fast: bool = True,
    ):
        if backend not in _BACKENDS:
            raise ValueError(f"environment.backend: expected {', '.join(_BACKENDS)}, got {backend!r}")
        self.backend = backend
        unknown = [name for name in task_types if name not in TASK_TYPES]
        if unknown or not task_types:
            raise ValueError(f"task_types: expected some of {', '.join(TASK_TYPES)}, got {list(task_types)!r}")
        self.max_steps = 50 if max_steps is None else max_steps
        self.task_types = tuple(t for t in TASK_TYPES if t in task_types)
        self.root = find_root(data_path)
        if backend == "textworld":
            engine_version()
        if workers is not None and workers < 1:
            raise ValueError(f"environment.options.workers: expected null or an integer >= 1, got {workers!r}")
        self.workers = workers
        self._pool: dict[str, Any] = {
            "reset_timeout": reset_timeout,
            "step_timeout": step_timeout,
            "recycle_after": recycle_after,
        }
        self._fast = fast
        self._tasks: dict[str, list[Task]] = {}
        # A run makes worlds anew each iteration, and a game takes milliseconds to read.
        self._worlds: Worlds = OrderedDict()

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._tasks:
            self._tasks[split] = find_tasks(self.root, split, self.task_types)
        return self._tasks[split]

    @functools.cached_property
    def instructions(self) -> str:
        """What a player is told, in the grammar of the first whole game. Raises ValueError where there is none."""
        for split in self.splits:
            for task in self.tasks(split) if (self.root / split).is_dir() else []:
                # A file that is cut off fails its own episodes, not the run.
                with contextlib.suppress(ValueError):
                    game = read_game(self.root / task.data["game"])
                    return _INSTRUCTIONS.format(put=_PUT[grammar_of(game["grammar"])])
        raise ValueError(f"environment.options.data_path: expected games in {self.root}, got none that is whole")

    def _factory(self) -> functools.partial[TextWorldEnv]:
        return functools.partial(TextWorldEnv, str(self.root), self.max_steps, self._fast)

    def make_batch(self, slots: int) -> EnvBatch:
        """Native worlds are stepped together and cloned in microseconds. Those of the real engine run in this
        process, one after the other, and `clone` and `restore` play a world's commands again."""
        if self.backend == "textworld":
            return EnvList(self._factory(), slots)
        native = NativeBatch(self.root, slots, self.max_steps, self._worlds)
        return native if self.backend == "native" else AutoBatch(native, lambda: EnvList(self._factory(), slots))

    def _make_pool(self, slots: int) -> WorkerPool:
        engine_version()
        workers = min(slots, self.workers or cores())
        return WorkerPool(self._factory(), slots=slots, workers=workers, **self._pool)

    def make_async(self, slots: int) -> AsyncEnvs:
        if self.backend == "textworld":
            return self._make_pool(slots)
        native = NativeBatch(self.root, slots, self.max_steps, self._worlds)
        return InlineEnvs(native) if self.backend == "native" else AutoEnvs(native, lambda: self._make_pool(slots))


register("alfworld", AlfWorld)
