"""From messages to prompt ids and back: chat formats, and how much of an episode a prompt shows.

A prompt is a concatenation of segments: a head (system and first observation), the ids that were sampled, and a
bridge after each reply (end of the assistant's turn, next observation, start of the next reply). Sampled ids are
reused as they are, so a `full` context always extends what was trained before.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_SENTINEL = "MANUSFASTREPLY"
# A message that templates take as it is: letters, digits and common signs, no white space at its ends. Those with marks
# of tools or thoughts (<, {, [) may be treated apart.
_IS_PLAIN = re.compile(r"[\w.,:;!?'\"()/-](?:[\w.,:;!?'\"()/ \n-]*[\w.,:;!?'\"()/-])?")
_PLAIN = "You arrive at cabinet 1."
# Bridges that a format remembers, beside a sixteenth as many starts of conversations: worlds say the same again and
# again, most of all to the members of a group.
_REMEMBERED = 1 << 14
CONTEXTS = ("full", "window")


class ChatFormat:
    """Renders messages with a tokenizer's chat template, or with a plain one where it has none.

    Args:
        tokenizer: a Hugging Face tokenizer.
        extra_end_ids: further end-of-turn ids that the model names (its generation config's `eos_token_id`).

    Raises:
        ValueError: the tokenizer names no end-of-sequence token, or its template hides the assistant's reply.
    """

    def __init__(self, tokenizer: Any, extra_end_ids: Sequence[int] = ()):
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer: expected an end-of-sequence token (eos_token), got none")
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._backend = _backend(tokenizer)
        self._after_reply = functools.lru_cache(_REMEMBERED)(self._render_after_reply)
        self._head = functools.lru_cache(_REMEMBERED // 16)(self._render_head)
        self._beginning = functools.lru_cache(16)(self._encode)
        self._around: tuple[str, str] | None = None
        probe = self._after_reply("")
        if len(probe) == 0:
            raise ValueError("tokenizer.chat_template: expected text after an assistant's reply, got none")
        first = int(probe[0])
        special = set(tokenizer.all_special_ids)
        # The token that ends a reply: the template's own where it has one, else EOS.
        self.end_id: int = first if first in special else int(tokenizer.eos_token_id)
        self.end_ids: frozenset[int] = frozenset({self.end_id, int(tokenizer.eos_token_id), *map(int, extra_end_ids)})
        self._template_ends = first == self.end_id
        self._mark = self._cuts_at()
        self._around = self._frame()

    def forget(self) -> None:
        """Drops what is remembered of texts that were rendered before."""
        self._after_reply.cache_clear()
        self._head.cache_clear()
        self._beginning.cache_clear()

    def head(self, system: str, user: str) -> np.ndarray:
        """int32 ids of a conversation's start, up to where the first reply begins."""
        return self._head(system, user)

    def _render_head(self, system: str, user: str) -> np.ndarray:
        messages = [{"role": "user", "content": user}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        text = self._render(messages, generation=True)
        at = -1 if self._mark is None else text.rfind(self._mark, 0, max(0, text.rfind(user)))
        ids = self._encode(text) if at < 0 else np.concatenate([self._beginning(text[:at]), self._encode(text[at:])])
        ids.flags.writeable = False  # it is remembered
        return ids

    def _cuts_at(self) -> str | None:
        """The end token as text, where what stands before it is encoded the same whatever follows: the system message
        is then encoded once, not with every first observation. None where it is not."""
        token = self.tokenizer.added_tokens_decoder.get(self.end_id)
        if self._backend is None or token is None or not token.special or token.lstrip or token.single_word:
            return None
        one, other = f"You're  in\n{_SENTINEL} .", f"\n{_SENTINEL}\n it's 1 . "
        parts = [self._encode(one), self._encode(token.content + other)]
        return (
            token.content if np.array_equal(np.concatenate(parts), self._encode(one + token.content + other)) else None
        )

    def _frame(self) -> tuple[str, str] | None:
        """What a template puts around a user message after a reply, where it does no more than that to a plain one; a
        template is asked about every other one."""
        if not self.has_template:
            return None
        before, found, after = self._tail(_PLAIN).partition(_PLAIN)
        same = found and all(self._tail(text) == before + text + after for text in ("a", "You're at 1.\n\nGo on: a b"))
        return (before, after) if same else None

    def bridge(self, user: str, ended: bool) -> np.ndarray:
        """int32 ids between one reply and the next.

        Args:
            user: the next user message.
            ended: the reply's last sampled id was an end id; otherwise (cut by a limit) the bridge begins with one.
        """
        ids = self._after_reply(user)
        if self._template_ends:
            return ids[1:] if ended else ids
        return ids if ended else np.concatenate([np.asarray([self.end_id], np.int32), ids])

    def reply(self, text: str) -> np.ndarray:
        """int32 ids of a reply written by somebody else (an expert), its end token included."""
        return np.concatenate([self._encode(text), np.asarray([self.end_id], np.int32)])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of sampled ids, for the parser and for people; the end token is left out."""
        ends = self.end_ids
        kept = [i for i in np.asarray(ids).tolist() if i not in ends]
        return (self._backend or self.tokenizer).decode(kept, skip_special_tokens=False)

    def _encode(self, text: str) -> np.ndarray:
        if self._backend is not None:
            self._backend.no_truncation()  # whatever the latest user of the tokenizer asked for
            self._backend.no_padding()
            return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _render_after_reply(self, user: str) -> np.ndarray:
        plain = self._around is not None and _IS_PLAIN.fullmatch(user)
        ids = self._encode(user.join(self._around) if plain else self._tail(user))
        ids.flags.writeable = False  # it is remembered
        return ids

    def _tail(self, user: str) -> str:
        """What a conversation's text goes on with after a reply, when `user` answers it."""
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": _SENTINEL},
            {"role": "user", "content": user},
        ]
        _head, found, tail = self._render(messages, generation=True).partition(_SENTINEL)
        if not found:
            raise ValueError("tokenizer.chat_template: expected the assistant's content to appear in the rendered text")
        return tail

    def _render(self, messages: list[dict[str, str]], generation: bool) -> str:
        if self.has_template:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        eos = self.tokenizer.eos_token
        names = {"system": "System", "user": "User", "assistant": "Assistant"}
        text = "".join(
            f"{names[m['role']]}:\n{m['content']}{eos if m['role'] == 'assistant' else ''}\n" for m in messages
        )
        # A line break, not a space: words of the reply would take a space into their first token.
        return text + ("Assistant:\n" if generation else "")


def _backend(tokenizer: Any) -> Any | None:
    """What does a tokenizer's work, where asking it directly comes to the same: the wrapper's own bookkeeping takes
    longer than a short text does. None where it does not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return None
    text = f"{tokenizer.eos_token} Think: it's  here , or\n\nthere ?\nAct: go to\tdesk 1 .\u00e9{tokenizer.eos_token}\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    same = backend.encode(text, add_special_tokens=False).ids == ids
    return backend if same and backend.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids) else None


@dataclass
class Context:
    """How much of an episode each prompt shows: `full` is everything, `window` the head and the last k turns."""

    format: ChatFormat
    kind: str = "full"
    window: int = 8

    def __post_init__(self) -> None:
        if self.kind not in CONTEXTS:
            raise ValueError(f"agent.context: expected one of {', '.join(CONTEXTS)}, got {self.kind!r}")
        if self.kind == "window" and self.window < 1:
            raise ValueError(f"agent.window: expected an integer >= 1, got {self.window}")

    def start(self, system: str, user: str) -> Conversation:
        return Conversation(self, self.format.head(system, user))


class Conversation:
    """The token state of one episode: `prompt()` gives the ids for the next reply."""

    messages: list[dict[str, str]] | None = None
    """The prompt as messages, where an engine takes those in place of ids (agent/messages.py)."""
    fresh: list[dict[str, str]] | None = None
    """Those of `messages` that no earlier prompt of the episode held."""

    def __init__(self, context: Context, head: np.ndarray):
        self._context = context
        self._segments: list[np.ndarray] = [head]
        self._full = head

    def prompt(self) -> np.ndarray:
        """int32 [P]: ids to send to the engine."""
        if self._context.kind == "full":
            return self._full
        recent = self._segments[1:]
        return np.concatenate([self._segments[0], *recent[max(0, len(recent) - self._context.window) :]])

    def add(self, ids: np.ndarray, user: str) -> None:
        """Records a reply (as sampled) and the user message that answers it."""
        ended = len(ids) > 0 and int(ids[-1]) in self._context.format.end_ids
        segment = np.concatenate([ids, self._context.format.bridge(user, ended)]).astype(np.int32)
        self._segments.append(segment)
        if self._context.kind == "full":
            self._full = np.concatenate([self._full, segment])

    def clone(self) -> Conversation:
        other = Conversation.__new__(Conversation)
        other._context, other._segments, other._full = self._context, list(self._segments), self._full
        return other
