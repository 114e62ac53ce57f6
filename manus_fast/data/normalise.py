"""Replies of published datasets in the project's form: whatever marks an action there, `Protocol` writes it here."""

from __future__ import annotations

import json
import re
from typing import Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.schema import Conversation, MalformedRow

_THOUGHT = re.compile(r"^\s*(?:Think|Thought|THOUGHT)\s*:\s*")
_ACTION = re.compile(r"(?:^|\n)\s*(?:Act|Action|ACTION)\s*:[ \t]*")
_INPUT = re.compile(r"\n\s*Action Input\s*:\s*")
_FENCE = re.compile(r"```(\w*)[ \t]*\n(.*?)```", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read_reply(text: str) -> tuple[str, str]:
    """(thought, action) of a reply with `Act:`, `Action:` (with `Action Input:`), a JSON tool call or a code block.

    The last action counts, as in play. A code block becomes `language[code]`, a tool call `name {arguments}`.

    Raises:
        MalformedRow: no action, a broken tool call, or an action of several lines.
    """
    marks = list(_ACTION.finditer(text))
    if marks:
        thought, action = text[: marks[0].start()], text[marks[-1].end() :]
        given = _INPUT.search(action)
        if given is not None:
            return _line(thought), _one(f"{action[: given.start()].strip()} {_compact(action[given.end() :])}")
        fence = _FENCE.search(action)
        if fence is not None:
            return _line(thought), _code(fence)
        return _line(thought), _one(action)
    call = _TOOL_CALL.search(text)
    if call is not None:
        return _line(text[: call.start()]), _call(_loads(call[1]))[1]
    fence = _FENCE.search(text)
    if fence is not None and fence[1].lower() != "json":
        return _line(text[: fence.start()]), _code(fence)
    body = fence[2] if fence is not None else text[text.find("{") :] if "{" in text else ""
    if body.strip().startswith("{"):
        inner, action = _call(_loads(body))
        before = text[: fence.start()] if fence is not None else text[: text.find("{")]
        return _line(before) or inner, action
    raise MalformedRow("no action")


def normalise(item: Conversation, protocol: Protocol) -> Conversation:
    """The conversation with every trainable reply in the protocol's form; other replies stay as they are."""
    messages = []
    for message in item.messages:
        if message["trainable"]:
            thought, action = read_reply(message["content"])
            message = {**message, "content": protocol.render(thought, action)}
            # Whatever a thought quotes, the reply must read back as this very action.
            if protocol.parse(message["content"]).action != action:
                raise MalformedRow("ambiguous action")
        messages.append(message)
    return Conversation(item.id, item.source, item.domain, messages, item.task)


def _line(text: str) -> str:
    return " ".join(_THOUGHT.sub("", text).split())


def _one(text: str) -> str:
    action = text.strip()
    if not action:
        raise MalformedRow("no action")
    if len(action.splitlines()) > 1:
        raise MalformedRow("action of several lines")
    return action


def _code(fence: re.Match[str]) -> str:
    language, code = fence[1].lower() or "code", fence[2].strip()
    if not code:
        raise MalformedRow("no action")
    if language == "sql" and "--" not in code and "'" not in code:
        code = " ".join(code.split())  # outside comments and strings SQL reads a line break as a space
    return _one(f"{language}[{code}]")


def _loads(text: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text.strip())[0]
    except (ValueError, RecursionError) as error:
        raise MalformedRow("truncated JSON") from error


def _compact(text: str) -> str:
    return json.dumps(_loads(text), ensure_ascii=False)


def _call(value: Any) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise MalformedRow("no action")
    value = value.get("function", value) if isinstance(value.get("function", value), dict) else value
    name = value.get("name") or value.get("action")
    if not isinstance(name, str) or not name.strip():
        raise MalformedRow("no action")
    given = next((value[key] for key in ("arguments", "parameters", "action_input") if key in value), None)
    thought = value.get("thought", "")
    words = f"{name.strip()} {given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}"
    return _line(thought) if isinstance(thought, str) else "", _one(name if given is None else words)
