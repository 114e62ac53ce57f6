"""AgentInstruct: {"id", "conversations": [{"from": human | gpt, "value", "loss": bool | null}]}."""

from __future__ import annotations

from typing import Any

from manus_fast.data.schema import Conversation, conversation

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
KEYS = ("from", "value", "loss")


def matches(row: dict[str, Any]) -> bool:
    return "id" in row and "conversations" in row


def read(row: dict[str, Any]) -> Conversation:
    return conversation(row["id"], "agent_instruct", row["conversations"], ROLES, KEYS)
