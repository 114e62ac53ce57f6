"""Reading PDDL: nested lists of lower-case words, comments dropped (PDDL does not tell cases apart)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")
Expression = str | list[Any]


def parse(text: str) -> list[Any]:
    """The one parenthesised expression in `text`; what follows it is ignored, as the planner does.

    Raises ValueError when there is none or it does not end."""
    stack: list[list[Any]] = []
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            stack.append([])
        elif not stack:
            raise ValueError(f"PDDL: expected an opening parenthesis, got {token[:40]!r}")
        elif token == ")":
            done = stack.pop()
            if not stack:
                return done
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    raise ValueError("PDDL: expected a complete expression, got one that is cut off")


def section(expression: list[Any], keyword: str) -> list[Any]:
    """What follows `keyword` in its list inside `expression`. Raises ValueError when it is absent."""
    for part in expression:
        if isinstance(part, list) and part and part[0] == keyword:
            return part[1:]
    raise ValueError(f"PDDL: expected a section {keyword}, got none")


def typed(words: Any) -> Iterator[tuple[str, str]]:
    """(name, type) of each entry of a typed list `a b - t c - u`; "" where no type is given. Raises ValueError when it
    is no list of words."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"PDDL: expected a list of names and types, got {str(words)[:60]}")
    waiting: list[str] = []
    it = iter(words)
    for word in it:
        if word == "-":
            kind = next(it, "")
            yield from ((name, kind) for name in waiting)
            waiting = []
        else:
            waiting.append(word)
    yield from ((name, "") for name in waiting)
