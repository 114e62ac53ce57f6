"""A run's folder: one process at a time writes to it, and a new run does not mix with an earlier one's checkpoints.

with open_run("runs/ppo", resume=True, ranks=connect()) as run:
    if run.newest is not None:
        checkpoint = load(run.newest, verify=False)
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from manus_fast import checkpoint
from manus_fast.paths import check_path, make_folder, on_failure
from manus_fast.ranks import Ranks

_log = logging.getLogger(__name__)

LOCK_FILE = ".lock"

# flock's answers where a file system has no locks (some network ones).
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def prepare_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a run's folder and makes sure that it can be written to, leaving nothing behind; a command that fails while
    the folder is still empty takes it away again.

    Raises:
        ValueError: it is a file, this user may not write there, or no folder can have that name.
    """
    check_path("training.output_dir", folder)
    path = Path(folder)
    try:
        make_folder(path)
        with tempfile.TemporaryFile(dir=path):  # has no name where the system knows such files: a kill leaves nothing
            pass
    except OSError as error:
        raise ValueError(
            f"training.output_dir: expected a folder that can be written to, got {str(path)!r} ({error.strerror})"
        ) from error
    return path


class Lock:
    """The right to write to a folder, held until `release`, the end of this object or of the process, also by a kill.
    Objects of one process share it; a child process does not inherit it.

    Args:
        folder: exists; gets a file that the holder removes.

    Raises:
        ValueError: another process holds it.
    """

    def __init__(self, folder: Path):
        self._held: _Held | None = _held.get(folder.resolve())
        if self._held is None:
            self._held = _held[folder.resolve()] = _Held(folder)

    def release(self) -> None:
        """Calling it again is fine."""
        self._held = None


class _Held:
    def __init__(self, folder: Path):
        path = folder / LOCK_FILE
        descriptor = _locked(path)
        # Not `__del__`: this also runs when the interpreter ends with the object alive.
        release = weakref.finalize(self, _release, path, descriptor, os.getpid())
        on_failure(release)  # the error's traceback keeps this object, and the file would keep the folder


_held: weakref.WeakValueDictionary[Path, _Held] = weakref.WeakValueDictionary()
_descriptors: set[int] = set()


def _locked(path: Path) -> int:
    """A descriptor of the locked file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ValueError(
                f"training.output_dir: expected a folder that no other run writes to, got {str(path.parent)!r}, "
                f"which {holder} writes to"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            _log.warning("%s: this file system has no locks, so a second run there would go unnoticed", path.parent)
        if _is(descriptor, path):
            break
        os.close(descriptor)  # whoever held it has just removed the file, and somebody may lock a new one
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        path.unlink()
        os.close(descriptor)
        raise ValueError(
            f"training.output_dir: expected a folder that can be written to, got {str(path.parent)!r} "
            f"({error.strerror})"
        ) from error
    _descriptors.add(descriptor)
    return descriptor


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:  # a child that was forked has closed its copy already
        return
    if _is(descriptor, path):
        path.unlink()
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _forget() -> None:
    """In a forked child, which would otherwise keep a killed parent's lock."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_forget)


class RunFolder:
    """A locked folder. As a context manager it releases the lock at the end."""

    def __init__(self, path: Path, newest: Path | None, lock: Lock | None):
        self.path = path
        self.newest = newest
        """The checkpoint to go on from; None begins a new run."""
        self._lock = lock

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        if self._lock is not None:
            self._lock.release()


def open_run(folder: str | os.PathLike[str], resume: bool, ranks: Ranks) -> RunFolder:
    """Makes a run's folder, locks it, and finds what to go on from. All ranks have to call it; rank 0 does the work.

    Args:
        folder: `training.output_dir`.
        resume: go on from the newest whole checkpoint; with none at all a new run begins.

    Raises:
        ValueError: it cannot be written to, another process writes there, it holds checkpoints without `resume`, or
            damaged ones only.
    """
    path = Path(folder)
    lock = newest = refusal = None
    if ranks.first:  # before the others, so that the rank which made the folder is the one which holds its lock
        try:
            lock = Lock(prepare_folder(folder))
            newest = _newest(path, resume)
        except ValueError as error:
            refusal = error
            if lock is not None:
                lock.release()
    refused = ranks.of_first(None if refusal is None else str(refusal))
    if refused is not None:
        raise ValueError(refused) from refusal
    prepare_folder(folder)  # on another machine it may be another file system's
    return RunFolder(path, ranks.of_first(newest), lock)


def _newest(path: Path, resume: bool) -> Path | None:
    rounds = sorted(path.glob("round*"))  # of a run in rounds, which may have been cut in the first
    if not resume:
        for root in (path, *rounds):
            if found := checkpoint.folders(root):
                raise ValueError(
                    f"training.output_dir: expected a folder without checkpoints, got {str(path)!r} with "
                    f"{found[0].relative_to(path)} (go on from there by training.resume=true, or name another folder)"
                )
        return None
    newest = checkpoint.recover(path)
    if newest is None and not rounds:
        _log.warning("training.resume: no checkpoint is in %s, so a new run begins", path)
    return newest
