"""The two command grammars of ALFWorld: `put O in/on R` (0.3 and before) and `move O to R` (0.4).

With the second came "You arrive at desk 1." for "You arrive at loc 3.", and the command help.
"""

from __future__ import annotations

import re

_PUT = re.compile(r'action\s+PutObject\s*\{\s*template\s*::\s*"([^"]*)"')
_TEMPLATES = {"put {o} in/on {r}": "0.3", "move {o} to {r}": "0.4"}
# What the grammar says in 0.3 and in 0.4.
_WORDS = (
    ("put {o} in/on {r}", "move {o} to {r}"),
    ("You put the {o.name} in/on the {r.name}.", "You move the {o.name} to the {r.name}."),
    ("You arrive at {lend.name}.", "You arrive at {r.name}."),
)
_HELP_DOMAIN = re.compile(r"\(:action help\b.*?\n\)\n", re.DOTALL)
_HELP_GRAMMAR = re.compile(r"action help \{.*?\n\}\n?", re.DOTALL)


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


def with_words(text: str, version: str) -> str:
    """The grammar `text` with the words of `version` ("0.3" or "0.4")."""
    if version not in ("0.3", "0.4"):
        raise ValueError(f"version: expected '0.3' or '0.4', got {version!r}")
    for old, new in _WORDS:
        text = text.replace(old, new) if version == "0.4" else text.replace(new, old)
    return text


def downgrade(domain: str, grammar: str) -> tuple[str, str]:
    """Domain and grammar of 0.4 as 0.3 had them: the older words, and no help."""
    return _HELP_DOMAIN.sub("", domain), with_words(_HELP_GRAMMAR.sub("", grammar), "0.3")


def translate(command: str, version: str) -> str:
    """A command of one grammar in the words of `version`; only putting an object down differs."""
    if version == "0.3":
        return re.sub(r"^move (.+) to (.+)$", r"put \1 in/on \2", command)
    return re.sub(r"^put (.+) in/on (.+)$", r"move \1 to \2", command)
