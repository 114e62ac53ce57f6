"""Which rules and which words a game file has: the native engine plays those of ALFWorld 0.3 and 0.4, no others.

A game file carries its domain and its grammar. Both are brought into a normal form (comments, order, spacing and
the known variants taken out) and compared by hash with the published ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manus_fast.envs.alfworld import sexpr
from manus_fast.envs.alfworld.grammar import grammar_of, with_words

_BLOCK = r'grammar\s*::\s*"""(.*?)"""'
_STRING = r'"((?:[^"\\]|\\.)*)"'
_ACTION = re.compile(
    rf"action\s+(\w+)\s*\{{\s*template\s*::\s*{_STRING}\s*;\s*feedback\s*::\s*{_STRING}\s*;", re.DOTALL
)

# SHA-256 of the normal forms, first 16 digits. The domain has been the same since 2020, but for the action help.
_DOMAIN = "36c368869c9a9027"
_GRAMMAR = "64a08f6626a5c8c2"
_HELP = "6aad5f30fe1ea9dd"


@dataclass(frozen=True)
class Rules:
    """The variants of one game: `put` for "put O in/on R" and not "move O to R", `by_place` for "You arrive at
    loc 3." and not "You arrive at desk 1.", `help` for the command of that name."""

    put: bool
    by_place: bool
    help: bool


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _domain(text: str) -> tuple[str, bool]:
    """Hash of the domain without help, and whether it has help."""
    parts = sexpr.parse(text)
    actions = {part[1]: part[2:] for part in parts if isinstance(part, list) and part[0] == ":action"}
    rest = [part for part in parts if not (isinstance(part, list) and part[0] in (":action", ":requirements"))]
    helps = actions.pop("help", None) is not None
    return _hash([rest, actions]), helps


def _grammar(text: str) -> tuple[dict[str, list[str]], dict[str, list[list[str]]]]:
    """Actions (template, feedback) and rules ((condition, right-hand side), …) of a grammar."""
    actions = {name.lower(): [template, feedback] for name, template, feedback in _ACTION.findall(text)}
    rules: dict[str, list[list[str]]] = {}
    for block in re.findall(_BLOCK, text, re.DOTALL):
        lines = [line for line in block.split("\n") if not line.lstrip().startswith("#")]
        for name, alternatives in json.loads("\n".join(lines)).items():
            rules.setdefault(name, []).extend([a.get("condition", ""), a["rhs"]] for a in alternatives)
    return actions, rules


def normal_forms(game: Mapping[str, str]) -> tuple[str, str, str, Rules]:
    """Hashes of domain, grammar and help text, and the variants. Raises ValueError where a form cannot be read."""
    domain, helps = _domain(game["pddl_domain"])
    put = grammar_of(game["grammar"]) == "0.3"
    text = game["grammar"]
    by_place = "You arrive at {lend.name}." in text
    try:
        actions, rules = _grammar(with_words(text, "0.4"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"grammar: expected blocks of JSON rules, got others ({error})") from error
    rules.pop("task", None)
    said = actions.pop("help", ["", ""])[1].replace("\\n", "\n")
    said_by_rule = rules.pop("help.feedback", [["", ""]])[0][1]
    if said == "#help.feedback#":
        said = said_by_rule
    return domain, _hash([actions, rules]), _hash(said), Rules(put, by_place, helps)


def rules_of(game: Mapping[str, str]) -> Rules:
    """The variants of a game. Raises ValueError, saying what differs, when its rules or words are not ALFWorld's."""
    domain, grammar, said, rules = normal_forms(game)
    if domain != _DOMAIN:
        raise ValueError("pddl_domain: expected the rules of ALFWorld 0.3 or 0.4, got others")
    if grammar != _GRAMMAR or (rules.help and said != _HELP):
        raise ValueError("grammar: expected the words of ALFWorld 0.3 or 0.4, got others")
    return rules


def task_of(grammar: str) -> str:
    """The sentence of the task, as the introduction has it. Raises ValueError where it is not plain text."""
    _, rules = _grammar(grammar)
    alternatives = rules.get("task", [])
    text = alternatives[0][1] if alternatives else ""
    if not text.startswith("Your task is to: ") or alternatives[0][0] or re.search(r"[\[\]{}#|\\\n]", text):
        raise ValueError(f"grammar: expected a task 'Your task is to: …' in plain text, got {text[:60]!r}")
    return text.removeprefix("Your task is to: ")
