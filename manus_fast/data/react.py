"""Conversations and expert demonstrations as training rows, through the same code that builds a rollout's prompts.

What SFT trains on is therefore token for token what the policy will see and write in play: the same head, bridges, end
tokens and context (a windowed context forks rows as it does in play).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import Row, Trajectory, Turn, build_rows


@dataclass(frozen=True)
class Step:
    """What was seen and what the demonstrator did about it."""

    observation: str
    thought: str
    action: str
    admissible: Sequence[str] | None = None
    trainable: bool = True
    """False keeps the step as context and takes no loss on it."""


def demonstration_rows(
    context: Context | ChatFormat, protocol: Protocol, system: str, steps: Sequence[Step], episode: int = 0
) -> list[Row]:
    """Rows of one demonstrated episode.

    Args:
        context: how much of the episode each reply sees; a bare ChatFormat means all of it, which gives one row.
        protocol: writes the observations and the replies.
        system: system message, `protocol.system_prompt(environment.instructions)`.
        steps: in order; a last observation without an action has no place here, since nothing is learnt from it.
        episode: goes into `Row.episode`.

    Raises:
        ValueError: no steps, or a thought or action of several lines.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for step in steps:
        messages.append({"role": "user", "content": protocol.user_message(step.observation, step.admissible)})
        reply = protocol.render(step.thought, step.action)
        messages.append({"role": "assistant", "content": reply, "trainable": step.trainable})
    return message_rows(context, messages, episode)


def message_rows(context: Context | ChatFormat, messages: Sequence[Mapping[str, Any]], episode: int = 0) -> list[Row]:
    """Rows of a conversation whose assistant messages are trained on, end tokens included.

    Args:
        context: see `demonstration_rows`.
        messages: {"role", "content"[, "trainable": bool]} with roles system (first, optional), user and assistant;
            neighbouring user messages are joined by a newline. What follows the last reply is left out.
        episode: goes into `Row.episode`.

    Raises:
        ValueError: a role out of place, content that is no text, or no reply at all.
    """
    context = Context(context) if isinstance(context, ChatFormat) else context
    system, exchanges = _exchanges(messages)
    turns: list[Turn] = []
    conversation = context.start(system, exchanges[0][0])
    for number, (_, reply, _) in enumerate(exchanges):
        ids = context.format.reply(reply)
        turns.append(Turn(conversation.prompt(), ids, np.zeros(len(ids), np.float32), "stop"))
        if number + 1 < len(exchanges):
            conversation.add(ids, exchanges[number + 1][0])
    whole = Trajectory("demonstration", "", "", "", "", 0, 0, 0, turns=turns, success=True, terminated=True)
    rows = build_rows([whole])
    skipped = [number for number, (_, _, trainable) in enumerate(exchanges) if not trainable]
    for row in rows:
        row.episode = row.group = episode
        off = np.isin(row.turn_id, skipped)
        row.loss_mask[off] = False
        row.turn_id[off] = -1
    return rows


def spans(row: Row) -> list[tuple[np.ndarray, bool]]:
    """The row's ids in the stretches that are trained on and those that are not, in order."""
    edges = np.flatnonzero(np.diff(row.loss_mask)) + 1
    return [
        (row.token_ids[start:end], bool(row.loss_mask[start]))
        for start, end in itertools.pairwise([0, *edges.tolist(), len(row)])
    ]


def keep_trainable(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """The rows with at least one trainable token, and how many have none."""
    kept = [row for row in rows if row.loss_mask.any()]
    return kept, len(rows) - len(kept)


def _exchanges(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str, bool]]]:
    """The system message, and (user message, reply, trainable) for every reply."""
    system, pending, exchanges = "", [], []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            raise ValueError(f"messages[{number}].content: expected text, got {content!r}")
        if role == "system" and number == 0:
            system = content
        elif role == "user":
            pending.append(content)
        elif role == "assistant" and pending:
            exchanges.append(("\n".join(pending), content, bool(message.get("trainable", True))))
            pending = []
        else:
            before = "the start" if number == 0 else repr(messages[number - 1].get("role"))
            raise ValueError(f"messages[{number}].role: expected user or a reply to one, got {role!r} after {before}")
    if not exchanges:
        raise ValueError("messages: expected at least one user message with a reply, got none")
    return system, exchanges
