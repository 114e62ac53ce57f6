"""Native worlds that answer as late as TextWorld's workers would: for machines on which TextWorld does not install.

What it takes is what `benchmarks.bench_alfworld` measured on a CPU (benchmarks/results/alfworld.json, `stock`): the
seconds of a reset and of a step in one process. Each slot belongs to one of W workers, which serves its slots one after
another. Reading a new game (another second) and the pipes between processes are left out, in TextWorld's favour.
"""

from __future__ import annotations

import heapq
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manus_fast.envs.base import AsyncEnvs, StepResult, Task
from manus_fast.rollout.scheduler import Rollout
from manus_fast.versions import cores

MEASURED = Path(__file__).resolve().parent / "results" / "alfworld.json"


@dataclass(frozen=True)
class Delay:
    """Seconds of a worker's reset and step, and how many workers there are."""

    reset: float
    step: float
    workers: int

    @classmethod
    def measured(cls, workers: int | None = None) -> Delay:
        """TextWorld's, as they were measured; by default a worker for each core."""
        ms = json.loads(MEASURED.read_text())["ms"]["stock"]
        return cls(ms["reset"] / 1e3, ms["step"] / 1e3, workers or cores())


class SlowWorlds:
    """`AsyncEnvs` whose answers are those of `inner`, each handed over once its worker would have had it.

    Args:
        inner: worlds that answer at the first poll.
        delay: of the workers.
        clock, sleep: of time, in seconds.
    """

    def __init__(self, inner: AsyncEnvs, delay: Delay, clock: Any = time.monotonic, sleep: Any = time.sleep):
        self.inner, self.delay, self.slots = inner, delay, inner.slots
        self._clock, self._sleep = clock, sleep
        self._free = [0.0] * delay.workers  # when each worker is done with what it was sent
        self._due: dict[int, float] = {}
        self._ready: list[tuple[float, int, StepResult]] = []

    def send_reset(self, slot: int, task: Task, seed: int) -> None:
        self._send(slot, self.delay.reset)
        self.inner.send_reset(slot, task, seed)

    def send_step(self, slot: int, action: str) -> None:
        self._send(slot, self.delay.step)
        self.inner.send_step(slot, action)

    def _send(self, slot: int, seconds: float) -> None:
        worker = slot % len(self._free)
        self._free[worker] = self._due[slot] = max(self._clock(), self._free[worker]) + seconds

    def poll(self, timeout: float) -> list[tuple[int, StepResult]]:
        for slot, result in self.inner.poll(0.0):
            heapq.heappush(self._ready, (self._due.pop(slot), slot, result))
        if self._ready and self._ready[0][0] > self._clock() and timeout > 0:
            self._sleep(min(timeout, self._ready[0][0] - self._clock()))
        answers = []
        while self._ready and self._ready[0][0] <= self._clock():
            answers.append(heapq.heappop(self._ready)[1:])
        return answers

    def close(self) -> None:
        self.inner.close()


def over_slow_worlds(delay: Delay, kind: type[Rollout] = Rollout) -> type[Rollout]:
    """The rollout loop, or another `kind` of it, over worlds of that delay."""

    class SlowRollout(kind):
        """See over_slow_worlds."""

        def __init__(self, engine: Any, envs: AsyncEnvs, *rest: Any, **named: Any):
            super().__init__(engine, SlowWorlds(envs, delay), *rest, **named)

    return SlowRollout
