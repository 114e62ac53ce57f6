"""Preference pairs: `preferences.jsonl`, its checks, and the rows of tokens that DPO and the reward model train on.

    {"prompt": [messages], "chosen": [messages], "rejected": [messages], "level": "step" | "trajectory", "source": text}

`chosen` and `rejected` go on from the prompt: an assistant's reply, or replies and observations in turn. Only their
assistant messages are trained on; the prompt and every observation are context. Optional keys: `margin` (a number),
`outcome` ([chosen, rejected], each in [0, 1]) and `tokens` (what was sampled, token for token; see `encode_rows`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from manus_fast.agent.context import Context
from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import Row
from manus_fast.data.load import read_records
from manus_fast.data.normalise import rewritten
from manus_fast.data.react import keep_trainable, message_rows
from manus_fast.data.schema import MAX_CONTENT, MalformedRow, encodable
from manus_fast.data.sources.pairs import published_pair
from manus_fast.files import whole
from manus_fast.paths import make_folder

LEVELS = ("step", "trajectory")
_SIDES = ("chosen", "rejected")


@dataclass
class Preference:
    """One record of preferences.jsonl."""

    prompt: list[dict[str, Any]]
    """{"role", "content"}: system (optional, first), then user and assistant in turn, ending with a user's."""
    chosen: list[dict[str, Any]]
    """Begins and ends with an assistant's message."""
    rejected: list[dict[str, Any]]
    level: str = "trajectory"
    source: str = ""
    margin: float | None = None
    """By how much the chosen side's reward is higher."""
    outcome: tuple[float, float] | None = None
    """What the chosen and the rejected side came to: 1 success, 0 failure, or a score between."""
    tokens: dict[str, Any] | None = None
    """{"tokenizer": fingerprint, "chosen": rows, "rejected": rows}."""
    task: str | None = None
    """What both sides are an attempt at, where the prompt's first message does not say it alone."""

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class RowPair:
    """A preference as rows; a windowed context makes several of one side."""

    chosen: list[Row]
    rejected: list[Row]
    outcome: tuple[float, float] | None = None
    level: str = "trajectory"

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in (*self.chosen, *self.rejected))


def holds_preferences(name: str, streaming: bool = False) -> bool:
    """Whether the first record of a dataset that can be parsed has a chosen and a rejected side.

    Raises:
        ValueError: as `load_preferences`.
    """
    record = next((r for r in read_records(name, streaming=streaming) if not isinstance(r, MalformedRow)), None)
    return isinstance(record, Mapping) and {"chosen", "rejected"} <= set(record)


def load_preferences(
    name: str, dropped: Counter[str], streaming: bool = False, protocol: Protocol | None = None
) -> Iterator[Preference]:
    """The preferences of a JSONL, JSON or parquet file, a folder of them or a hub dataset, in order.

    Args:
        dropped: counts the rows that are no preference, by reason.
        streaming: read a hub dataset row by row, instead of from the cache that it is loaded into.
        protocol: rewrites the replies that are trained on in its form, where a pair has no sampled tokens that they
            would no longer be; None keeps them as they are.

    Raises:
        ValueError: no such file, or an unknown kind of file.
    """
    for record in read_records(name, streaming=streaming):
        try:
            if isinstance(record, MalformedRow):
                raise record
            item = preference(record)
            if protocol is not None and item.tokens is None:
                item = replace(item, **{side: rewritten(getattr(item, side), protocol) for side in _SIDES})
                if item.chosen == item.rejected:
                    raise MalformedRow("chosen equals rejected")
        except MalformedRow as error:
            dropped[error.reason] += 1
            continue
        yield item


def preference(record: Any) -> Preference:
    """Checks one record.

    Besides the form above it takes those that datasets use: text instead of messages, whole conversations on both
    sides (with or without `prompt`), whose common beginning is the prompt, and those of `sources/pairs.py`.

    Raises:
        MalformedRow: anything else.
    """
    if not isinstance(record, Mapping) or not {"chosen", "rejected"} <= set(record):
        raise MalformedRow("another schema")
    record = published_pair(record)
    tokens = record.get("tokens")
    # What was sampled may be an end token alone, whose text is empty.
    sides = [_messages(record[name], "assistant", tokens is not None) for name in ("chosen", "rejected")]
    if record.get("prompt") is not None:
        prompt = _messages(record["prompt"], "user", tokens is not None)
        sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    else:
        common = 0
        while common < min(map(len, sides)) and sides[0][common] == sides[1][common]:
            common += 1
        prompt, sides = sides[0][:common], [side[common:] for side in sides]
        if all(sides) and any(side[0]["role"] == "user" for side in sides):
            raise MalformedRow("the sides differ before a reply")
    if sides[0] == sides[1] and tokens is None:
        raise MalformedRow("chosen equals rejected")
    if not all(sides):
        raise MalformedRow("a side without a reply")
    _check_order(prompt, "start", "user")
    for side in sides:
        _check_order(side, "user", "assistant")
    level = record.get("level") or ("step" if max(map(len, sides)) == 1 else "trajectory")
    if level not in LEVELS:
        raise MalformedRow("unknown level")
    margin, outcome = record.get("margin"), record.get("outcome")
    if margin is not None and not _number(margin):
        raise MalformedRow("margin is not a number")
    if outcome is not None:
        if not isinstance(outcome, list | tuple) or len(outcome) != 2 or not all(map(_share, outcome)):
            raise MalformedRow("outcome is not two numbers in [0, 1]")
        outcome = (float(outcome[0]), float(outcome[1]))
    if tokens is not None:
        if not isinstance(tokens, Mapping) or not isinstance(tokens.get("tokenizer"), str):
            raise MalformedRow("malformed tokens")
        for name in ("chosen", "rejected"):
            decode_rows(tokens.get(name))
    task = record.get("task")
    if task is not None and not isinstance(task, str):
        raise MalformedRow("task is not text")
    return Preference(prompt, *sides, level, str(record.get("source") or ""), margin, outcome, tokens, task)


def preference_rows(
    items: Iterable[Preference],
    context: Context,
    system: str = "",
    *,
    max_length: int | None = None,
    dropped: Counter[str] | None = None,
) -> list[RowPair]:
    """The rows of preferences, each side built as the agent would write it.

    Where a preference brings the tokens that were sampled and they are this tokenizer's, those are the rows; else the
    messages are encoded.

    Args:
        context: chat format, and how much of an episode each reply sees.
        system: system message of a prompt that brings none.
        max_length: tokens that a row may have; a pair with a longer one is left out.
        dropped: counts what is left out by reason; None: it is not wanted.
    """
    dropped = Counter() if dropped is None else dropped
    tokenizer = context.format.tokenizer
    own: str | None = None
    pairs = []
    for item in items:
        if item.tokens is not None and own is None:
            own = fingerprint(tokenizer)
        try:
            if item.tokens is not None and item.tokens["tokenizer"] == own:
                sides = [decode_rows(item.tokens[name], len(tokenizer)) for name in ("chosen", "rejected")]
            else:
                sides = [_side(context, system, item.prompt, side) for side in (item.chosen, item.rejected)]
            if not all(sides):
                raise MalformedRow("a side without a trainable token")
            if max_length is not None and any(len(row) > max_length for side in sides for row in side):
                raise MalformedRow("longer than max_length")
            if _same(*sides):
                raise MalformedRow("chosen equals rejected")
        except MalformedRow as error:
            dropped[error.reason] += 1
            continue
        pairs.append(RowPair(*sides, item.outcome, item.level))
    return pairs


def encode_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for `tokens`: {"ids": [T], "spans": [[start, end, turn], …]}, the spans being what is trained on."""
    encoded = []
    for row in rows:
        turn = np.where(row.loss_mask, row.turn_id, -1)
        edges = np.flatnonzero(np.diff(turn, prepend=-1, append=-1))
        spans = [[int(a), int(b), int(turn[a])] for a, b in itertools.pairwise(edges) if turn[a] >= 0]
        encoded.append({"ids": [int(i) for i in row.token_ids], "spans": spans})
    return encoded


def decode_rows(encoded: Any, vocabulary: int | None = None) -> list[Row]:
    """Reads what `encode_rows` wrote. Raises MalformedRow for another form, or an id outside the vocabulary."""
    rows = []
    if not isinstance(encoded, list) or not encoded:
        raise MalformedRow("malformed tokens")
    for record in encoded:
        try:
            ids = np.asarray(record["ids"], np.int64)
            spans = np.asarray(record["spans"], np.int64).reshape(-1, 3)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise MalformedRow("malformed tokens") from error
        fits = (spans[:, 0] >= 1) & (spans[:, 0] < spans[:, 1]) & (spans[:, 1] <= len(ids)) & (spans[:, 2] >= 0)
        if ids.ndim != 1 or not len(ids) or ids.min() < 0 or not fits.all():
            raise MalformedRow("malformed tokens")
        if vocabulary is not None and ids.max() >= vocabulary:
            raise MalformedRow("token outside the vocabulary")
        turn = np.full(len(ids), -1, np.int32)
        for start, end, number in spans:
            turn[start:end] = number
        rows.append(_plain_row(ids, turn))
    return keep_trainable(rows)[0]


def fingerprint(tokenizer: Any) -> str:
    """A name for a tokenizer's vocabulary: two with the same one give the same ids the same meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises ValueError where a reward model of the tokenizer `name` would read another one's ids."""
    own = fingerprint(tokenizer)
    if name != own:
        raise ValueError(f"reward_model.path: expected a reward model of the policy's tokenizer ({own}), got {name}'s")


def save_preferences(items: Iterable[Preference], path: str | Path) -> int:
    """Writes preferences.jsonl, whole or not at all, and returns how many lines it has."""
    file = Path(path)
    make_folder(file.parent)
    count = 0
    with whole(file) as out:
        for item in items:
            out.write(json.dumps(item.to_json()) + "\n")
            count += 1
    return count


def _messages(value: Any, role: str, empty: bool) -> list[dict[str, Any]]:
    """Checked messages of a prompt or side; text alone is one message of `role`."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list | tuple) or not value:
        raise MalformedRow("another schema")
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or "role" not in message:
            raise MalformedRow("another schema")
        content = message.get("content")
        if message["role"] not in ("system", "user", "assistant"):
            raise MalformedRow("unknown role")
        if not isinstance(content, str):
            raise MalformedRow("content is not text")
        if not empty and not content.strip():
            raise MalformedRow("empty turn")
        if len(content) >= MAX_CONTENT:
            raise MalformedRow("message too long")
        if not content.isascii() and not encodable(content):
            raise MalformedRow("invalid UTF-8")
        trainable = message.get("trainable", True)
        if not isinstance(trainable, bool):
            raise MalformedRow("trainable is not true or false")
        kept = {"role": message["role"], "content": content}
        messages.append(kept if trainable else {**kept, "trainable": False})
    return messages


_AFTER = {"start": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",)}


def _check_order(messages: Sequence[Mapping[str, Any]], previous: str, last: str) -> None:
    for message in messages:
        if message["role"] not in _AFTER[previous]:
            raise MalformedRow("wrong role order")
        previous = message["role"]
    if not messages or previous != last:
        raise MalformedRow("wrong role order")


def _side(context: Context, system: str, prompt: list[dict[str, Any]], side: list[dict[str, Any]]) -> list[Row]:
    head = [{"role": "system", "content": system}] if system and prompt[0]["role"] != "system" else []
    seen = [{**message, "trainable": False} for message in prompt]
    return keep_trainable(message_rows(context, [*head, *seen, *side]))[0]


def _plain_row(ids: np.ndarray, turn: np.ndarray) -> Row:
    zero = np.zeros(len(ids), np.float32)
    return Row(ids, turn >= 0, turn, zero, zero.copy(), 0)


def _same(chosen: Sequence[Row], rejected: Sequence[Row]) -> bool:
    return len(chosen) == len(rejected) and all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.loss_mask, b.loss_mask)
        for a, b in zip(chosen, rejected, strict=True)
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1
