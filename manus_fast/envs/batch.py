"""`EnvBatch` over single worlds in this process: for engines without a batched one, where a batch is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manus_fast.envs.base import Env, Task
from manus_fast.envs.worker import check_reset, check_step, describe


class EnvList:
    """`EnvBatch` of `slots` worlds built by `factory`, stepped one after the other. A world that raises, or whose
    answer is none (see envs/worker.py), answers as a failure and is built anew at its next reset. `save` and `restore`
    need worlds that have them."""

    def __init__(self, factory: Callable[[], Env], slots: int):
        if slots < 1:
            raise ValueError(f"slots: expected an integer >= 1, got {slots}")
        self.slots = slots
        self._factory = factory
        self._envs: list[Any] = [None] * slots

    def _fail(self, slot: int, error: Exception) -> dict[str, Any]:
        env, self._envs[slot] = self._envs[slot], None
        if env is not None:
            try:
                env.close()
            except Exception as second:
                return {"error": f"{describe(error)} (closing it: {describe(second)})"}
        return {"error": describe(error)}

    def reset(
        self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[str], list[dict[str, Any]]]:
        observations, infos = [], []
        for slot, task, seed in zip(slots, tasks, seeds, strict=True):
            try:
                if self._envs[slot] is None:
                    self._envs[slot] = self._factory()
                answer = check_reset(self._envs[slot].reset(task, seed))
                observation, info = answer.observation, answer.info
            except Exception as error:
                observation, info = "", self._fail(slot, error)
            observations.append(observation)
            infos.append(info)
        return observations, infos

    def step(
        self, slots: Sequence[int], actions: Sequence[str]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        answers = []
        for slot, action in zip(slots, actions, strict=True):
            try:
                answer = check_step(self._running(slot).step(action))
                answers.append((answer.observation, answer.reward, answer.terminated, answer.truncated, answer.info))
            except Exception as error:
                answers.append(("", math.nan, False, True, self._fail(slot, error)))
        observations, rewards, terminated, truncated, infos = zip(*answers, strict=True) if answers else [()] * 5
        flags = (np.array(terminated, dtype=bool), np.array(truncated, dtype=bool))
        return list(observations), np.array(rewards, dtype=np.float32), *flags, list(infos)

    def _running(self, slot: int) -> Any:
        if self._envs[slot] is None:
            raise ValueError(f"slot: expected one that was reset, got {slot}")
        return self._envs[slot]

    def clone(self, src: int, dst: int) -> None:
        copy = self._running(src).clone()
        if self._envs[dst] is not None:
            self._envs[dst].close()
        self._envs[dst] = copy

    def save(self, slot: int) -> bytes:
        return self._running(slot).save()

    def restore(self, slot: int, state: bytes) -> None:
        if self._envs[slot] is None:
            self._envs[slot] = self._factory()
        self._envs[slot].restore(state)

    def close(self) -> None:
        for slot, env in enumerate(self._envs):
            if env is not None:
                env.close()
            self._envs[slot] = None
