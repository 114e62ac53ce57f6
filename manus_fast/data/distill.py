"""A teacher's episodes as training conversations: what solved its task is kept, the rest is counted by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from manus_fast.agent.protocol import NO_ACTION, Protocol
from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.data.schema import DOMAINS, Conversation


@dataclass
class Distilled:
    """`dropped` counts episodes, `untrained` replies that stay in a kept episode as context only."""

    rows: list[Conversation] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    untrained: Counter[str] = field(default_factory=Counter)


def distill(trajectories: Sequence[Trajectory], protocol: Protocol, system: str, source: str) -> Distilled:
    """Rows of the episodes that solved their task.

    A reply is trained on where its action was one that the world takes: written anew in the protocol's form, its
    thought on one line. A refused or malformed reply is kept as it was, without loss, because the later turns saw it.

    Args:
        protocol: whose form the trained replies have.
        system: the system message of every row.
        source: goes into `Conversation.source`: the teacher.
    """
    result = Distilled()
    for trajectory in trajectories:
        if not trajectory.valid:
            where, _, what = str(trajectory.error).partition(": ")
            result.dropped[f"failed: {where}: {re.split('[:(]', what)[0].strip()}"] += 1  # without its details
            continue
        if not trajectory.success:
            result.dropped["cut before the task was solved" if trajectory.truncated else "task not solved"] += 1
            continue
        messages: list[dict[str, Any]] = [{"role": "system", "content": system, "trainable": False}] if system else []
        for turn in trajectory.turns:
            seen = turn.messages[-1]["content"] if turn.messages else turn.observation
            messages.append({"role": "user", "content": seen, "trainable": False})
            messages.append(_reply(turn, protocol, result.untrained))
        if not any(message["trainable"] for message in messages):
            result.dropped["nothing trainable"] += 1
            continue
        domain = DOMAINS.get(trajectory.env, trajectory.env)
        result.rows.append(Conversation(trajectory.id, source, domain, messages))
    return result


def _reply(turn: Turn, protocol: Protocol, untrained: Counter[str]) -> dict[str, Any]:
    reason = None
    if turn.action == NO_ACTION:
        reason = "no action"
    elif not turn.admissible:
        reason = "action not admissible"
    else:
        content = protocol.render(" ".join(turn.thought.split()), turn.action)
        if protocol.parse(content).action != turn.action:
            reason = "ambiguous action"
    if reason is None:
        return {"role": "assistant", "content": content, "trainable": True}
    untrained[reason] += 1
    # An empty message has no place in a conversation: what was sent to the world stands for it.
    return {"role": "assistant", "content": turn.text.strip() or NO_ACTION, "trainable": False}
