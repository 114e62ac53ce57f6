"""Messages of a request as prompt ids, token for token as in a rollout."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from manus_fast.agent.context import ChatFormat

_REMEMBERED = 4096


class Prompts:
    """Renders conversations. A reply that comes back as it was sent is put in as the ids that were sampled: text that
    is encoded again may be cut otherwise, and the engine's cache would not know it."""

    def __init__(self, chat: ChatFormat):
        self._chat = chat
        self._sent: OrderedDict[tuple[bytes, str], np.ndarray] = OrderedDict()

    def render(self, messages: Sequence[dict[str, str]]) -> np.ndarray:
        """int32 [P] of messages {"role", "content"}: system (optional), then user and assistant in turn, user last.

        Raises:
            ValueError: another order of roles.
        """
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        talk = messages if system is None else messages[1:]
        if not talk or any(m["role"] != ("user", "assistant")[i % 2] for i, m in enumerate(talk)) or len(talk) % 2 == 0:
            roles = ", ".join(m["role"] for m in messages) or "none"
            raise ValueError(f"messages: expected system (optional), then user and assistant in turn, got {roles}")
        ids = self._chat.head(system or "", talk[0]["content"])
        for reply, user in zip(talk[1::2], talk[2::2], strict=True):
            sampled = self._sent.get((ids.tobytes(), reply["content"]))
            if sampled is None:
                sampled = self._chat.reply(reply["content"])
            ended = len(sampled) > 0 and int(sampled[-1]) in self._chat.end_ids
            ids = np.concatenate([ids, sampled, self._chat.bridge(user["content"], ended)]).astype(np.int32)
        return ids

    def remember(self, prompt: np.ndarray, text: str, ids: np.ndarray) -> None:
        """`text` was the answer to `prompt`, sampled as `ids`."""
        self._sent[(prompt.tobytes(), text)] = ids
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)


def plain_messages(value: Any) -> list[dict[str, str]]:
    """The request's messages with content as text. Raises ValueError for what is not text or has another role."""
    if not isinstance(value, list) or not value:
        raise ValueError("messages: expected a list of messages, got none")
    result = []
    for number, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"messages[{number}].role: expected system, user or assistant, got {role!r}")
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise ValueError(f"messages[{number}].content: expected text, got {type(content).__name__}")
        result.append({"role": role, "content": content})
    return result
