"""Agent-FLAN: {"id", "conversation": [{"role", "content", "loss"}]}."""

from __future__ import annotations

from typing import Any

from manus_fast.data.schema import Conversation, conversation

ROLES = {"system": "system", "user": "user", "function": "user", "assistant": "assistant"}
KEYS = ("role", "content", "loss")


def matches(row: dict[str, Any]) -> bool:
    return "id" in row and "conversation" in row


def read(row: dict[str, Any]) -> Conversation:
    return conversation(row["id"], "agent_flan", row["conversation"], ROLES, KEYS)
