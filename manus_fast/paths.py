"""Paths that a user names: refused in one sentence before any work, and folders that go again where the work fails.

with undoing():
    make_folder("runs/ppo")
    ...  # after an error here "runs/ppo" is gone again, unless it was there before or something lies in it
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

_SHOWN = 60
"""Characters of a path too long to exist that a refusal repeats."""

_undo: list[Callable[[], object]] | None = None


@contextmanager
def undoing() -> Iterator[None]:
    """Calls what `on_failure` was given within this block, latest first, where an exception leaves it."""
    global _undo
    outer, _undo = _undo, []
    try:
        yield
    except BaseException:
        for undo in reversed(_undo):
            undo()
        raise
    finally:
        _undo = outer


def on_failure(undo: Callable[[], object]) -> None:
    """Has `undo` called where the work fails: see `undoing`. Outside of such a block nothing comes of it."""
    if _undo is not None:
        _undo.append(undo)


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a folder and those above it that are missing; `undoing` removes them where they are still empty.

    Raises:
        OSError: it cannot be made, or is a file.
    """
    path = Path(folder)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        on_failure(partial(_remove_empty, each.absolute()))
    return path


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # something lies in it, or it is gone
        folder.rmdir()


def open_to_add(path: str | os.PathLike[str]) -> TextIO:
    """A UTF-8 file that lines are added to; `undoing` removes it where it was made here and is still empty.

    Raises:
        OSError: it cannot be opened.
    """
    file = Path(path).absolute()
    if not file.exists():
        on_failure(partial(_remove_blank, file))
    return file.open("a", encoding="utf-8")


def _remove_blank(file: Path) -> None:
    with suppress(OSError):
        if file.stat().st_size == 0:
            file.unlink()


def check_path(name: str, path: str | os.PathLike[str]) -> None:
    """Refuses what no file can have as its path; whether there is such a file is not looked at.

    Args:
        name: what the user calls it, for the sentence.

    Raises:
        ValueError: a NUL byte or characters that no name can hold, or more of them than the system allows.
    """
    try:
        os.stat(path)
    except ValueError:
        raise ValueError(f"{name}: expected a path, got {_short(path)}, with a character that no path holds") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            length = len(os.fspath(path))
            raise ValueError(f"{name}: expected a path, got {_short(path)}, too long a name ({length})") from None


def check_output_file(name: str, path: str | os.PathLike[str]) -> None:
    """Refuses, before the work whose result goes there, a file that could not be written after it. Folders named for
    output are made; of a file's, a missing one is more likely a slip of the pen.

    Raises:
        ValueError: a folder, or a file in a folder that is missing or closed to this user.
    """
    check_path(name, path)
    file = Path(path)
    if not os.fspath(path) or file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"{name}: expected a file in a folder that exists, got {str(path)!r}")
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"{name}: expected a file in a folder that can be written to, got {str(path)!r}")


def _short(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"
