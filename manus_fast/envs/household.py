"""The household world: ALFWorld's rules and texts in C++, with generated layouts and tasks and two experts.

A game is a room with receptacles (a cabinet, a desk) and objects (a mug, a book), one of ALFRED's six task types, and
text commands. Everything runs in `csrc/household`; this module is its face: options, tasks, slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from manus_fast import _C
from manus_fast.envs.base import InlineEnvs, Task

SPLITS = ("train", "valid_seen", "valid_unseen")
TASK_TYPES: tuple[str, ...] = tuple(_C.household.task_types)
EXPERTS = ("planner", "explorer", "sweep")
GRAMMARS = ("move", "put")
THOUGHTS = ("full", "brief")

INSTRUCTIONS = """You are in a household and have a task to fulfil. You act by giving one command per turn:
look: look around you
inventory: check what you carry
go to (receptacle): walk to a receptacle
open (receptacle), close (receptacle): where you are
examine (something): look closely at a receptacle, or at the object in your hand
take (object) from (receptacle): you can carry one object
{put}: put down what you carry
use (object): turn on a lamp
heat (object) with (receptacle), cool (object) with (receptacle), clean (object) with (receptacle): with a microwave, \
a fridge or a sinkbasin, holding the object
slice (object) with (object): with a knife in hand
Names have numbers, as in "go to cabinet 2". A command that cannot be carried out gives "Nothing happens."."""


class HouseholdTasks(Sequence[Task]):
    """The tasks of one split, made when asked for: nothing is stored, index i is the same task on every machine."""

    def __init__(self, environment: Household, split: str, size: int):
        self._environment = environment
        self._split = split
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size} in {self._split}")
        return self._environment._task(self._split, index % self._size)

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(self._size))


class HouseholdBatch:
    """`EnvBatch` over native worlds. Slots are independent; calls with many slots use all threads.

    Every method raises ValueError for a slot out of range, one that occurs twice in a call, one without a game, and
    (step) one whose episode is over. A refused call changes nothing.
    """

    def __init__(self, slots: int, max_steps: int, grammar: str, expert: str, thoughts: str = "full"):
        self._batch = _C.household.Batch(slots, max_steps)
        self._options = (max_steps, grammar, expert, thoughts)
        self._put_grammar = grammar == "put"
        self._expert = expert
        self._brief = thoughts == "brief"
        self.slots = slots

    def reset(
        self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Starts one task per slot and returns the introductions. The worlds have no chance in them: `seeds` play no
        part (they are checked for length only)."""
        if not len(slots) == len(tasks) == len(seeds):
            raise ValueError(f"reset: expected as many tasks and seeds as slots ({len(slots)}), "
                             f"got {len(tasks)} and {len(seeds)}")  # fmt: skip
        self._batch.reset(slots, [_recipe(task, self._put_grammar) for task in tasks])
        return self._batch.texts(slots), self._infos(slots, [False] * len(slots))

    def step(
        self, slots: Sequence[int], actions: Sequence[str]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Plays one command per slot: feedback, reward float32 `[n]`, terminated and truncated bool `[n]`, infos.

        Space around a command is ignored, as ALFWorld does. Any text that is not an admissible command counts as a
        step and gives "Nothing happens."; what is not a `str` raises ValueError.
        """
        for i, action in enumerate(actions):
            if not isinstance(action, str):
                raise ValueError(f"actions[{i}]: expected a str, got {type(action).__name__}")
        reward, terminated, truncated = self._batch.step(slots, [action.strip() for action in actions])
        return self._batch.texts(slots), reward, terminated, truncated, self._infos(slots, terminated.tolist())

    def _infos(self, slots: Sequence[int], won: Sequence[bool]) -> list[dict[str, Any]]:
        """Of each slot: its valid commands, whether its task is solved, and the share of subgoals fulfilled."""
        return [
            {"admissible": commands, "success": success, "progress": progress}
            for commands, success, progress in zip(
                self._batch.admissible(slots), won, self._batch.progress(slots), strict=True
            )
        ]

    def expert(self, slots: Sequence[int], kind: str | None = None) -> tuple[list[str], list[str]]:
        """The next action of an expert in the present state of each slot, whatever was played before, and one line of
        thought (at most 12 words) on why.

        kind: `planner` sees everything and follows a shortest plan; `explorer` knows what the game has told so far and
        searches the likeliest unseen receptacle; `sweep` searches in list order. Default: the environment's option.
        """
        return self._batch.expert(slots, self._expert if kind is None else kind, self._brief)

    def admissible(self, slot: int) -> list[str]:
        """The valid commands in the present state, sorted."""
        return self._batch.admissible([slot])[0]

    def clone(self, src: int, dst: int) -> None:
        self._batch.clone(src, dst)

    def save(self, slot: int) -> bytes:
        """The whole state (under 3 kB), fit for `restore` in any slot of any batch with the same build."""
        return self._batch.save(slot)

    def restore(self, slot: int, state: bytes) -> None:
        self._batch.restore(slot, state)

    def fingerprint(self, slot: int) -> int:
        """64-bit hash of the game itself: its layout, objects, goal and texts."""
        return self._batch.fingerprint(slot)

    def state_hash(self, slot: int) -> int:
        """64-bit hash of what the rules depend on: equal for equal situations of one game, however they came about."""
        return self._batch.hash(slot)

    def twin(self) -> HouseholdBatch:
        """An empty batch with the same options and one slot."""
        return HouseholdBatch(1, *self._options)

    def close(self) -> None:
        """Frees the worlds; the batch is not usable afterwards."""
        self._batch = None


class HouseholdEnv:
    """`Env`: one world of its own, for scripts and play."""

    def __init__(self, batch: HouseholdBatch):
        self._batch = batch

    def reset(self, task: Task, seed: int = 0) -> tuple[str, dict[str, Any]]:
        observations, infos = self._batch.reset([0], [task], [seed])
        return observations[0], infos[0]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observations, reward, terminated, truncated, infos = self._batch.step([0], [action])
        return observations[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), infos[0]

    def expert(self, kind: str | None = None) -> tuple[str, str]:
        actions, thoughts = self._batch.expert([0], kind)
        return actions[0], thoughts[0]

    def clone(self) -> HouseholdEnv:
        other = self._batch.twin()
        other.restore(0, self._batch.save(0))
        return HouseholdEnv(other)

    def close(self) -> None:
        self._batch.close()


def _pair(name: str, value: Any) -> tuple[int, int]:
    """A count or a [low, high] range; None means the level's own."""
    if value is None:
        return (0, 0)
    pair = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2 or not all(type(bound) is int for bound in pair) or not 1 <= pair[0] <= pair[1] <= 255:
        raise ValueError(f"{name}: expected a count or [low, high] within 1 … 255, got {value!r}")
    return pair


def _count(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    return value


def _recipe(task: Task, put_grammar: bool) -> Any:
    try:
        data: Mapping[str, Any] = task.data
        difficulty = _C.household.Difficulty(
            data["level"], tuple(data["receptacles"]), tuple(data["objects"]), data["copies"]
        )
        return _C.household.Recipe(
            task.split, task.type, data["room"], data["layout"], data["seed"], difficulty, put_grammar
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"task {task.id!r}: its data is not that of a household task ({error})") from error


class Household:
    """`Environment` `household`. Options:

    max_steps: commands until an episode is truncated (50).
    level: 1 (6–8 receptacles, 6 objects), 2 (10–14, 12–18) or 3 (20–28, 30–40).
    receptacles, objects: a count or [low, high] in place of the level's; copies: most objects of one class.
    task_types: which of the six types, in turn over the tasks (all).
    num_train, num_valid_seen, num_valid_unseen: sizes of the splits (100 000, 140, 512); num_valid sets both.
    layouts: how many layouts each room has in each of train and valid_unseen (1 000).
    seed: another seed, other tasks (0). expert: default of `HouseholdBatch.expert` (explorer).
    thoughts: what the experts think: `full` (a sentence) or `brief` ("find mug", "heat mug 1").
    grammar: `move` (ALFWorld 0.4, "move O to R") or `put` (0.3, "put O in/on R"). backend: native or auto.

    Raises ValueError for a value it cannot serve.
    """

    name = "household"
    splits = SPLITS

    def __init__(
        self,
        max_steps: int = 50,
        level: int = 1,
        task_types: Sequence[str] | None = None,
        receptacles: int | Sequence[int] | None = None,
        objects: int | Sequence[int] | None = None,
        copies: int | None = None,
        num_train: int = 100_000,
        num_valid: int | None = None,
        num_valid_seen: int = 140,
        num_valid_unseen: int = 512,
        layouts: int = 1000,
        seed: int = 0,
        expert: str = "explorer",
        thoughts: str = "full",
        grammar: str = "move",
        backend: str = "native",
    ):
        self.max_steps = _count("max_steps", max_steps, 1)
        if max_steps > 65535:
            raise ValueError(f"max_steps: expected at most 65535, got {max_steps}")
        if level not in (1, 2, 3) or isinstance(level, bool):
            raise ValueError(f"level: expected 1, 2 or 3, got {level!r}")
        if task_types is not None and not isinstance(task_types, list | tuple):
            raise ValueError(f"task_types: expected a list, got {task_types!r}")
        types = TASK_TYPES if task_types is None else tuple(task_types)
        for name in types:
            if name not in TASK_TYPES:
                raise ValueError(f"task_types: expected some of {', '.join(TASK_TYPES)}, got {name!r}")
        if not types:
            raise ValueError("task_types: expected at least one, got none")
        if expert not in EXPERTS:
            raise ValueError(f"expert: expected one of {', '.join(EXPERTS)}, got {expert!r}")
        if thoughts not in THOUGHTS:
            raise ValueError(f"thoughts: expected one of {', '.join(THOUGHTS)}, got {thoughts!r}")
        if grammar not in GRAMMARS:
            raise ValueError(f"grammar: expected one of {', '.join(GRAMMARS)}, got {grammar!r}")
        if backend not in ("native", "auto"):
            raise ValueError(f"backend: household worlds are native only, got {backend!r}")
        self.level = level
        self.task_types = types
        self._ranges = (
            _pair("receptacles", receptacles),
            _pair("objects", objects),
            0 if copies is None else _count("copies", copies, 1),
        )
        self._difficulty = _C.household.Difficulty(level, *self._ranges)
        if num_valid is not None:
            num_valid_seen = num_valid_unseen = num_valid
        self._sizes = {
            "train": _count("num_train", num_train, len(types)),
            "valid_seen": _count("num_valid", num_valid_seen, 1),
            "valid_unseen": _count("num_valid", num_valid_unseen, 1),
        }
        self._layouts = _count("layouts", layouts, 1)
        self._seed = _count("seed", seed, 0)
        self._expert = expert
        self._thoughts = thoughts
        self._grammar = grammar
        probe = self.make_batch(1)  # options that leave no room for a game are refused here, not in a rollout
        for split in SPLITS:
            for task in self.tasks(split)[: len(types)]:
                probe.reset([0], [task], [0])
        self.instructions = INSTRUCTIONS.format(
            put="move (object) to (receptacle)" if grammar == "move" else "put (object) in/on (receptacle)"
        )

    def tasks(self, split: str) -> HouseholdTasks:
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        return HouseholdTasks(self, split, self._sizes[split])

    def make(self) -> HouseholdEnv:
        return HouseholdEnv(self.make_batch(1))

    def make_batch(self, slots: int) -> HouseholdBatch:
        return HouseholdBatch(slots, self.max_steps, self._grammar, self._expert, self._thoughts)

    def make_async(self, slots: int) -> InlineEnvs:
        return InlineEnvs(self.make_batch(slots))

    def recipes(self, tasks: Sequence[Task]) -> list[Any]:
        """The native recipes of tasks, for calls on the native batch itself."""
        return [_recipe(task, self._grammar == "put") for task in tasks]

    def _task(self, split: str, index: int) -> Task:
        recipe = _C.household.recipe(
            split, index, self._seed, self.task_types, self._layouts, self._sizes["train"], self._difficulty
        )
        receptacles, objects, copies = self._ranges
        data = {
            "seed": recipe.seed,
            "level": self.level,
            "layout": recipe.layout,
            "room": recipe.room,
            "receptacles": list(receptacles),
            "objects": list(objects),
            "copies": copies,
        }
        # Layout and seed name the game within (split, type, difficulty), however the panel is cut.
        standard = self._ranges == ((0, 0), (0, 0), 0)
        custom = "" if standard else "-{}_{}r{}_{}o{}c".format(*receptacles, *objects, copies)
        name = f"household/L{self.level}{custom}/{split}/{recipe.type}/{recipe.room}{recipe.layout}-{recipe.seed:014x}"
        return Task(name, recipe.type, split, data)
