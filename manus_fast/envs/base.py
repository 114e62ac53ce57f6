"""What an environment is: tasks, one world (`Env`), many worlds at once (`EnvBatch`), and a registry.

An environment is text in, text out. It never sees tokens, prompts or rewards other than its own: the
agent's protocol, shaping and penalties live above it.

A failure inside an environment (a crash, a timeout, a lost worker) is data, not an exception: the step
reports `reward = nan`, `truncated = True` and `info["error"] = text`. The rollout retries such an episode
once and then masks it; it never counts as a reward of zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Task:
    """One problem instance, the same on every machine: `id` is unique within its environment."""

    id: str
    type: str
    split: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the environment needs to rebuild the instance (a game seed, a file path), JSON-compatible."""


@dataclass
class StepResult:
    """The answer of one world to one reset or step. After a reset `reward` is 0 and both flags are False."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    """`admissible`: list[str] of valid actions (optional), `success`: bool, `score`: float (optional, where more than
    success is told), `error`: str (only on a failure)."""

    @property
    def failed(self) -> bool:
        return "error" in self.info

    @property
    def score(self) -> float | None:
        score = self.info.get("score")
        return None if score is None else float(score)


def failure(error: str) -> StepResult:
    """The step result of a world that broke: masked and counted, never a zero reward."""
    return StepResult("", math.nan, False, True, {"error": error})


@runtime_checkable
class Env(Protocol):
    """One world."""

    def reset(self, task: Task, seed: int) -> tuple[str, dict[str, Any]]: ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]: ...

    def clone(self) -> Env: ...

    def close(self) -> None: ...


@runtime_checkable
class EnvBatch(Protocol):
    """Many worlds behind one call; slot numbers are 0 … slots-1. Native worlds implement this directly."""

    slots: int

    def reset(
        self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[str], list[dict[str, Any]]]: ...

    def step(
        self, slots: Sequence[int], actions: Sequence[str]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]: ...

    def clone(self, src: int, dst: int) -> None: ...

    def save(self, slot: int) -> bytes: ...

    def restore(self, slot: int, state: bytes) -> None: ...

    def close(self) -> None: ...


class AsyncEnvs(Protocol):
    """What the rollout talks to: send work for a slot, collect whatever is ready, in any order."""

    slots: int

    def send_reset(self, slot: int, task: Task, seed: int) -> None: ...

    def send_step(self, slot: int, action: str) -> None: ...

    def poll(self, timeout: float) -> list[tuple[int, StepResult]]: ...

    def close(self) -> None: ...


class InlineEnvs:
    """`AsyncEnvs` over an `EnvBatch` that answers in microseconds: sent work runs in one batch at the next poll."""

    def __init__(self, batch: EnvBatch):
        self.batch = batch
        self.slots = batch.slots
        self._resets: list[tuple[int, Task, int]] = []
        self._steps: list[tuple[int, str]] = []

    def send_reset(self, slot: int, task: Task, seed: int) -> None:
        self._resets.append((slot, task, seed))

    def send_step(self, slot: int, action: str) -> None:
        self._steps.append((slot, action))

    def poll(self, timeout: float) -> list[tuple[int, StepResult]]:
        ready: list[tuple[int, StepResult]] = []
        if self._resets:
            slots, tasks, seeds = zip(*self._resets, strict=True)
            self._resets = []
            observations, infos = self.batch.reset(slots, tasks, seeds)
            for slot, observation, info in zip(slots, observations, infos, strict=True):
                failed = "error" in info
                reward = math.nan if failed else 0.0
                ready.append((slot, StepResult(observation, reward, False, failed, info)))
        if self._steps:
            slots, actions = zip(*self._steps, strict=True)
            self._steps = []
            for slot, *answer in zip(slots, *self.batch.step(slots, actions), strict=True):
                observation, reward, terminated, truncated, info = answer
                ready.append((slot, StepResult(observation, float(reward), bool(terminated), bool(truncated), info)))
        return ready

    def close(self) -> None:
        self.batch.close()


class Environment(Protocol):
    """A registered family of tasks with splits: the thing that `environment.name` in a config names."""

    name: str
    splits: tuple[str, ...]
    task_types: tuple[str, ...]
    max_steps: int
    instructions: str
    """What a player is told about the world and its commands; becomes part of the system prompt."""

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split in a fixed order, equal on every machine. Raises ValueError on an unknown split."""
        ...

    def make_batch(self, slots: int) -> EnvBatch:
        """A synchronous batch of worlds. Raises ValueError where only `make_async` exists."""
        ...

    def make_async(self, slots: int) -> AsyncEnvs: ...


_REGISTRY: dict[str, Callable[..., Environment]] = {}


def register(name: str, factory: Callable[..., Environment]) -> None:
    """Makes `environment.name: NAME` available. `factory(**options)` takes the keys of the config's `environment`
    block that it knows (max_steps, backend, …) and raises ValueError for a value it cannot serve."""
    if name in _REGISTRY:
        raise ValueError(f"environment: the name {name!r} is registered already")
    _REGISTRY[name] = factory


def registered() -> tuple[str, ...]:
    return tuple(sorted(_REGISTRY))


def make(name: str, **options: Any) -> Environment:
    """Builds the environment registered as `name`.

    Raises:
        ValueError: no such environment, an option that it doesn't know, or a value that it can't serve.
    """
    if name not in _REGISTRY:
        raise ValueError(f"environment.name: expected one of {', '.join(registered())}, got {name!r}")
    try:
        return _REGISTRY[name](**options)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in options:
            raise
        raise ValueError(f"environment.options: expected options of {name}, got {unknown[1]!r}") from error
    except ValueError as error:
        option, colon, rest = str(error).partition(": ")
        if not colon or option not in options:
            raise
        # Said by the key that the config has it under.
        block = "environment" if option in ("max_steps", "backend") else "environment.options"
        raise ValueError(f"{block}.{option}: {rest}") from error
