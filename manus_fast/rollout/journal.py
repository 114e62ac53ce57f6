"""Replies of a paid endpoint on disk, one JSON line each: a run that was killed goes on without paying for them again.

A reply is found by what was asked (model, messages, seed, sampling), so a run with other settings never takes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from manus_fast.paths import open_to_add


class Journal:
    """Append-only. None as path keeps it in memory only.

    Raises:
        ValueError: a line in the middle of the file that is no record.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._replies: dict[str, dict[str, Any]] = {}
        self.cost = 0.0
        """US dollars of everything recorded."""
        self._file = None
        if path is None:
            return
        for record in read_lines(path):
            self._take(record)
        self._file = open_to_add(path)

    def __len__(self) -> int:
        return len(self._replies)

    def find(self, key: str) -> dict[str, Any] | None:
        return self._replies.get(key)

    def add(self, record: dict[str, Any]) -> None:
        """Records a reply ("key", "text", …, "cost"), or the "cost" alone of a request whose reply was lost."""
        self._take(record)
        if self._file is not None:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, record: dict[str, Any]) -> None:
        self.cost += float(record.get("cost", 0.0))
        if "key" in record:
            self._replies[record["key"]] = record


def key_of(asked: dict[str, Any]) -> str:
    """Hexadecimal digest of JSON-compatible values."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a JSONL file, none where there is no file. A last line without its end, which a killed run leaves
    behind, is cut off the file.

    Raises:
        ValueError: any other line that is no JSON object.
    """
    file = Path(path)
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(file, whole)
    records = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}: expected a JSON object in line {number}, got something else") from error
        if not isinstance(record, dict):
            raise ValueError(f"{file}: expected a JSON object in line {number}, got something else")
        records.append(record)
    return records
