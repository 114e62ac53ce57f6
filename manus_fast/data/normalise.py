"""Replies of published datasets in the project's form: whatever marks an action there, `Protocol` writes it here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.schema import Conversation, MalformedRow

_THOUGHT = re.compile(r"(?:Think|Thought|THOUGHT)\s*:\s*")
_MARK = re.compile(r"(?:Act|Action|ACTION)\s*:[ \t]*")
_INPUT = re.compile(r"\n\s*Action Input\s*:\s*")
_FENCE = re.compile(r"```(\w*)[ \t]*\n(.*?)```", re.DOTALL)
_decode = json.JSONDecoder().raw_decode
_encode = json.JSONEncoder(ensure_ascii=False).encode
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read_reply(text: str) -> tuple[str, str]:
    """(thought, action) of a reply with `Act:`, `Action:` (with `Action Input:`), a JSON tool call or a code block.

    The last action counts, as in play. A code block becomes `language[code]`, a tool call `name {arguments}`.

    Raises:
        MalformedRow: no action, a broken tool call, or an action of several lines.
    """
    return _read(text)[:2]


def form_of(text: str) -> str:
    """How a reply marks its action, in a few words; "none" where `read_reply` refuses it."""
    try:
        return _read(text)[2]
    except MalformedRow:
        return "none"


def _read(text: str) -> tuple[str, str, str]:
    """(thought, action, form)."""
    start, end, mark = _marks(text)
    if end >= 0:
        thought, action = text[:start], text[end:]
        given = _INPUT.search(action) if "Input" in action else None
        if given is not None:
            action = f"{action[: given.start()].strip()} {_compact(action[given.end() :])}"
            return _line(thought), _one(action), "Action Input:"
        fence = _FENCE.search(action) if "```" in action else None
        if fence is not None:
            return _line(thought), _code(fence), "code block"
        return _line(thought), _one(action), mark
    call = _TOOL_CALL.search(text) if "<tool_call>" in text else None
    if call is not None:
        return _line(text[: call.start()]), _call(_loads(call[1]))[1], "JSON tool call"
    fence = _FENCE.search(text) if "```" in text else None
    if fence is not None and fence[1].lower() != "json":
        return _line(text[: fence.start()]), _code(fence), "code block"
    body = fence[2] if fence is not None else text[text.find("{") :] if "{" in text else ""
    if body.strip().startswith("{"):
        inner, action = _call(_loads(body))
        before = text[: fence.start()] if fence is not None else text[: text.find("{")]
        return _line(before) or inner, action, "JSON tool call"
    raise MalformedRow("no action")


def normalise(item: Conversation, protocol: Protocol) -> Conversation:
    """The conversation with every trainable reply in the protocol's form; other replies stay as they are."""
    return Conversation(item.id, item.source, item.domain, rewritten(item.messages, protocol), item.task)


def rewritten(messages: Iterable[dict[str, Any]], protocol: Protocol) -> list[dict[str, Any]]:
    """Messages with the replies that are trained on (assistant's, and not "trainable": false) in the protocol's form.

    Raises:
        MalformedRow: a reply without an action, or with one that would not read back.
    """
    made = []
    for message in messages:
        if message["role"] == "assistant" and message.get("trainable", True):
            thought, action, _ = _read(message["content"])
            # Whatever a thought quotes, the reply must read back as this very action.
            target = protocol.target(thought, action)
            if target is None:
                raise MalformedRow("ambiguous action")
            message = {**message, "content": target}
        made.append(message)
    return made


def _marks(text: str) -> tuple[int, int, str]:
    """(start of the first mark of an action, end of the last one, the last one); -1, -1, "" where no line begins with
    one."""
    # Plain searches find the few places where a mark may be: a pattern that begins with a line's start and white space
    # would try every place, which takes longer than all the rest.
    first = end = -1
    last = ""
    for word in ("Act", "ACT") if "ACT" in text else ("Act",):
        at = text.find(word)
        while at >= 0:
            line = text.rfind("\n", 0, at) + 1
            if at == line or text[line:at].isspace():
                mark = _MARK.match(text, at)
                if mark is not None:
                    first = at if first < 0 else min(first, at)
                    if mark.end() > end:
                        end, last = mark.end(), "Act:" if text.startswith("Act:", at) else "Action:"
            at = text.find(word, at + 3)
    return first, end, last


def _line(text: str) -> str:
    """A thought as one line, without its mark."""
    line = text.strip()
    if line[:1] == "T":
        mark = _THOUGHT.match(line)
        if mark is not None:
            line = line[mark.end() :]
    # Printable means without any white space but spaces: most thoughts are one line already, and found so sooner.
    return " ".join(line.split()) if "  " in line or not line.isprintable() else line


def _one(text: str) -> str:
    line = text.strip()
    if line.isprintable() and line:
        return line
    lines = line.splitlines()
    if not lines:
        raise MalformedRow("no action")
    if len(lines) > 1:
        raise MalformedRow("action of several lines")
    return lines[0]


def _code(fence: re.Match[str]) -> str:
    language, code = fence[1].lower() or "code", fence[2].strip()
    if not code:
        raise MalformedRow("no action")
    if language == "sql" and "--" not in code and "'" not in code:
        code = " ".join(code.split())  # outside comments and strings SQL reads a line break as a space
    return _one(f"{language}[{code}]")


def _loads(text: str) -> Any:
    try:
        return _decode(text.strip())[0]
    except (ValueError, RecursionError) as error:
        raise MalformedRow("truncated JSON") from error


def _compact(text: str) -> str:
    return _encode(_loads(text))


def _call(value: Any) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise MalformedRow("no action")
    value = value.get("function", value) if isinstance(value.get("function", value), dict) else value
    name = value.get("name") or value.get("action")
    if not isinstance(name, str) or not name.strip():
        raise MalformedRow("no action")
    given = next((value[key] for key in ("arguments", "parameters", "action_input") if key in value), None)
    thought = value.get("thought", "")
    words = f"{name.strip()} {given if isinstance(given, str) else _encode(given)}"
    return _line(thought) if isinstance(thought, str) else "", _one(name if given is None else words)
