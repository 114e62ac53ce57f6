"""The prompt as chat messages, for an endpoint that takes text and gives text: its tokens are not ours to see.

It stands where `Context` stands (agent/context.py), so that the rollout, the protocol and the limits are the same ones.
A turn that comes about this way has no ids and is never trained on by policy gradient; `data distill` makes rows of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manus_fast.agent.context import CONTEXTS

_NO_IDS = np.zeros(0, np.int32)

Message = dict[str, str]


@dataclass
class MessageContext:
    """How much of an episode each prompt shows: `full` is everything, `window` the head and the last k turns.

    Raises:
        ValueError: another kind, or a window below 1.
    """

    kind: str = "full"
    window: int = 8

    def __post_init__(self) -> None:
        if self.kind not in CONTEXTS:
            raise ValueError(f"agent.context: expected one of {', '.join(CONTEXTS)}, got {self.kind!r}")
        if self.kind == "window" and self.window < 1:
            raise ValueError(f"agent.window: expected an integer >= 1, got {self.window}")

    def start(self, system: str, user: str) -> MessageConversation:
        head = [{"role": "system", "content": system}] if system else []
        return MessageConversation(self, [*head, {"role": "user", "content": user}])


class MessageConversation:
    """The messages of one episode: `messages` is the prompt of the next reply, `fresh` what is new in it."""

    def __init__(self, context: MessageContext, head: list[Message]):
        self._context = context
        self._head = head
        self._turns: list[list[Message]] = []  # each a reply and the user message that answers it
        self.fresh = head

    @property
    def messages(self) -> list[Message]:
        kept = self._turns if self._context.kind == "full" else self._turns[-self._context.window :]
        return [*self._head, *(message for turn in kept for message in turn)]

    def prompt(self) -> np.ndarray:
        """int32 [0]: there are no ids."""
        return _NO_IDS

    def add(self, reply: str, user: str) -> None:
        """Records a reply's text and the user message that answers it."""
        answer = {"role": "user", "content": user}
        self._turns.append([{"role": "assistant", "content": reply}, answer])
        self.fresh = [answer]

    def clone(self) -> MessageConversation:
        other = MessageConversation(self._context, self._head)
        other._turns, other.fresh = list(self._turns), self.fresh
        return other
