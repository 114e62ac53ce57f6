"""Environments in worker processes: time limits, restart after a crash, recycling against leaks.

For engines that are slow, leak, keep global state or can hang. `WorkerPool` speaks `AsyncEnvs`: whatever goes
wrong in a worker (an exception, a hang, `kill -9`, a wrong answer) comes back as `failure(...)` for the slots
concerned, and the worker is replaced.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from manus_fast.envs.base import Env, StepResult, Task, failure
from manus_fast.envs.worker import describe

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from manus_fast.envs.worker import serve; serve(int(sys.argv[1]), *sys.argv[3:])"
)
_MAX_START_FAILURES = 3
"""Workers in a row that may die before they are ready; then the fault is not bad luck and `poll` raises."""
_STOP_GRACE = 2.0
"""Seconds a worker gets to close its environments before it is killed."""


def _kill(process: subprocess.Popen) -> None:
    """Kills a worker with everything it started, and reaps it. Safe on a worker that is gone."""
    if process.returncode is None:
        # The group exists once the worker has called setsid; before that the plain kill below is enough. A dead
        # worker that is not reaped yet still holds its id, so the group is killed before the wait.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.wait()


def _kill_all(processes: set[subprocess.Popen]) -> None:
    while processes:
        _kill(processes.pop())


def _last_words(process: subprocess.Popen) -> str:
    """How a worker that closed its socket ended; waits for that end (it comes a moment later) without reaping."""
    end = time.monotonic() + _STOP_GRACE
    while time.monotonic() < end:
        if (state := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if state.si_code == os.CLD_EXITED:
                return f"exit code {state.si_status}"
            return f"signal {signal.Signals(state.si_status).name}"
        time.sleep(0.01)
    return "closed its connection"


class _Worker:
    """One process and what the parent knows about it. `call` is the one call in flight, `queue` those behind it."""

    def __init__(self, seat: int, factory: bytes, log: str | None, deadline: float):
        self.seat = seat
        self.ready = False
        self.episodes = 0
        self.slots: set[int] = set()
        self.call: tuple | None = None
        self.queue: deque[tuple] = deque()
        self.deadline = deadline
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path), *([log] if log else [])]
            # One thread of BLAS per worker, and one order of sets and dicts whatever the worker.
            environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | dict(os.environ)
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        self.connection = Connection(ours.detach())
        # A worker that died at once is found out by the first read.
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps(("start", factory)))


class WorkerPool:
    """`AsyncEnvs` over worker processes, one `Env` per slot, slot s in worker s mod `workers`.

    factory: picklable, from an importable module; called in the worker, once per slot, to build an `Env`.
    slots, workers: worlds and processes; `workers` defaults to `slots`. A worker serves its slots one call at a
        time, so more slots than workers save memory and cost waiting; a crash loses every episode in the worker.
    reset_timeout, step_timeout: seconds that one call may run; then the worker is killed and the slot fails.
    start_timeout: seconds from starting a worker until its environment is built.
    recycle_after: episodes after which a worker takes no new one and is replaced; None keeps it for ever. While
        its last episodes end, the old process and the new one live side by side.
    log_dir: folder for one file per worker with all that it printed; by default that output is dropped.

    Every send is answered exactly once by `poll`. Raises ValueError on a bad argument, a slot that is busy, or a
    step without an episode; `poll` raises RuntimeError when workers cannot be started at all.
    """

    def __init__(
        self,
        factory: Callable[[], Env],
        *,
        slots: int,
        workers: int | None = None,
        reset_timeout: float = 120.0,
        step_timeout: float = 60.0,
        start_timeout: float = 120.0,
        recycle_after: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ):
        workers = slots if workers is None else min(workers, slots)
        positive = {"slots": slots, "workers": workers, "reset_timeout": reset_timeout}
        positive |= {"step_timeout": step_timeout, "start_timeout": start_timeout}
        if recycle_after is not None:
            positive["recycle_after"] = recycle_after
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value!r}")
        try:
            self._factory = pickle.dumps(factory)
        except Exception as error:
            raise ValueError(f"factory: expected a picklable callable, got {factory!r} ({describe(error)})") from error
        self.slots = slots
        self.restarts = 0
        """Workers replaced after a crash or a timeout, since the start."""
        self.recycled = 0
        """Workers replaced on schedule."""
        self._timeouts = {"reset": reset_timeout, "step": step_timeout}
        self._start_timeout = start_timeout
        self._recycle_after = math.inf if recycle_after is None else recycle_after
        self._log_dir = None if log_dir is None else Path(log_dir)
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self._answers: list[tuple[int, StepResult]] = []
        self._pending: set[int] = set()
        self._live: set[int] = set()
        self._lost: dict[int, str] = {}
        self._start_failures = 0
        self._closed = False
        self._processes: set[subprocess.Popen] = set()
        # Runs also when the pool is dropped without close() and at interpreter exit.
        self._finalizer = weakref.finalize(self, _kill_all, self._processes)
        self._workers: set[_Worker] = set()
        self._leaving: list[tuple[subprocess.Popen, float]] = []
        self._seats = [self._start(seat) for seat in range(workers)]
        self._home = [self._seats[slot % workers] for slot in range(slots)]

    # -- sending --------------------------------------------------------------------------------------------------

    def send_reset(self, slot: int, task: Task, seed: int) -> None:
        self._check_free(slot)
        self._lost.pop(slot, None)
        worker = self._seats[slot % len(self._seats)]
        if worker.episodes >= self._recycle_after:
            self.recycled += 1
            worker = self._seats[worker.seat] = self._start(worker.seat)
        self._move(slot, worker)
        worker.episodes += 1
        self._submit(worker, ("reset", slot, task, seed))

    def send_step(self, slot: int, action: str) -> None:
        self._check_free(slot)
        if slot in self._lost:
            self._answers.append((slot, failure(self._lost.pop(slot))))
            return
        if slot not in self._live:
            raise ValueError(f"slot: expected one with a running episode, got {slot}")
        self._submit(self._home[slot], ("step", slot, action))

    def _check_free(self, slot: int) -> None:
        if self._closed:
            raise ValueError("pool: expected an open pool, got a closed one")
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot: expected 0 … {self.slots - 1}, got {slot}")
        if slot in self._pending:
            raise ValueError(f"slot: expected one without a call in flight, got {slot}")

    def _submit(self, worker: _Worker, call: tuple) -> None:
        self._pending.add(call[1])
        worker.queue.append(call)
        self._dispatch(worker)

    # -- receiving ------------------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[tuple[int, StepResult]]:
        """Answers that are ready; waits up to `timeout` seconds for the first. [] when nothing is in flight."""
        end = time.monotonic() + timeout
        self._reap()
        while True:
            now = time.monotonic()
            limit = max(0.0, end - now)
            if self._answers:
                limit = 0.0
            elif not self._pending:
                return []
            watched = {w.connection: w for w in self._workers if w.call is not None or not w.ready}
            nearest = min((w.deadline for w in watched.values()), default=math.inf)
            for connection in wait(list(watched), max(0.0, min(limit, nearest - now))):
                self._receive(watched[connection])
            now = time.monotonic()
            for worker in watched.values():
                if worker in self._workers and (worker.call is not None or not worker.ready) and now >= worker.deadline:
                    self._expire(worker)
            if self._answers or now >= end:
                answers, self._answers = self._answers, []
                return answers

    def _receive(self, worker: _Worker) -> None:
        try:
            data = worker.connection.recv_bytes()
        except (EOFError, OSError):
            self._bury(worker, None)
            return
        if not worker.ready:
            message = pickle.loads(data)
            if message[0] == "broken":
                self._bury(worker, f"the environment could not be built: {message[1]}")
                return
            worker.ready = True
            self._start_failures = 0
        else:
            try:
                result = pickle.loads(data)
            except Exception as error:
                result = failure(f"the environment's answer cannot be unpickled: {describe(error)}")
            slot = worker.call[1]
            worker.call = None
            self._answer(slot, result)
        self._dispatch(worker)

    def _expire(self, worker: _Worker) -> None:
        if worker.call is None:
            self._bury(worker, f"the worker was not ready within {self._start_timeout:g} s")
        else:
            kind = worker.call[0]
            self._bury(worker, f"{kind} ran longer than {self._timeouts[kind]:g} s, its worker was killed")

    def _answer(self, slot: int, result: StepResult) -> None:
        self._pending.discard(slot)
        if result.failed or result.terminated or result.truncated:
            self._live.discard(slot)
        else:
            self._live.add(slot)
        self._answers.append((slot, result))

    # -- workers --------------------------------------------------------------------------------------------------

    def _start(self, seat: int) -> _Worker:
        log = None if self._log_dir is None else str(self._log_dir / f"worker-{seat}.log")
        worker = _Worker(seat, self._factory, log, time.monotonic() + self._start_timeout)
        self._workers.add(worker)
        self._processes.add(worker.process)
        return worker

    def _dispatch(self, worker: _Worker) -> None:
        """Sends the next queued call to an idle worker; a call's clock starts here."""
        if not worker.ready or worker.call is not None or not worker.queue:
            return
        call = worker.queue.popleft()
        worker.call = call
        worker.deadline = time.monotonic() + self._timeouts[call[0]]
        try:
            data = pickle.dumps(call)
        except Exception as error:
            worker.call = None
            self._answer(call[1], failure(f"{call[0]} cannot be pickled: {describe(error)}"))
            self._dispatch(worker)
            return
        # A dead worker is noticed by the read that follows, with its exit code.
        with contextlib.suppress(ConnectionError):
            worker.connection.send_bytes(data)

    def _move(self, slot: int, worker: _Worker) -> None:
        """Homes `slot` in `worker`; a retired worker that no slot lives in any more is stopped."""
        old = self._home[slot]
        self._home[slot] = worker
        old.slots.discard(slot)
        worker.slots.add(slot)
        self._live.discard(slot)
        if old is not self._seats[old.seat] and not old.slots and old in self._workers:
            self._workers.discard(old)
            with contextlib.suppress(ConnectionError):
                old.connection.send_bytes(pickle.dumps(("stop",)))
            old.connection.close()
            self._leaving.append((old.process, time.monotonic() + _STOP_GRACE))

    def _reap(self) -> None:
        """Collects retired workers that have left, kills those that do not."""
        staying = []
        for process, deadline in self._leaving:
            if process.poll() is None and time.monotonic() < deadline:
                staying.append((process, deadline))
            else:
                _kill(process)
                self._processes.discard(process)
        self._leaving = staying

    def _bury(self, worker: _Worker, reason: str | None) -> None:
        """Replaces a dead or hopeless worker and answers for its slots. `reason` None: it died by itself."""
        if reason is None:
            reason = f"the worker died ({_last_words(worker.process)})"
        _kill(worker.process)
        self._processes.discard(worker.process)
        worker.connection.close()
        self._workers.discard(worker)
        self.restarts += 1
        current = self._seats[worker.seat] is worker
        if not worker.ready:
            self._start_failures += 1
            if self._start_failures >= _MAX_START_FAILURES:
                self.close()
                raise RuntimeError(f"environment workers cannot start: {reason}")
        if current:
            replacement = self._seats[worker.seat] = self._start(worker.seat)
        else:
            replacement = self._seats[worker.seat]
        waiting = list(worker.queue)
        if worker.call is not None:
            self._answer(worker.call[1], failure(reason))
        resets = [call for call in waiting if call[0] == "reset"]
        for call in waiting:
            if call[0] == "step":
                self._answer(call[1], failure(f"the episode was lost: {reason}"))
        for slot in worker.slots:
            if slot in self._live and slot not in self._pending:
                self._live.discard(slot)
                self._lost[slot] = f"the episode was lost: {reason}"
            self._home[slot] = replacement
            replacement.slots.add(slot)
        for call in resets:
            replacement.episodes += 1
            replacement.queue.append(call)
        self._dispatch(replacement)

    def close(self) -> None:
        """Stops every worker: idle ones may close their environments, busy ones are killed at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + _STOP_GRACE
        for worker in self._workers:
            if worker.ready and worker.call is None:
                with contextlib.suppress(ConnectionError):
                    worker.connection.send_bytes(pickle.dumps(("stop",)))
            else:
                _kill(worker.process)
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
            worker.connection.close()
        self._workers.clear()
        self._pending.clear()
        self._live.clear()
        _kill_all(self._processes)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
