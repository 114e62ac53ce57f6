"""The two command grammars of ALFWorld: `put O in/on R` (0.3 and before) and `move O to R` (0.4)."""

from __future__ import annotations

import re

_PUT = re.compile(r'action\s+PutObject\s*\{\s*template\s*::\s*"([^"]*)"')
_TEMPLATES = {"put {o} in/on {r}": "0.3", "move {o} to {r}": "0.4"}
_FEEDBACK = {
    "0.3": "You put the {o.name} in/on the {r.name}.",
    "0.4": "You move the {o.name} to the {r.name}.",
}


def grammar_of(text: str) -> str:
    """Returns "0.3" or "0.4", by how a game's grammar says that an object is put down.

    Raises ValueError for a grammar that does neither.
    """
    match = _PUT.search(text)
    template = match.group(1) if match else None
    if template not in _TEMPLATES:
        known = " or ".join(repr(t) for t in _TEMPLATES)
        raise ValueError(f"grammar: expected the action PutObject as {known}, got {template!r}")
    return _TEMPLATES[template]


def with_grammar(text: str, version: str) -> str:
    """The grammar `text` with its put-down action in the form of `version` ("0.3" or "0.4")."""
    if version not in _FEEDBACK:
        raise ValueError(f"version: expected '0.3' or '0.4', got {version!r}")
    current = grammar_of(text)
    template = next(t for t, v in _TEMPLATES.items() if v == version)
    for old, number in _TEMPLATES.items():
        if number == current:
            text = text.replace(old, template)
    return text.replace(_FEEDBACK[current], _FEEDBACK[version])


def translate(command: str, version: str) -> str:
    """A command of one grammar in the words of `version`; only putting an object down differs."""
    if version == "0.3":
        return re.sub(r"^move (.+) to (.+)$", r"put \1 in/on \2", command)
    return re.sub(r"^put (.+) in/on (.+)$", r"move \1 to \2", command)
