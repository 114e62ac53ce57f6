"""The merged OpenManus-RL set, in both shapes: from/value/loss and role/content[/loss].

Its role/content rows carry no flags; every reply in a row that names none is trainable.
"""

from __future__ import annotations

from typing import Any

from manus_fast.data.schema import Conversation, MalformedRow, conversation, domain_of
from manus_fast.data.sources import agent_flan, agent_instruct

SOURCE = "openmanus_rl"


def matches(row: dict[str, Any]) -> bool:
    return ("data_source" in row and "conversations" in row) or "messages" in row or _chat(row.get("conversations"))


def read(row: dict[str, Any]) -> Conversation:
    turns = row.get("conversations", row.get("messages"))
    identifier = row.get("item_id", row.get("id"))
    named = row.get("data_source") or str(identifier)
    domain = row["domain"] if isinstance(row.get("domain"), str) else domain_of(str(named))
    if not _chat(turns):
        return conversation(identifier, SOURCE, turns, agent_instruct.ROLES, agent_instruct.KEYS, domain)
    turns = [_aliased(turn) for turn in turns]
    if not any("loss" in turn for turn in turns):
        turns = [{**turn, "loss": turn["role"] == "assistant"} for turn in turns]
    source = row["source"] if isinstance(row.get("source"), str) else SOURCE
    item = conversation(identifier, source, turns, agent_flan.ROLES, agent_flan.KEYS, domain)
    # Our own built files name the task.
    item.task = row["task"] if isinstance(row.get("task"), str) else ""
    return item


def _chat(turns: Any) -> bool:
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "role" in turns[0]


def _aliased(turn: Any) -> dict[str, Any]:
    """Our own built files say `trainable` where the published ones say `loss`."""
    if not isinstance(turn, dict) or "role" not in turn:
        raise MalformedRow("another schema")
    return {**turn, "loss": turn["trainable"]} if "trainable" in turn else turn
