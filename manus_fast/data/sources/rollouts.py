"""Our own rollouts: episodes of trajectories.jsonl that were solved.

A reply is trained on where it had the form, was admissible and came to its end; the others stay as context.
"""

from __future__ import annotations

from typing import Any

from manus_fast.agent.trajectory import SCHEMA
from manus_fast.data.schema import Conversation, MalformedRow, conversation, domain_of

SOURCE = "rollouts"
ROLES = {"user": "user", "assistant": "assistant"}
KEYS = ("role", "content", "loss")


def matches(row: dict[str, Any]) -> bool:
    return row.get("schema") == SCHEMA


def read(row: dict[str, Any]) -> Conversation:
    """Raises MalformedRow for an episode that failed or was not solved, too."""
    task, turns = row.get("task"), row.get("turns")
    if not isinstance(task, str) or not task or not isinstance(turns, list):
        raise MalformedRow("another schema")
    if row.get("valid") is not True:
        raise MalformedRow("failed episode")
    if row.get("success") is not True:
        raise MalformedRow("unsolved episode")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not {"observation", "text"} <= turn.keys():
            raise MalformedRow("another schema")
        good = turn.get("finish_reason") == "stop" and turn.get("format_ok") is True and turn.get("admissible") is True
        messages.append({"role": "user", "content": turn["observation"], "loss": False})
        messages.append({"role": "assistant", "content": turn["text"], "loss": good})
    item = conversation(row.get("id"), SOURCE, messages, ROLES, KEYS, domain_of(str(row.get("env", ""))))
    item.task = task
    return item
