"""Rows of JSONL, JSON, parquet and hub datasets as conversations; what cannot be one is counted by its reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.normalise import normalise
from manus_fast.data.schema import Conversation, MalformedRow
from manus_fast.data.sources import read_row

_BOM = b"\xef\xbb\xbf"
_SUFFIXES = (".jsonl", ".json", ".parquet")


def load_conversations(
    name: str, dropped: Counter[str], protocol: Protocol | None = None, split: str = "train"
) -> Iterator[Conversation]:
    """Conversations of a file, a folder (its `split`.jsonl, else all its files) or a hub dataset, in order.

    Args:
        name: a path, or a hub name where there is no such path (needs the extra `data`).
        dropped: counts the skipped rows by reason.
        protocol: rewrites trainable replies in its form; None keeps them as they are.

    Raises:
        ValueError: no such file, or an unknown kind of file.
    """
    seen: set[tuple[str, str]] = set()
    for row in read_records(name, split):
        try:
            if isinstance(row, MalformedRow):
                raise row
            item = read_row(row)
            if (item.source, item.id) in seen:
                raise MalformedRow("duplicate id")
            item = item if protocol is None else normalise(item, protocol)
            seen.add((item.source, item.id))
        except MalformedRow as error:
            dropped[error.reason] += 1
            continue
        yield item


def read_records(name: str, split: str = "train") -> Iterator[Any]:
    path = Path(name)
    if path.is_dir():
        built = path / f"{split}.jsonl"
        files = [built] if built.is_file() else sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES)
        if not files:
            raise ValueError(f"data.name: expected JSONL, JSON or parquet files in {name!r}, got none")
        for file in files:
            yield from _file(file)
    elif path.is_file():
        yield from _file(path)
    elif path.suffix in _SUFFIXES or path.is_absolute() or name.startswith("."):
        raise ValueError(f"data.name: expected a file, a folder or a hub name, got {name!r}, which does not exist")
    else:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError(
                f"data.name: expected the package datasets for hub names (pip install manus-fast[data]), got {name!r}"
            ) from error
        try:
            yield from load_dataset(name, split=split, streaming=True)
        except (OSError, ValueError) as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"data.name: expected a file, a folder or a hub dataset, got {name!r} ({what})") from error


def _file(path: Path) -> Iterator[Any]:
    if path.suffix == ".jsonl":
        with _open(path) as file:
            for line in file:
                if line.strip():
                    yield _parse(line)
    elif path.suffix == ".json":
        with _open(path) as file:
            value = _parse(file.read())
        yield from value if isinstance(value, list) else [value]
    elif path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ValueError(f"data.name: expected the package pyarrow for parquet, got {str(path)!r}") from error
        try:
            for batch in parquet.ParquetFile(path).iter_batches(1024):
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's errors are among them
            raise ValueError(f"data.name: expected a parquet file, got {str(path)!r} ({error})") from error
    else:
        raise ValueError(f"data.name: expected a file named .jsonl, .json or .parquet, got {str(path)!r}")


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(
            f"data.name: expected a file that can be read, got {str(path)!r} ({error.strerror})"
        ) from error


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError:
        return MalformedRow("invalid UTF-8")
    except (ValueError, RecursionError):
        return MalformedRow("truncated JSON")
