"""The child side of the process pool: builds environments and answers one call at a time over a socket.

Run as a plain subprocess rather than through `multiprocessing`: a spawned `multiprocessing` child imports the
parent's main module again, which for a trainer means torch, hundreds of megabytes and seconds per worker.
This module and all it needs import without torch.

Messages, each one pickled object. Parent to child: ("start", factory), ("reset", slot, task, seed),
("step", slot, action), ("stop",). Child to parent: ("ready",), ("broken", text) when the factory cannot be
loaded or fails, and StepResult for a call.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from manus_fast.envs.base import Env, StepResult, failure

MAX_ERROR = 500
"""Characters of an error text that travel to the parent."""


def describe(error: BaseException) -> str:
    """One line for `info["error"]`: the exception's class and message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_ERROR] if text else type(error).__name__


def check_reset(answer: Any) -> StepResult:
    """Turns what `Env.reset` returned into a StepResult. Raises TypeError when it is not (str, dict)."""
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise TypeError(f"reset: expected (observation, info), got {type(answer).__name__}")
    observation, info = answer
    if not isinstance(observation, str) or not isinstance(info, dict):
        raise TypeError(f"reset: expected (str, dict), got ({type(observation).__name__}, {type(info).__name__})")
    return StepResult(observation, math.nan if "error" in info else 0.0, False, "error" in info, info)


def check_step(answer: Any) -> StepResult:
    """Turns what `Env.step` returned into a StepResult. Raises TypeError on a wrong shape, ValueError on a
    reward that is not finite."""
    if not (isinstance(answer, tuple) and len(answer) == 5):
        raise TypeError(
            f"step: expected (observation, reward, terminated, truncated, info), got {type(answer).__name__}"
        )
    observation, reward, terminated, truncated, info = answer
    if not isinstance(observation, str) or not isinstance(info, dict):
        raise TypeError(f"step: expected a str and a dict, got {type(observation).__name__}, {type(info).__name__}")
    reward = float(reward)
    if "error" not in info and not math.isfinite(reward):
        raise ValueError(f"step: expected a finite reward, got {reward}")
    return StepResult(observation, reward, bool(terminated), bool(truncated), info)


class _Server:
    """One environment per slot, built on the slot's first reset and thrown away after it raised."""

    def __init__(self, factory: Callable[[], Env]):
        self.factory = factory
        self.envs: dict[int, Env] = {}

    def call(self, kind: str, slot: int, *arguments: Any) -> StepResult:
        try:
            if kind == "reset":
                if slot not in self.envs:
                    self.envs[slot] = self.factory()
                return check_reset(self.envs[slot].reset(*arguments))
            return check_step(self.envs[slot].step(*arguments))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self.drop(slot)
            return failure(describe(error))

    def drop(self, slot: int) -> None:
        env = self.envs.pop(slot, None)
        if env is not None:
            # A world that just raised may raise again while closing; its answer is already a failure.
            with contextlib.suppress(Exception, SystemExit):
                env.close()

    def close(self) -> None:
        for slot in list(self.envs):
            self.drop(slot)


def _reply(connection: Connection, answer: Any) -> None:
    """Pickles before sending, so that an answer that cannot travel becomes a failure and not half a message."""
    try:
        data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        data = pickle.dumps(failure(f"the environment's answer cannot be pickled: {describe(error)}"))
    connection.send_bytes(data)


def _quiet(log: str | None) -> None:
    """Sends stdout and stderr, also of C code, to `log` or nowhere: what an environment prints belongs to nobody."""
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


def _watch_parent(parent: int) -> None:
    """Ends this process soon after the parent is gone, also while an environment hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def serve(fd: int, log: str | None = None) -> None:
    """Answers calls on socket `fd` until told to stop or until the parent is gone."""
    os.set_inheritable(fd, False)
    # A session of its own: Ctrl-C at the terminal is the parent's to handle, and whatever the environment
    # starts can be killed together with it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _quiet(log)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(fd)
    try:
        _, factory = pickle.loads(connection.recv_bytes())
        server = _Server(pickle.loads(factory))
        # Built once before "ready": a factory that always fails must show at the start, not in every episode.
        server.envs[-1] = server.factory()
    except EOFError:
        return
    except (Exception, SystemExit) as error:
        _reply(connection, ("broken", describe(error)))
        return
    _reply(connection, ("ready",))
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            break
        if message[0] == "stop":
            break
        kind, slot, *arguments = message
        if -1 in server.envs:
            server.envs[slot] = server.envs.pop(-1)
        try:
            _reply(connection, server.call(kind, slot, *arguments))
        except ConnectionError:
            break
    server.close()
