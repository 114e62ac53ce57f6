"""Preference pairs as datasets publish them, with the keys of preferences.jsonl.

| shape | |
|---|---|
| HH-RLHF | whole dialogues on both sides as one text: "\\n\\nHuman: …\\n\\nAssistant: …" |
| columns | `question`, or `instruction` and perhaps `input`, and perhaps `system`, with replies as text |
| ShareGPT | `conversations` of `from`, `value`, and one `from`, `value` message on each side |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from manus_fast.data.schema import MalformedRow

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_SIDES = ("chosen", "rejected")


def published_pair(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with `prompt`, `chosen` and `rejected` as `preferences.preference` reads them; a record of any other
    shape comes back as it is, for that to judge.

    Raises:
        MalformedRow: a shape of these whose parts are not what it says.
    """
    if "prompt" not in record:
        if "conversations" in record:
            sides = {name: _share_gpt([record[name]]) for name in _SIDES}
            return {**record, "prompt": _share_gpt(record["conversations"]), **sides}
        for names in (("question",), ("instruction", "input")):
            if names[0] in record:
                return {**record, "prompt": _asked(record.get("system"), [record.get(name) for name in names])}
    texts = [record[name] for name in _SIDES]
    if all(isinstance(text, str) and text.lstrip().startswith("Human:") for text in texts):
        return {**record, **{name: _dialogue(record[name]) for name in _SIDES}}
    return record


def _asked(system: Any, parts: list[Any]) -> list[dict[str, Any]]:
    first, *more = parts
    given = [first, *(part for part in more if part not in (None, ""))]
    if not all(isinstance(part, str) for part in given):
        raise MalformedRow("content is not text")
    head = [] if system in (None, "") else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": "\n".join(given)}]


def _dialogue(text: str) -> list[dict[str, Any]]:
    """Messages of a dialogue that is one text."""
    _, *parts = _TURN.split(text.lstrip())
    roles = ("user" if name == "Human" else "assistant" for name in parts[::2])
    return [{"role": role, "content": said.strip()} for role, said in zip(roles, parts[1::2], strict=True)]


def _share_gpt(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list | tuple):
        raise MalformedRow("another schema")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise MalformedRow("another schema")
        role = _ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise MalformedRow("unknown role")
        messages.append({"role": role, "content": turn["value"]})
    return messages
