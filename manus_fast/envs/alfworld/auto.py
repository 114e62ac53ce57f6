"""`backend: auto`: each game in the native engine where it fits, else in the real one. The choice is logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manus_fast.envs.alfworld.native import NativeBatch
from manus_fast.envs.base import AsyncEnvs, EnvBatch, InlineEnvs, StepResult, Task

_log = logging.getLogger(__name__)


class _Router:
    """Which engine plays a task; says so once per reason."""

    def __init__(self, native: NativeBatch):
        self._native = native
        self._said: set[str] = set()

    def fits(self, task: Task) -> bool:
        reason = self._native.refusal(task)
        key = "" if reason is None else reason.split(" (", 1)[0]
        if key not in self._said:
            self._said.add(key)
            if reason is None:
                _log.info("alfworld: games are played by the native engine where they fit")
            else:
                _log.warning("alfworld: %s and those like it are played by the real engine: %s", task.id, reason)
        return reason is None


class AutoEnvs:
    """`AsyncEnvs` over a `NativeBatch` and, made when a game first needs it, the worker pool of the real engine."""

    def __init__(self, native: NativeBatch, make_pool: Callable[[], AsyncEnvs]):
        self.slots = native.slots
        self._router = _Router(native)
        self._inline = InlineEnvs(native)
        self._make_pool = make_pool
        self._pool: AsyncEnvs | None = None
        self._real: set[int] = set()
        self._waiting = [0, 0]
        """Calls in flight: native, real."""

    def send_reset(self, slot: int, task: Task, seed: int) -> None:
        self._real.discard(slot)
        if self._router.fits(task):
            self._inline.send_reset(slot, task, seed)
            self._waiting[0] += 1
            return
        if self._pool is None:
            self._pool = self._make_pool()
        self._real.add(slot)
        self._pool.send_reset(slot, task, seed)
        self._waiting[1] += 1

    def send_step(self, slot: int, action: str) -> None:
        real = slot in self._real
        envs = self._pool if real else self._inline
        assert envs is not None
        envs.send_step(slot, action)
        self._waiting[real] += 1

    def poll(self, timeout: float) -> list[tuple[int, StepResult]]:
        start = time.monotonic()
        ready = self._inline.poll(0.0) if self._waiting[0] else []
        self._waiting[0] -= len(ready)
        if self._pool is not None and self._waiting[1]:
            left = 0.0 if ready else max(0.0, timeout - (time.monotonic() - start))
            answers = self._pool.poll(left)
            self._waiting[1] -= len(answers)
            ready = ready + answers
        return ready

    def close(self) -> None:
        self._inline.close()
        if self._pool is not None:
            self._pool.close()


class AutoBatch:
    """`EnvBatch` over a `NativeBatch` and, for games that do not fit, a batch of the real engine in this process."""

    def __init__(self, native: NativeBatch, make_real: Callable[[], EnvBatch]):
        self.slots = native.slots
        self._native = native
        self._router = _Router(native)
        self._make_real = make_real
        self._real_batch: EnvBatch | None = None
        self._real: set[int] = set()

    def _real_engine(self) -> EnvBatch:
        if self._real_batch is None:
            self._real_batch = self._make_real()
        return self._real_batch

    def _of(self, slot: int) -> EnvBatch:
        return self._real_engine() if slot in self._real else self._native

    def reset(
        self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[str], list[dict[str, Any]]]:
        chosen = [self._native if self._router.fits(task) else self._real_engine() for task in tasks]
        out: dict[int, tuple[str, dict[str, Any]]] = {}
        for batch in {id(b): b for b in chosen}.values():
            mine = [i for i, b in enumerate(chosen) if b is batch]
            part = [slots[i] for i in mine]
            observations, infos = batch.reset(part, [tasks[i] for i in mine], [seeds[i] for i in mine])
            out.update(zip(part, zip(observations, infos, strict=True), strict=True))
            (self._real.difference_update if batch is self._native else self._real.update)(part)
        return [out[slot][0] for slot in slots], [out[slot][1] for slot in slots]

    def step(
        self, slots: Sequence[int], actions: Sequence[str]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        if not self._real.intersection(slots):
            return self._native.step(slots, actions)
        order = sorted(range(len(slots)), key=lambda i: slots[i] in self._real)
        native = [i for i in order if slots[i] not in self._real]
        parts = [native, order[len(native) :]]
        texts: list[str] = [""] * len(slots)
        infos: list[dict[str, Any]] = [{}] * len(slots)
        rewards = np.zeros(len(slots), dtype=np.float32)
        terminated, truncated = np.zeros(len(slots), dtype=bool), np.zeros(len(slots), dtype=bool)
        for mine in filter(None, parts):
            answer = self._of(slots[mine[0]]).step([slots[i] for i in mine], [actions[i] for i in mine])
            rewards[mine], terminated[mine], truncated[mine] = answer[1:4]
            for i, text, info in zip(mine, answer[0], answer[4], strict=True):
                texts[i], infos[i] = text, info
        return texts, rewards, terminated, truncated, infos

    def expert(self, slots: Sequence[int], kind: str | None = None) -> tuple[list[str], list[str]]:
        """As `NativeBatch.expert`. Raises ValueError for a slot that the real engine plays: it has no expert here."""
        if strangers := sorted(self._real.intersection(slots)):
            raise ValueError(f"slots: expected games of the native engine, got {strangers} of the real one")
        return self._native.expert(slots, kind)

    def clone(self, src: int, dst: int) -> None:
        self._of(src).clone(src, dst)
        (self._real.add if src in self._real else self._real.discard)(dst)

    def save(self, slot: int) -> bytes:
        return (b"R" if slot in self._real else b"N") + self._of(slot).save(slot)

    def restore(self, slot: int, state: bytes) -> None:
        if state[:1] not in (b"R", b"N"):
            raise ValueError(f"state: expected bytes made by save, got {state[:20]!r}…")
        real = state[:1] == b"R"
        (self._real_engine() if real else self._native).restore(slot, state[1:])
        (self._real.add if real else self._real.discard)(slot)

    def close(self) -> None:
        self._native.close()
        if self._real_batch is not None:
            self._real_batch.close()
