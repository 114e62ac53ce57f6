"""Rows of JSONL, JSON, parquet and hub datasets as conversations; what cannot be one is counted by its reason."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.normalise import normalise
from manus_fast.data.schema import Conversation, MalformedRow
from manus_fast.data.sources import read_row
from manus_fast.paths import check_path

_BOM = b"\xef\xbb\xbf"
_SUFFIXES = (".jsonl", ".json", ".parquet")


def load_conversations(
    name: str,
    dropped: Counter[str],
    protocol: Protocol | None = None,
    split: str = "train",
    streaming: bool = False,
    keep_repeated_ids: bool = False,
) -> Iterator[Conversation]:
    """Conversations of a file, a folder (its `split`.jsonl, else all its files) or a hub dataset, in order.

    Args:
        name: a path, or a hub name where there is no such path (needs the extra `data`): owner/set, whose split `split`
            is read, or all of its splits where it has none of that name; owner/set:split reads that one.
        dropped: counts the skipped rows by reason. An id may come once in each file or split.
        protocol: rewrites trainable replies in its form; None keeps them as they are.
        keep_repeated_ids: keep conversations under an id that came before, as further attempts at the task of that id.
        streaming: read a hub dataset row by row over the network, instead of from the cache that it is loaded into.

    Raises:
        ValueError: no such file or split, or an unknown kind of file.
    """
    for rows in _parts(name, split, streaming):
        seen: set[tuple[str, str]] = set()
        for row in rows:
            try:
                if isinstance(row, MalformedRow):
                    raise row
                item = read_row(row)
                if (item.source, item.id) in seen:
                    if not keep_repeated_ids:
                        raise MalformedRow("duplicate id")
                    item = renamed(item, seen)
                item = item if protocol is None else normalise(item, protocol)
                seen.add((item.source, item.id))
            except MalformedRow as error:
                dropped[error.reason] += 1
                continue
            yield item


def renamed(item: Conversation, taken: Container[tuple[str, str]]) -> Conversation:
    """The conversation under an id that no (source, id) in `taken` has; its old id names its task."""
    number = 2
    while (item.source, f"{item.id}#{number}") in taken:
        number += 1
    return replace(item, id=f"{item.id}#{number}", task=item.task or item.id)


def read_records(name: str, split: str = "train", streaming: bool = False) -> Iterator[Any]:
    """The parsed records of a dataset, with a MalformedRow in place of what is no JSON. Raises: as above."""
    return itertools.chain.from_iterable(_parts(name, split, streaming))


def _parts(name: str, split: str, streaming: bool) -> Iterator[Iterator[Any]]:
    """The records of each file, or of each split of a hub dataset."""
    check_path("data.name", name)
    path = Path(name)
    if path.is_dir():
        built = path / f"{split}.jsonl"
        files = [built] if built.is_file() else sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES)
        if not files:
            raise ValueError(f"data.name: expected JSONL, JSON or parquet files in {name!r}, got none")
        yield from map(_file, files)
    elif path.is_file():
        yield _file(path)
    elif path.suffix in _SUFFIXES or path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise ValueError(
            f"data.name: expected a file, a folder or a hub name (owner/set), got {name!r}, which does not exist"
        )
    else:
        yield from _hub(name, split, streaming)


def _hub(name: str, split: str, streaming: bool) -> Iterator[Iterator[Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"data.name: expected the package datasets for hub names (pip install manus-fast[data]), got {name!r}"
        ) from error
    dataset, colon, chosen = name.partition(":")

    def refused(error: Exception) -> ValueError:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ValueError(f"data.name: expected a file, a folder or a hub dataset, got {name!r} ({what})")

    def rows(part: Any) -> Iterator[Any]:
        try:
            yield from part
        except (OSError, ValueError) as error:
            raise refused(error) from error

    try:
        found = load_dataset(dataset, streaming=streaming)
    except (OSError, ValueError) as error:
        raise refused(error) from error
    if colon and chosen not in found:
        raise ValueError(f"data.name: expected one of the splits {', '.join(found)} of {dataset!r}, got {chosen!r}")
    for key in [chosen] if colon else [split] if split in found else found:
        yield rows(found[key])


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
