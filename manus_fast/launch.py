"""Starts the ranks of a run on this machine, watches over them, and ends all of them when one of them ends badly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from manus_fast.errors import OURS, USERS, Terminated
from manus_fast.versions import cores

# Seconds: between looks at the ranks; for the others to end by themselves once one has; to react to SIGTERM.
_LOOK, _GRACE, _TERM = 0.1, 5.0, 10.0


def launch(ranks: int, words: Sequence[str], command: Sequence[str] | None = None) -> int:
    """Runs `manus-fast WORDS` once for each of `ranks` local ranks and returns the exit code of the whole.

    Rank 0 has this terminal; what the others print goes to a file, named where one of them fails. When a rank ends
    with an error or is killed, the rest are ended too, within half a minute, and a sentence says which it was.

    Args:
        ranks: processes to start, one for each GPU where there are GPUs.
        words: the command line, which every rank is given whole.
        command: what to run instead of this package's command line.
    """
    program = list(command or (sys.executable, "-m", "manus_fast.cli"))
    shared = _environment(ranks)
    folder = Path(tempfile.mkdtemp(prefix="manus-fast-ranks-"))
    logs = {rank: folder / f"rank-{rank}.log" for rank in range(1, ranks)}
    processes: list[subprocess.Popen[bytes]] = []
    earlier = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for rank in range(ranks):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                processes.append(subprocess.Popen([*program, *words], env=own))
                continue
            with logs[rank].open("wb") as log:
                process = subprocess.Popen(
                    [*program, *words], env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            processes.append(process)
        failed = _wait(processes)
        if failed is None:
            return 0
        return _report(failed, processes, logs)
    finally:
        _end(processes)
        signal.signal(signal.SIGTERM, earlier)


def _environment(ranks: int) -> dict[str, str]:
    """The variables that every launcher sets, on a free port of this machine; cores are shared out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, cores() // ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank that ended badly; None once all have ended well."""
    while True:
        codes = [process.poll() for process in processes]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad:
            # Of ranks that ended in the same moment one that was killed is named: it is why the others failed.
            return min(bad, key=lambda rank: (codes[rank] >= 0, rank))
        if all(code == 0 for code in codes):
            return None
        time.sleep(_LOOK)


def _report(failed: int, processes: Sequence[subprocess.Popen[bytes]], logs: Mapping[int, Path]) -> int:
    """Waits a moment for the others, ends them, says what happened, and returns the exit code."""
    code = processes[failed].returncode
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_LOOK)
    first = processes[0].poll()
    _end(processes)
    if code == USERS and first == USERS:
        return USERS  # all ranks refused the same mistake, and rank 0 has told it
    name = f"rank {failed} of {len(processes)} (process {processes[failed].pid})"
    how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    text = f"{name} {how}, so the run has ended"
    if failed in logs:
        lines = [line for line in logs[failed].read_text(errors="replace").splitlines() if line.strip()]
        text += f"; its output is in {logs[failed]}" + (f", the last line: {lines[-1].strip()}" if lines else "")
    print(f"manus-fast: {text}", file=sys.stderr, flush=True)
    return code if code > 0 else OURS


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: SIGTERM, and SIGKILL for what does not react."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _TERM
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _interrupt(number: int, frame: object) -> None:
    raise Terminated
