"""Files that are whole or absent: written beside their place and put there by a rename.

with whole(folder / "trajectories.jsonl") as lines:
    lines.writelines(...)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A UTF-8 file to write, which takes the place of `path` at the end; after any error what was there stays.

    Raises:
        OSError: it cannot be written; names `path`, which a full disk alone does not.
    """
    file = Path(path)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as out:
            yield out
        partial.replace(file)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """`whole` for a text at hand."""
    with whole(path) as file:
        file.write(text)
