"""Mixes datasets into train.jsonl and valid.jsonl, without near duplicates and without a task in both."""

from __future__ import annotations

import hashlib
import json
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.load import load_conversations
from manus_fast.data.schema import Conversation


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

    def __post_init__(self) -> None:
        if not 0 <= self.valid < 1:
            raise ValueError(f"valid: expected a share in [0, 1), got {self.valid}")
        if not 0 < self.similarity <= 1:
            raise ValueError(f"similarity: expected a number in (0, 1], got {self.similarity}")
        for name in ("max_turns", "max_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {getattr(self, name)}")


class NearDuplicates:
    """Remembers conversations and tells which are like one before: bottom-k sketches of word 5-grams (Broder, "On the
    resemblance and containment of documents", 1997), compared where two share one of their four least hashes."""

    def __init__(self, similarity: float, size: int = 64):
        self._similarity, self._size = similarity, size
        self._buckets: dict[int, list[frozenset[int]]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """True when a text that was added before is as similar as that; otherwise remembers this one."""
        words = re.findall(r"\w+", text.lower())
        grams = {zlib.crc32(" ".join(words[i : i + 5]).encode()) for i in range(max(1, len(words) - 4))}
        least = sorted(grams)[: self._size]
        sketch = frozenset(least)
        for key in least[:4]:
            for other in self._buckets[key]:
                union = sorted(sketch | other)[: self._size]
                if sum(h in sketch and h in other for h in union) >= self._similarity * len(union):
                    return True
        for key in least[:4]:
            self._buckets[key].append(sketch)
        return False


def is_valid(item: Conversation, share: float, seed: int) -> bool:
    """Whether a task is in the validation split: by its name alone (its id where it has none), so that all of its
    conversations are on one side."""
    digest = hashlib.sha256(f"{seed}:{item.task or item.id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def build(
    sources: Sequence[tuple[str, float]], out: str | Path, config: BuildConfig, protocol: Protocol
) -> dict[str, Any]:
    """Writes `out`/train.jsonl, valid.jsonl and report.json.

    Args:
        sources: (path or hub name, weight); the weights are the shares of the mix, 0 leaves a source out. The source
            that is scarcest for its weight is used whole.

    Returns:
        The report: kept and dropped rows, with reasons, by source.

    Raises:
        ValueError: a weight that is negative, nothing to mix, or whatever `load_conversations` refuses.
    """
    if not any(weight > 0 for _, weight in sources) or any(weight < 0 for _, weight in sources):
        raise ValueError(f"sources: expected weights >= 0 and one above 0, got {[w for _, w in sources]}")
    duplicates = NearDuplicates(config.similarity)
    pools: list[tuple[str, float, list[Conversation]]] = []
    report: dict[str, Any] = {"sources": {}, "train": 0, "valid": 0}
    for name, weight in sources:
        if weight == 0:
            continue
        dropped: Counter[str] = Counter()
        kept = []
        for item in load_conversations(name, dropped, protocol):
            # System messages and first observations repeat over a dataset; what was done tells copies apart.
            text = "\n".join(message["content"] for message in item.messages if message["role"] != "system")
            if sum(message["role"] == "assistant" for message in item.messages) > config.max_turns:
                dropped["too many turns"] += 1
            elif sum(len(message["content"]) for message in item.messages) > config.max_chars:
                dropped["conversation too long"] += 1
            elif duplicates.add(text):
                dropped["near duplicate"] += 1
            else:
                kept.append(item)
        pools.append((name, weight, kept))
        report["sources"][name] = {"weight": weight, "dropped": dict(sorted(dropped.items()))}
    unit = min(len(kept) / weight for _, weight, kept in pools)
    chosen: list[Conversation] = []
    for name, weight, kept in pools:
        count = min(len(kept), round(unit * weight))
        # A string seeds the generator the same on every machine.
        chosen += random.Random(f"{config.seed}:{name}").sample(kept, count)
        report["sources"][name] |= {"read": len(kept), "used": count}
    random.Random(config.seed).shuffle(chosen)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w") as train, (folder / "valid.jsonl").open("w") as valid:
        for item in chosen:
            split = "valid" if is_valid(item, config.valid, config.seed) else "train"
            report[split] += 1
            (valid if split == "valid" else train).write(json.dumps(item.to_json()) + "\n")
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def statistics(items: Sequence[Conversation]) -> dict[str, Any]:
    """Counts, turns, lengths in characters, sources and domains."""
    turns = sorted(sum(m["role"] == "assistant" for m in item.messages) for item in items)
    chars = sorted(sum(len(m["content"]) for m in item.messages) for item in items)

    def spread(values: list[int]) -> dict[str, float]:
        if not values:
            return {}
        at = {"min": 0, "median": len(values) // 2, "p95": int(0.95 * (len(values) - 1)), "max": len(values) - 1}
        return {"mean": sum(values) / len(values), **{name: values[index] for name, index in at.items()}}

    return {
        "conversations": len(items),
        "trainable_replies": sum(m["trainable"] for item in items for m in item.messages),
        "turns": spread(turns),
        "characters": spread(chars),
        "sources": dict(Counter(item.source for item in items)),
        "domains": dict(Counter(item.domain for item in items)),
    }
