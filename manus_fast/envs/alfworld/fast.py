"""Makes the real engine faster without changing what it says: computes once what TextWorld computes at every step.

Where its time goes: parsing the same little templates and queries with TatSu, deep copies of contexts that are
only read, compiling the same expressions, and translating PDDL to SAS twice for every load and every reset.
`install` replaces those functions of `textworld` and `fast_downward` in this process by memoised ones with bounded
caches. `tests/test_alfworld_fast.py` compares whole games with the stock engine, character by character.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

TEMPLATES = 4096
"""Templates, queries and expressions kept; a game has about a hundred."""
GAMES = 16
"""Games whose translation and grammar are kept, a few megabytes each."""

_installed = False


def _copy_symbol(symbol: Any) -> Any:
    """A copy of a grammar symbol and the symbols inside it. Contexts are shared: the engine replaces a copy's
    context before it reads it."""
    new = object.__new__(type(symbol))
    new.__dict__.update(symbol.__dict__)
    for name in ("symbol", "expression"):
        inner = new.__dict__.get(name)
        if hasattr(inner, "context"):
            new.__dict__[name] = _copy_symbol(inner)
    return new


def _copy(value: Any, memo: Any = None) -> Any:
    """Stands in for `deepcopy` in the grammar module, which copies lists of symbols, symbols, and the two dicts of
    a context, whose keys and values it only reads."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return [_copy_symbol(symbol) for symbol in value]
    return _copy_symbol(value)


class _Deferred:
    """A translation for the planner's search, made when someone asks for a plan. Playing needs none."""

    def __init__(self, make: Any):
        self.make = make

    def encode(self, encoding: str) -> _Deferred:
        return self


def installed() -> bool:
    return _installed


def install() -> None:
    """Patches the engine of this process; further calls do nothing. Raises ImportError without the engine."""
    global _installed
    if _installed:
        return
    _installed = True
    _install_grammar()
    _install_translation()


def _install_grammar() -> None:
    textgen = importlib.import_module("textworld.envs.pddl.textgen")
    logic = importlib.import_module("textworld.logic")
    parse = textgen._parse_and_convert
    parsed = functools.lru_cache(TEMPLATES)(lambda text, rule: parse(text, rule_name=rule))

    def parse_and_convert(text: str, rule_name: str, trace: bool = False) -> Any:
        return _copy(parsed(text, rule_name))

    textgen._parse_and_convert = parse_and_convert
    textgen.deepcopy = _copy

    rule = logic.Rule
    stock_query = rule.parse_conjunctive_query
    rule.parse_conjunctive_query = staticmethod(functools.lru_cache(TEMPLATES)(stock_query))

    compiled = functools.lru_cache(TEMPLATES)(lambda text: compile(text, "<template>", "eval"))

    def derive(self: Any, context: Any = None) -> list[Any]:
        context = context or self.context
        value = eval(compiled(self.expression), vars(textgen), dict(context["variables"]))
        return [textgen.TerminalSymbol(value)]

    textgen.EvalSymbol.derive = derive


def _install_translation() -> None:
    fast_downward = importlib.import_module("fast_downward")
    stock = fast_downward.pddl2sas
    translate = functools.lru_cache(GAMES)(lambda domain, problem, optimize: stock(domain, problem, optimize=optimize))

    def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        if optimize:
            return None, _Deferred(lambda: translate(domain, problem, True)[1].encode("utf-8"))
        return translate(domain, problem, False)

    stock_lib = fast_downward.load_lib

    def load_lib() -> Any:
        lib = stock_lib()
        load, replan = lib.load_sas_replan, lib.replan
        waiting: list[_Deferred] = []

        def load_later(sas: Any) -> None:
            waiting[:] = [sas]

        def replan_now(verbose: bool) -> bool:
            while waiting:
                load(waiting.pop().make())
            return replan(verbose)

        lib.load_sas_replan, lib.replan = load_later, replan_now
        return lib

    fast_downward.pddl2sas = pddl2sas
    fast_downward.load_lib = load_lib
