"""The engine in a thread of its own, shared by all requests of the server: they are batched as they come."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from manus_fast.rollout.engine import Completion, Request

Event = tuple[np.ndarray, Completion | None]
"""The ids sampled so far, and the completion at the end."""

_IDLE = 0.2


class Job:
    """A request under way; `get` gives its next event in the event loop that submitted it."""

    def __init__(self, request: Request, watched: bool):
        self.request, self.watched, self.seen = request, watched, 0
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def get(self) -> Event:
        return await self._events.get()

    def put(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Driver:
    """Owns an engine that has `sampled(id)`; only its thread touches it."""

    def __init__(self, engine: Any):
        self.engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._thread = threading.Thread(target=self._run, name="serving-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, watched: bool) -> Job:
        """Starts a request from within an event loop. `watched` jobs also get events while they are sampled."""
        job = Job(request, watched)
        self._calls.put(lambda: self._start(job))
        return job

    def drop(self, job: Job) -> None:
        """Nobody waits for the job any more: what is left of it is not sampled."""
        self._calls.put(lambda: self._drop(job.request.id))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _start(self, job: Job) -> None:
        try:
            self.engine.submit(job.request)
        except (ValueError, RuntimeError) as error:  # refused, or the engine is closed: nobody else need hear of it
            job.put(_broken(job.request, f"{type(error).__name__}: {error}"))
        else:
            self._jobs[job.request.id] = job

    def _drop(self, id: int) -> None:
        if self._jobs.pop(id, None) is not None:
            self.engine.abort(id)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait() if self._jobs else self._calls.get(timeout=_IDLE)
                if call is None:
                    return
                call()
                continue
            except queue.Empty:
                pass
            if not self._jobs:
                continue
            try:
                completions = self.engine.poll(_IDLE)
            except Exception as error:  # the server goes on: whoever waits is told
                for job in self._jobs.values():
                    self.engine.abort(job.request.id)
                    job.put(_broken(job.request, f"{type(error).__name__}: {error}"))
                self._jobs.clear()
                continue
            for completion in completions:
                job = self._jobs.pop(completion.id, None)
                if job is not None:
                    job.put((completion.ids, completion))
            for job in self._jobs.values():
                if job.watched:
                    ids = self.engine.sampled(job.request.id)
                    if len(ids) > job.seen:
                        job.seen = len(ids)
                        job.put((ids, None))


def _broken(request: Request, error: str) -> Event:
    nothing = np.zeros(0, np.int32)
    return nothing, Completion(request.id, nothing, np.zeros(0, np.float32), "error", 0, error)
