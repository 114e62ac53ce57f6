"""Adapters, one module a family of datasets: each says which rows are its own and reads one."""

from __future__ import annotations

from typing import Any

from manus_fast.data.schema import Conversation, MalformedRow
from manus_fast.data.sources import agent_flan, agent_instruct, agent_traj, openmanus, rollouts

# Our own rollouts name their schema. The merged set next: its rows hold the others' keys too.
ADAPTERS = (rollouts, openmanus, agent_traj, agent_instruct, agent_flan)


def read_row(row: Any) -> Conversation:
    """The conversation in a row of any known family. Raises MalformedRow with the reason where there is none."""
    if isinstance(row, dict):
        for adapter in ADAPTERS:
            if adapter.matches(row):
                return adapter.read(row)
    raise MalformedRow("another schema")
