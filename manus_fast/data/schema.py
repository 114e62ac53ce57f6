"""What every dataset becomes: one conversation type, and the reason why a row could not become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_CONTENT = 200_000
"""Characters that one message may hold less than."""

DOMAINS = {
    "os": "OS",
    "db": "DB",
    "bird": "DB",
    "sqlgym": "DB",
    "kg": "KG",
    "alfworld": "household",
    "babyai": "household",
    "webshop": "e-commerce",
    "mind2web": "web",
    "sciworld": "science",
    "textcraft": "game",
    "maze": "game",
    "wordle": "game",
    "weather": "tools",
    "movie": "tools",
    "todo": "tools",
    "toolbench": "tools",
}


class MalformedRow(ValueError):
    """A row that cannot be trained on; `reason` is one of a few fixed texts, fit for counting."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass
class Conversation:
    """One conversation. `messages` are {"role", "content", "trainable"}: system (optional, first), then user and
    assistant in turn, ending with an assistant's; only assistants' can be trainable."""

    id: str
    source: str
    domain: str
    messages: list[dict[str, Any]]
    task: str = ""
    """What the conversation is an attempt at, where several may be; "" means that its id says so."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


_NEXT = {"start": ("user", "system"), "system": ("user",), "user": ("assistant",), "assistant": ("user",)}
"""Which roles may follow which."""


def domain_of(identifier: str, default: str = "other") -> str:
    """The domain that an id such as "webshop_12" or "babyai_3" names with its first word."""
    word = identifier.replace("-", "_").replace("/", "_").split("_")[0].lower()
    return DOMAINS.get(word, default)


def conversation(
    identifier: Any, source: str, turns: Any, roles: dict[str, str], keys: Sequence[str], domain: str | None = None
) -> Conversation:
    """Checks a row's turns and builds the conversation.

    Args:
        turns: the row's list of mappings.
        roles: the dataset's role words → system, user, assistant.
        keys: names of the role, content and loss fields.

    Raises:
        MalformedRow: anything that is not as the dataset's published form has it.
    """
    if not isinstance(identifier, str | int) or isinstance(identifier, bool) or identifier == "":
        raise MalformedRow("missing id")
    if isinstance(turns, str) or not hasattr(turns, "__iter__"):
        raise MalformedRow("another schema")
    role_key, content_key, loss_key = keys
    messages: list[dict[str, Any]] = []
    previous, trainable = "start", False
    for turn in turns:
        try:
            word, content = turn[role_key], turn[content_key]
            role = roles.get(word)
        except (KeyError, TypeError, IndexError) as error:  # a turn without the fields, that is no mapping, …
            raise MalformedRow("another schema") from error
        if role is None:
            raise MalformedRow("unknown role")
        if not isinstance(content, str):
            raise MalformedRow("null content" if content is None else "content is not text")
        if not content or content.isspace():
            raise MalformedRow("empty turn")
        if len(content) >= MAX_CONTENT:
            raise MalformedRow("message too long")
        if not content.isascii() and not encodable(content):
            raise MalformedRow("invalid UTF-8")
        if role not in _NEXT[previous]:
            raise MalformedRow("two assistants in a row" if role == previous == "assistant" else "wrong role order")
        flag = False
        if role == "assistant":
            flag = turn.get(loss_key)
            if not isinstance(flag, bool):
                raise MalformedRow("missing flag")
            trainable = trainable or flag
        messages.append({"role": role, "content": content, "trainable": flag})
        previous = role
    if previous == "user":
        messages.pop()
    if not trainable:
        raise MalformedRow("nothing trainable")
    name = str(identifier)
    return Conversation(name, source, domain or domain_of(name), messages)


def encodable(text: str) -> bool:
    """Whether files and tokenizers take a text: not one with half a character, as JSON's \\u escapes can write it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
