"""Conversations and preference pairs as `build` sorts them: by task, by length, and by what tells them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manus_fast.data.preferences import Preference
from manus_fast.data.schema import Conversation, domain_of


@dataclass(frozen=True)
class Entry:
    """A conversation or a preference pair, and what `build` sorts it by."""

    item: Conversation | Preference
    name: str
    """What the report calls it."""
    task: str
    replies: int
    """Of the longer side."""
    characters: int
    """Of the prompt and the longer side."""
    parts: tuple[str, ...]
    """Texts that near duplicates are alike in, one by one."""


def conversation_entries(items: Iterable[Conversation]) -> Iterator[Entry]:
    for item in items:
        # System messages, and the exchange of rules and "Ok." that many datasets begin with, are the same in thousands
        # of conversations: what tells them apart begins with the observation before the first trained reply.
        first = next(number for number, message in enumerate(item.messages) if message["trainable"])
        text = _text(item.messages[first - 1 :])
        yield Entry(item, item.id, item.task or item.id, *_size(item.messages), (text,))


def pair_entries(items: Iterable[Preference]) -> Iterator[Entry]:
    for number, item in enumerate(items, 1):
        # A reply of a few words is lost in a long observation: pairs are alike where situation and both sides are.
        parts = (item.prompt[-1]["content"], _text(item.chosen), _text(item.rejected))
        sizes = [_size([*item.prompt, *side]) for side in (item.chosen, item.rejected)]
        yield Entry(item, f"pair {number}", task_of(item), *map(max, zip(*sizes, strict=True)), parts)


def task_of(item: Preference) -> str:
    """What a pair's sides are an attempt at: its task, or else the first user message, which pairs of single steps have
    in common with those of the whole episode."""
    return item.task or next(message["content"] for message in item.prompt if message["role"] == "user")


def chosen_sides(items: Iterable[Preference], name: str, dropped: Counter[str]) -> Iterator[Conversation]:
    """The prompts with their chosen sides, as conversations for supervised fine-tuning; only the latter are trained on.

    Args:
        name: the conversations' ids begin with it, and it is the source of pairs that name none.
        dropped: counts the pairs that give none, by reason.
    """
    for number, item in enumerate(items, 1):
        prompt = [{**message, "trainable": False} for message in item.prompt]
        chosen = [
            {**message, "trainable": message["role"] == "assistant" and message.get("trainable", True)}
            for message in item.chosen
        ]
        if not any(message["trainable"] for message in chosen):
            dropped["nothing trainable"] += 1
            continue
        source = item.source or name
        yield Conversation(f"{name}_{number}", source, domain_of(source), [*prompt, *chosen], task_of(item))


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(message["content"] for message in messages)


def _size(messages: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Replies and characters."""
    replies = sum(message["role"] == "assistant" for message in messages)
    return replies, sum(len(message["content"]) for message in messages)
