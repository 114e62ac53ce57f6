"""Files that are whole or absent: written beside their place and put there by a rename.

with whole(folder / "trajectories.jsonl") as lines:
    lines.writelines(...)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A UTF-8 file to write, which takes the place of `path` at the end; after any error what was there stays. A
    process that is killed leaves a hidden file beside it, which the next one that writes `path` removes.

    Raises:
        OSError: it cannot be written; names `path`, which a full disk alone does not.
    """
    file = Path(path)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        _remove_left(file)
        with partial.open("w", encoding="utf-8") as out:
            yield out
        partial.replace(file)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def _remove_left(file: Path) -> None:
    """Removes what processes that are no more had begun to write in place of `file`."""
    pattern = re.compile(re.escape(f".{file.name}.") + r"(\d+)\.partial")
    try:
        names = os.listdir(file.parent)
    except OSError:  # writing there says why, where that fails too
        return
    for name in names:
        found = pattern.fullmatch(name)
        if found is not None and not _runs(int(found[1])):
            file.with_name(name).unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """`whole` for a text at hand."""
    with whole(path) as file:
        file.write(text)
