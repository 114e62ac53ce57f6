"""Mixes datasets into train.jsonl and valid.jsonl, without near duplicates and without a task in both."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.duplicates import NearDuplicates
from manus_fast.data.load import load_conversations, renamed
from manus_fast.data.schema import Conversation

_SHOWN = 1000
"""Near duplicates of a source that its report lists."""


@dataclass(frozen=True)
class BuildConfig:
    """What `build` keeps."""

    valid: float = 0.05
    """Share of tasks in valid.jsonl."""
    max_turns: int = 100
    max_chars: int = 100_000
    """Characters of a whole conversation."""
    similarity: float = 0.9
    """Jaccard similarity of word 5-grams from which the later of two conversations is dropped; 1: exact copies only."""
    seed: int = 0
    streaming: bool = False
    """Read hub datasets row by row, instead of from the cache that they are loaded into."""
    keep_repeated_ids: bool = False
    """Keep conversations whose id came before in the same file."""

    def __post_init__(self) -> None:
        if not 0 <= self.valid < 1:
            raise ValueError(f"valid: expected a share in [0, 1), got {self.valid}")
        if not 0 < self.similarity <= 1:
            raise ValueError(f"similarity: expected a number in (0, 1], got {self.similarity}")
        for name in ("max_turns", "max_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {getattr(self, name)}")


def is_valid(item: Conversation, share: float, seed: int) -> bool:
    """Whether a task is in the validation split: by its name alone (its id where it has none), so that all of its
    conversations are on one side."""
    digest = hashlib.sha256(f"{seed}:{item.task or item.id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def build(
    sources: Sequence[tuple[str, float]], out: str | Path, config: BuildConfig, protocol: Protocol
) -> dict[str, Any]:
    """Writes `out`/train.jsonl, valid.jsonl and report.json: all three at the end, or none of them.

    Args:
        sources: (path or hub name, weight); the weights are the shares of the mix, 0 leaves a source out. The source
            that is scarcest for its weight is used whole.

    Returns:
        The report: kept and dropped rows, with reasons, by source, and of near duplicates what each is like.

    Raises:
        ValueError: a weight that is negative, nothing to mix, a source without a row to train on, a folder that cannot
            be written to, or whatever `load_conversations` refuses.
    """
    weights = [weight for _, weight in sources]
    if not any(weights) or not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"sources: expected finite weights >= 0 and one above 0, got {weights}")
    with _Files(out, ("train.jsonl", "valid.jsonl", "report.json")) as files:
        duplicates = NearDuplicates(config.similarity)
        report: dict[str, Any] = {"sources": {}, "train": 0, "valid": 0}
        pools: list[tuple[str, float, list[Conversation]]] = []
        for name, weight in sources:
            if weight > 0:
                kept, report["sources"][name] = _read(name, config, protocol, duplicates)
                pools.append((name, weight, kept))
                report["sources"][name]["weight"] = weight
        unit = min(len(kept) / weight for _, weight, kept in pools)
        chosen: list[Conversation] = []
        for name, weight, kept in pools:
            count = min(len(kept), round(unit * weight))
            # A string seeds the generator the same on every machine.
            chosen += random.Random(f"{config.seed}:{name}").sample(kept, count)
            report["sources"][name]["used"] = count
        random.Random(config.seed).shuffle(chosen)
        taken: set[tuple[str, str]] = set()
        for item in chosen:
            split = "valid" if is_valid(item, config.valid, config.seed) else "train"
            report[split] += 1
            if (item.source, item.id) in taken:  # in one file an id stands once
                item = renamed(item, taken)
            taken.add((item.source, item.id))
            files.write(f"{split}.jsonl", json.dumps(item.to_json()) + "\n")
        files.write("report.json", json.dumps(report, indent=2) + "\n")
    return report


def _read(
    name: str, config: BuildConfig, protocol: Protocol, duplicates: NearDuplicates
) -> tuple[list[Conversation], dict[str, Any]]:
    """What is kept of a source, and its part of the report."""
    dropped: Counter[str] = Counter()
    kept: list[Conversation] = []
    alike: list[dict[str, str]] = []
    for item in load_conversations(
        name, dropped, protocol, streaming=config.streaming, keep_repeated_ids=config.keep_repeated_ids
    ):
        text = _told_apart_by(item)
        if sum(message["role"] == "assistant" for message in item.messages) > config.max_turns:
            dropped["too many turns"] += 1
        elif sum(len(message["content"]) for message in item.messages) > config.max_chars:
            dropped["conversation too long"] += 1
        elif (other := duplicates.add(f"{name}: {item.id}", text)) is not None:
            dropped["near duplicate"] += 1
            alike.append({"id": item.id, "like": other})
        else:
            kept.append(item)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "it holds no row"
        raise ValueError(f"sources: expected conversations to train on in {name!r}, got none ({reasons})")
    return kept, {"read": len(kept), "dropped": dict(sorted(dropped.items())), "near_duplicates": alike[:_SHOWN]}


def _told_apart_by(item: Conversation) -> str:
    """The conversation from the observation before its first trained reply on: system messages, and the exchange of
    rules and "Ok." that many datasets begin with, are the same in thousands of conversations."""
    first = next(number for number, message in enumerate(item.messages) if message["trainable"])
    return "\n".join(message["content"] for message in item.messages[first - 1 :])


class _Files:
    """Files of a folder that appear together at the end, or not at all where something goes wrong before it."""

    def __init__(self, folder: str | Path, names: Sequence[str]):
        self._given, self.folder = folder, Path(folder)
        self._partial = {name: self.folder / f".{name}.{os.getpid()}.partial" for name in names}
        self._made: list[Path] = []
        self._open: dict[str, IO[str]] = {}

    def write(self, name: str, text: str) -> None:
        self._open[name].write(text)

    def __enter__(self) -> _Files:
        if not str(self._given):
            raise ValueError("--output_dir: expected a folder, got none")
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._made = missing
            for name, path in self._partial.items():
                self._open[name] = path.open("w", encoding="utf-8")
        except OSError as error:
            self._clear()
            raise ValueError(
                f"--output_dir: expected a folder that can be written to, got {str(self.folder)!r} ({error.strerror})"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        try:
            for file in self._open.values():
                file.close()
            if kind is None:
                for name, path in self._partial.items():
                    path.replace(self.folder / name)
                self._made = []
        finally:
            self._clear()

    def _clear(self) -> None:
        for file in self._open.values():
            file.close()
        for name in self._open:
            self._partial[name].unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                folder.rmdir()
