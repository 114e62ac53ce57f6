"""The worlds behind the nodes: kept as bytes where the environment can save them, else reached by playing again.

Both kinds take any number of jobs ("play this action at that node") and give the answers as they come. A world that is
reached by playing again is checked on the way: every observation must hash to what it was when its node was made.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from manus_fast.envs.base import AsyncEnvs, EnvBatch, Environment, StepResult, failure
from manus_fast.envs.worker import describe
from manus_fast.search.base import Node, Tree

_LOG = logging.getLogger(__name__)


@dataclass
class Arrival:
    """The answer to a job: what the environment said and, where they are known, the world and its situation."""

    result: StepResult
    state: bytes | None = None
    situation: int | None = None
    slot: int | None = None
    """Where the world still stands, for those that are reached by playing again."""
    final: bool = False
    """Trying again would fail again."""


@dataclass(eq=False)
class Job:
    """Reset a tree's task (node None), or play an action at a node. `tag` is the asker's own."""

    tree: Tree
    node: Node | None
    action: str
    tag: Any


class States(Protocol):
    """See the module's docstring. `mismatches` counts worlds that did not play the same again."""

    kind: str
    mismatches: int

    def send(self, job: Job) -> None: ...

    def poll(self, timeout: float) -> list[tuple[Job, Arrival]]: ...

    def place(self, arrival: Arrival, node: Node) -> None: ...

    def close(self) -> None: ...


class SavedStates:
    """Restores the parent's bytes into a slot, steps all jobs in one call, and saves what came of it."""

    kind = "save"
    mismatches = 0

    def __init__(self, batch: EnvBatch):
        self.batch = batch
        self._hash = getattr(batch, "state_hash", None)
        self._jobs: deque[Job] = deque()

    def send(self, job: Job) -> None:
        self._jobs.append(job)

    def poll(self, timeout: float) -> list[tuple[Job, Arrival]]:
        """Plays everything that was sent, a batch of `slots` at a time. Nothing is waited for."""
        done: list[tuple[Job, Arrival]] = []
        while self._jobs:
            jobs = [self._jobs.popleft() for _ in range(min(self.batch.slots, len(self._jobs)))]
            done += self._reset([job for job in jobs if job.node is None])
            done += self._step([job for job in jobs if job.node is not None])
        return done

    def _reset(self, jobs: list[Job]) -> list[tuple[Job, Arrival]]:
        if not jobs:
            return []
        slots = range(len(jobs))
        observations, infos = self.batch.reset(slots, [j.tree.task for j in jobs], [j.tree.seed for j in jobs])
        answers = [
            StepResult(text, math.nan if "error" in info else 0.0, False, "error" in info, info)
            for text, info in zip(observations, infos, strict=True)
        ]
        return self._arrive(jobs, answers)

    def _step(self, jobs: list[Job]) -> list[tuple[Job, Arrival]]:
        if not jobs:
            return []
        done: list[tuple[Job, Arrival]] = []
        standing: list[Job] = []
        for job in jobs:
            assert job.node is not None and job.node.state is not None
            try:
                self.batch.restore(len(standing), job.node.state)
            except Exception as error:  # whatever a world may raise is this branch's failure, not the search's
                done.append((job, Arrival(failure(f"restore: {describe(error)}"))))
            else:
                standing.append(job)
        if standing:
            columns = self.batch.step(range(len(standing)), [job.action for job in standing])
            answers = [
                StepResult(text, float(reward), bool(terminated), bool(truncated), info)
                for text, reward, terminated, truncated, info in zip(*columns, strict=True)
            ]
            done += self._arrive(standing, answers)
        return done

    def _arrive(self, jobs: list[Job], answers: list[StepResult]) -> list[tuple[Job, Arrival]]:
        done = []
        for slot, (job, result) in enumerate(zip(jobs, answers, strict=True)):
            arrival = Arrival(result)
            if not result.failed:
                over = result.terminated or result.truncated
                arrival.state = None if over else self.batch.save(slot)
                arrival.situation = None if self._hash is None else self._hash(slot)
            done.append((job, arrival))
        return done

    def place(self, arrival: Arrival, node: Node) -> None:
        """Nothing to remember: the node's own bytes are enough."""

    def close(self) -> None:
        self.batch.close()


@dataclass(eq=False)
class _Replay:
    job: Job
    path: list[Node]
    """Nodes that lie behind the job's action, the root first."""
    at: int = 0
    """Of `path`, nodes that the world has reached."""


class ReplayedStates:
    """Plays a node's actions again in a slot of its own, unless some slot stands at the node already."""

    kind = "replay"

    def __init__(self, envs: AsyncEnvs):
        self.envs = envs
        self.mismatches = 0
        self._waiting: deque[Job] = deque()
        self._running: dict[int, _Replay] = {}
        self._free = list(range(envs.slots))
        self._stands: dict[int, Node] = {}
        """Node whose world each free slot holds."""

    def send(self, job: Job) -> None:
        self._waiting.append(job)

    def poll(self, timeout: float) -> list[tuple[Job, Arrival]]:
        """Starts what there is room for, waits up to `timeout` seconds, and returns the jobs that are done."""
        while self._waiting and self._free:
            self._start(self._waiting.popleft())
        done: list[tuple[Job, Arrival]] = []
        for slot, result in self.envs.poll(timeout) if self._running else ():
            answer = self._advance(slot, result)
            if answer is not None:
                done.append(answer)
        return done

    def place(self, arrival: Arrival, node: Node) -> None:
        """Tells which node an arrival became: its slot can go on from there without playing again."""
        if arrival.slot is not None and not node.closed:
            self._stands[arrival.slot] = node

    def _start(self, job: Job) -> None:
        node = job.node
        slot = next((s for s in self._free if node is not None and self._stands.get(s) is node), None)
        path = [] if node is None else [job.tree.root, *node.path]
        run = _Replay(job, path, at=len(path))
        if slot is None:
            slot = next((s for s in self._free if s not in self._stands), self._free[0])
            run.at = 0
        self._free.remove(slot)
        self._stands.pop(slot, None)
        self._running[slot] = run
        if run.at:
            self.envs.send_step(slot, job.action)
        else:
            self.envs.send_reset(slot, job.tree.task, job.tree.seed)

    def _advance(self, slot: int, result: StepResult) -> tuple[Job, Arrival] | None:
        run = self._running[slot]
        if result.failed or run.at == len(run.path):
            return self._end(slot, result)
        expected = run.path[run.at]
        if digest(result.observation) != digest(expected.observation):
            self.mismatches += 1
            task = run.job.tree.task.id
            result = failure(f"replay: turn {run.at} of {task} gave another observation than before")
            return self._end(slot, result, final=True)
        run.at += 1
        last = run.at == len(run.path)
        action = run.job.action if last else run.path[run.at].proposal.action
        self.envs.send_step(slot, action)
        return None

    def _end(self, slot: int, result: StepResult, final: bool = False) -> tuple[Job, Arrival]:
        run = self._running.pop(slot)
        self._free.append(slot)
        return run.job, Arrival(result, slot=None if result.failed else slot, final=final)

    def close(self) -> None:
        self.envs.close()


def digest(observation: str) -> bytes:
    """What stands for an observation when a replayed world is checked."""
    return hashlib.blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def make_states(environment: Environment, kind: str, slots: int) -> States:
    """The worlds of an environment, `kind` as in SearchConfig.state.

    Raises:
        ValueError: kind "save" for an environment that has no batch of worlds, or one that cannot be saved.
    """
    if kind == "replay":
        return ReplayedStates(environment.make_async(slots))
    try:
        batch = environment.make_batch(slots)
    except ValueError as error:
        if kind == "save":
            raise ValueError(f"search.state: expected replay for {environment.name}, got 'save' ({error})") from error
        _LOG.info("search.state: replay, because %s has no batch of worlds (%s)", environment.name, error)
        return ReplayedStates(environment.make_async(slots))
    if hasattr(batch, "save") and hasattr(batch, "restore"):
        return SavedStates(batch)
    batch.close()
    if kind == "save":
        raise ValueError(f"search.state: expected replay for {environment.name}, whose worlds cannot be saved")
    _LOG.info("search.state: replay, because the worlds of %s cannot be saved", environment.name)
    return ReplayedStates(environment.make_async(slots))
