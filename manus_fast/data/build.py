"""Mixes conversations, or preference pairs, into train.jsonl and valid.jsonl: no near duplicates, no task in both."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.duplicates import NearDuplicates
from manus_fast.data.entries import Entry, chosen_sides, conversation_entries, pair_entries
from manus_fast.data.load import load_conversations, renamed
from manus_fast.data.preferences import Preference, holds_preferences, load_preferences
from manus_fast.data.schema import Conversation
from manus_fast.paths import check_path, make_folder, undoing

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
    chosen: bool = False
    """Take the chosen sides of preference pairs as conversations."""

    def __post_init__(self) -> None:
        if not 0 <= self.valid < 1:
            raise ValueError(f"valid: expected a share in [0, 1), got {self.valid}")
        if not 0 < self.similarity <= 1:
            raise ValueError(f"similarity: expected a number in (0, 1], got {self.similarity}")
        for name in ("max_turns", "max_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {getattr(self, name)}")


def is_valid(task: str, share: float, seed: int) -> bool:
    """Whether a task is in the validation split: by its name alone, so that all of its conversations and pairs are on
    one side."""
    digest = hashlib.sha256(f"{seed}:{task}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def build(
    sources: Sequence[tuple[str, float]], out: str | Path, config: BuildConfig, protocol: Protocol | None
) -> dict[str, Any]:
    """Writes `out`/train.jsonl, valid.jsonl and report.json: all three at the end, or none of them.

    Args:
        sources: (path or hub name, weight), all of conversations or all of preference pairs; the weights are the shares
            of the mix, 0 leaves a source out. The source that is scarcest for its weight is used whole.
        protocol: writes trainable replies in its form; None keeps them as they are.

    Returns:
        The report: kept and dropped rows, with reasons, by source, and of near duplicates what each is like.

    Raises:
        ValueError: a weight that is negative, nothing to mix, conversations mixed with pairs, a source without a row to
            train on, a folder that cannot be written to, or whatever `load_conversations` refuses.
    """
    weights = [weight for _, weight in sources]
    if not any(weights) or not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"sources: expected finite weights >= 0 and one above 0, got {weights}")
    sources = [(name, weight) for name, weight in sources if weight > 0]
    if not str(out):
        raise ValueError("--output_dir: expected a folder, got none")
    check_path("--output_dir", out)
    pairs = _of_pairs(sources, config)
    with _files(Path(out), ("train.jsonl", "valid.jsonl", "report.json")) as files:
        duplicates = NearDuplicates(config.similarity)
        report: dict[str, Any] = {"sources": {}, "train": 0, "valid": 0}
        pools: list[tuple[str, float, list[Entry]]] = []
        for name, weight in sources:
            kept, report["sources"][name] = _read(name, pairs, config, protocol, duplicates)
            pools.append((name, weight, kept))
            report["sources"][name]["weight"] = weight
        unit = min(len(kept) / weight for _, weight, kept in pools)
        chosen: list[Entry] = []
        for name, weight, kept in pools:
            count = min(len(kept), round(unit * weight))
            # A string seeds the generator the same on every machine.
            chosen += random.Random(f"{config.seed}:{name}").sample(kept, count)
            report["sources"][name]["used"] = count
        random.Random(config.seed).shuffle(chosen)
        taken: set[tuple[str, str]] = set()
        for entry in chosen:
            split = "valid" if is_valid(entry.task, config.valid, config.seed) else "train"
            report[split] += 1
            files[f"{split}.jsonl"].write(json.dumps(_record(entry.item, taken)) + "\n")
        files["report.json"].write(json.dumps(report, indent=2) + "\n")
    return report


def _of_pairs(sources: Sequence[tuple[str, float]], config: BuildConfig) -> bool:
    """Whether pairs are built. Raises ValueError where some sources hold pairs and others conversations."""
    if config.chosen:
        return False
    found = {name: holds_preferences(name, config.streaming) for name, _ in sources}
    pairs = [name for name, holds in found.items() if holds]
    others = [name for name, holds in found.items() if not holds]
    if pairs and others:
        raise ValueError(
            "sources: expected either conversations or preference pairs in all of them, got pairs in "
            f"{pairs[0]!r} and none in {others[0]!r} (--chosen takes the chosen sides as conversations)"
        )
    return bool(pairs)


def _record(item: Conversation | Preference, taken: set[tuple[str, str]]) -> dict[str, Any]:
    """What is written of a conversation or pair. In one file an id stands once."""
    if isinstance(item, Conversation):
        if (item.source, item.id) in taken:
            item = renamed(item, taken)
        taken.add((item.source, item.id))
    return item.to_json()


def _read(
    name: str, pairs: bool, config: BuildConfig, protocol: Protocol | None, duplicates: NearDuplicates
) -> tuple[list[Entry], dict[str, Any]]:
    """What is kept of a source, and its part of the report."""
    dropped: Counter[str] = Counter()
    kept: list[Entry] = []
    alike: list[dict[str, str]] = []
    if pairs:
        entries = pair_entries(load_preferences(name, dropped, config.streaming, protocol))
    elif config.chosen and holds_preferences(name, config.streaming):
        loaded = load_preferences(name, dropped, config.streaming, protocol)
        entries = conversation_entries(chosen_sides(loaded, Path(name).stem, dropped))
    else:
        more = {"streaming": config.streaming, "keep_repeated_ids": config.keep_repeated_ids}
        entries = conversation_entries(load_conversations(name, dropped, protocol, **more))
    for entry in entries:
        if entry.replies > config.max_turns:
            dropped["too many turns"] += 1
        elif entry.characters > config.max_chars:
            dropped["conversation too long"] += 1
        elif (other := duplicates.add(f"{name}: {entry.name}", *entry.parts)) is not None:
            dropped["near duplicate"] += 1
            alike.append({"id": entry.name, "like": other})
        else:
            kept.append(entry)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "it holds no row"
        hint = "; --style none keeps replies as they are" if dropped["no action"] and protocol is not None else ""
        raise ValueError(f"sources: expected rows to train on in {name!r}, got none ({reasons}{hint})")
    return kept, {"read": len(kept), "dropped": dict(sorted(dropped.items())), "near_duplicates": alike[:_SHOWN]}


@contextmanager
def _files(folder: Path, names: Sequence[str]) -> Iterator[Mapping[str, IO[str]]]:
    """Files of a folder, by name, that appear together at the end, or not at all where something goes wrong before."""
    partial = {name: folder / f".{name}.{os.getpid()}.partial" for name in names}
    with undoing(), ExitStack() as stack:
        try:
            make_folder(folder)
            for path in partial.values():
                stack.callback(path.unlink, missing_ok=True)
            files = {name: stack.enter_context(path.open("w", encoding="utf-8")) for name, path in partial.items()}
        except OSError as error:
            raise ValueError(
                f"--output_dir: expected a folder that can be written to, got {str(folder)!r} ({error.strerror})"
            ) from error
        yield files
        for name, file in files.items():
            file.close()
            partial[name].replace(folder / name)
