"""AgentTraj-L: {"item_id", "conversations": [{"from", "value", "loss"}]}; the first reply ("Ok.") has loss false."""

from __future__ import annotations

from typing import Any

from manus_fast.data.schema import Conversation, conversation
from manus_fast.data.sources.agent_instruct import KEYS, ROLES


def matches(row: dict[str, Any]) -> bool:
    return "item_id" in row and "conversations" in row and "data_source" not in row


def read(row: dict[str, Any]) -> Conversation:
    return conversation(row["item_id"], "agent_traj", row["conversations"], ROLES, KEYS)
