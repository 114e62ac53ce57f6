"""A game's PDDL problem as the tables that the native engine plays: receptacles, objects, places, the goal.

`read_problem` refuses (ValueError, saying why) whatever the native engine could not play exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manus_fast.envs.alfworld import sexpr
from manus_fast.envs.alfworld.pddl import demangle
from manus_fast.envs.alfworld.rules import rules_of, task_of

_STATES = ("isclean", "ishot", "iscool", "issliced", "istoggled")
_ABILITIES = ("pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable")
# Facts that change nothing a player sees.
_IDLE = frozenset({"wasinreceptacle", "checked", "examined", "moveable", "ison", "full", "isreceptacleobjectfull", "="})
# Kinds of the arguments of every other fact.
_KINDS = {
    "atlocation": ("agent", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "objectatlocation": ("object", "location"),
    "openable": ("receptacle",),
    "opened": ("receptacle",),
    "inreceptacle": ("object", "receptacle"),
    "isreceptacleobject": ("object",),
    "inreceptacleobject": ("object", "object"),
    "receptacletype": ("receptacle", "rtype"),
    "objecttype": ("object", "otype"),
    "cancontain": ("rtype", "otype"),
} | {fact: ("object",) for fact in (*_STATES, *_ABILITIES)}
_KNIVES = ("knifetype", "butterknifetype")
_ROLES = {"sinkbasintype": "sink", "microwavetype": "microwave", "fridgetype": "fridge"}


@dataclass
class Problem:
    """One game in tables. Indices point into `receptacles`, `objects`, `receptacle_types`, `object_types`; places are
    numbered from 0, and the place of a thing that no receptacle shares is -1."""

    task: str
    put: bool
    by_place: bool
    help: bool
    receptacle_types: list[str] = field(default_factory=list)
    object_types: list[str] = field(default_factory=list)
    can_contain: set[tuple[int, int]] = field(default_factory=set)
    receptacles: list[dict[str, Any]] = field(default_factory=list)
    objects: list[dict[str, Any]] = field(default_factory=list)
    start: int = 0
    goal: dict[str, Any] = field(default_factory=dict)


def _arity(predicate: str) -> int:
    """Arguments of a predicate that goals may have, else -1."""
    return 2 if predicate == "holds" else len(_KINDS[predicate]) if predicate in _KINDS else -1


def _goal(expression: list[Any]) -> dict[str, Any]:
    """Kind and classes of one of the six goals, whatever its variables are called."""
    kinds: dict[str, str] = {}
    atoms: set[tuple[str, ...]] = set()
    different: set[frozenset[str]] = set()

    def walk(part: Any, names: Mapping[str, str]) -> None:
        if not isinstance(part, list):
            raise ValueError(f"goal: expected an expression, got {part[:60]}")
        if part and part[0] == "and":
            for inner in part[1:]:
                walk(inner, names)
        elif part and part[0] == "exists" and len(part) == 3:
            inner_names = dict(names)
            for name, kind in sexpr.typed(part[1]):
                inner_names[name] = f"?{len(kinds)}"
                kinds[inner_names[name]] = kind
            walk(part[2], inner_names)
        elif len(part) == 2 and part[0] == "not" and part[1][:1] == ["="] and all(isinstance(w, str) for w in part[1]):
            different.add(frozenset(names.get(name, name) for name in part[1][1:]))
        elif part and all(isinstance(word, str) for word in part) and len(part) == 1 + _arity(part[0]):
            atoms.add((part[0], *(names.get(word, word) for word in part[1:])))
        else:
            raise ValueError(f"goal: expected one of ALFWorld's six, got a part {str(part)[:60]}")

    walk(expression, {})
    found = _look(kinds, atoms, different) or _place(kinds, atoms, different)
    if found is None:
        raise ValueError("goal: expected one of ALFWorld's six, got another")
    return found


def _place(kinds: Mapping[str, str], atoms: set[tuple[str, ...]], different: set[frozenset[str]]) -> Any:
    objects = sorted(name for name, kind in kinds.items() if kind == "object")
    receptacles = [name for name, kind in kinds.items() if kind == "receptacle"]
    if len(receptacles) != 1 or len(objects) + 1 != len(kinds) or not objects:
        return None
    target = {atom[2] for atom in atoms if atom[0] == "receptacletype"}
    wanted = {atom[2] for atom in atoms if atom[0] == "objecttype"}
    if len(target) != 1 or len(wanted) != 1:
        return None
    goal = {"object": wanted.pop(), "receptacle": target.pop()}
    r = receptacles[0]
    base = {("receptacletype", r, goal["receptacle"])}
    for o in objects:
        base |= {("objecttype", o, goal["object"]), ("inreceptacle", o, r)}
    if len(objects) == 2:
        two = atoms == base and different == {frozenset(objects)}
        return goal | {"kind": "pick_two_obj_and_place"} if two else None
    if len(objects) != 1 or different:
        return None
    o = objects[0]
    for kind, ability, state in (
        ("pick_clean_then_place_in_recep", "cleanable", "isclean"),
        ("pick_heat_then_place_in_recep", "heatable", "ishot"),
        ("pick_cool_then_place_in_recep", "coolable", "iscool"),
    ):
        if atoms == base | {(ability, o), (state, o)}:
            return goal | {"kind": kind}
    return goal | {"kind": "pick_and_place_simple"} if atoms == base else None


def _look(kinds: Mapping[str, str], atoms: set[tuple[str, ...]], different: set[frozenset[str]]) -> Any:
    held = [atom for atom in atoms if atom[0] == "holds"]
    lamps = [atom[1] for atom in atoms if atom[0] == "istoggled"]
    at = [atom for atom in atoms if atom[0] == "atlocation"]
    inside = [atom for atom in atoms if atom[0] == "inreceptacle"]
    if not len(held) == len(lamps) == len(at) == len(inside) == 1 or different:
        return None
    types = {atom[1]: atom[2] for atom in atoms if atom[0] == "objecttype"}
    (_, holder, o), lamp, (_, agent, place), r = held[0], lamps[0], at[0], inside[0][2]
    expected = {("objecttype", lamp, types.get(lamp, "")), ("toggleable", lamp), ("istoggled", lamp)}
    expected |= {("receptacleatlocation", r, place), ("atlocation", agent, place), ("inreceptacle", lamp, r)}
    expected |= {("objecttype", o, types.get(o, "")), ("holds", holder, o)}
    shapes = (kinds.get(lamp), kinds.get(o), kinds.get(r), kinds.get(place), kinds.get(agent), kinds.get(holder))
    if atoms != expected or shapes != ("object", "object", "receptacle", "location", "agent", "agent") or lamp == o:
        return None
    return {"kind": "look_at_obj_in_light", "object": types[o], "toggle": types[lamp]}


def read_problem(game: Mapping[str, str]) -> Problem:
    """Reads a game (see `read_game`). Raises ValueError when it is malformed or not one for the native engine."""
    rules = rules_of(game)
    task = task_of(game["grammar"])
    if not task.endswith("."):
        raise ValueError(f"grammar: expected a task that ends with a full stop, got {task!r}")
    expression = sexpr.parse(game["pddl_problem"])
    types = dict(sexpr.typed(sexpr.section(expression, ":objects")))
    facts = _facts(sexpr.section(expression, ":init"), types)
    goal = sexpr.section(expression, ":goal")
    if len(goal) != 1 or not isinstance(goal[0], list):
        raise ValueError("goal: expected one expression")
    problem = Problem(task[:-1], rules.put, rules.by_place, rules.help)
    _tables(problem, types, facts, _goal(goal[0]))
    return problem


def _facts(init: list[Any], types: Mapping[str, str]) -> dict[str, list[tuple[str, ...]]]:
    facts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for fact in init:
        if not isinstance(fact, list) or not fact or not isinstance(fact[0], str):
            raise ValueError(f"init: expected facts, got {str(fact)[:60]}")
        if fact[0] not in _KINDS and fact[0] not in _IDLE:
            raise ValueError(f"init: expected facts that ALFWorld's games have, got {fact[0]!r}")
        if fact[0] == "=":
            continue
        if not all(isinstance(word, str) and word in types for word in fact[1:]):
            raise ValueError(f"init: expected declared names, got {str(fact)[:80]}")
        kinds = tuple(types[word] for word in fact[1:])
        if kinds != _KINDS.get(fact[0], kinds):
            raise ValueError(f"init: expected {fact[0]} of {', '.join(_KINDS[fact[0]])}, got {str(fact)[:80]}")
        facts[fact[0]].append(tuple(fact[1:]))
    return facts


def _one(facts: Mapping[str, list[tuple[str, ...]]], predicate: str) -> dict[str, str]:
    """A binary predicate as a mapping. Raises ValueError when one thing has two different values."""
    out: dict[str, str] = {}
    for thing, value in facts.get(predicate, ()):
        if out.setdefault(thing, value) != value:
            raise ValueError(f"init: expected one {predicate} of {thing}, got two")
    return out


def _class(name: str) -> str:
    """`mug` for `mugtype`, as the experts call it."""
    return name.removesuffix("type")


def _tables(
    problem: Problem, types: Mapping[str, str], facts: Mapping[str, list[tuple[str, ...]]], goal: dict[str, Any]
) -> None:
    agents = [name for name, kind in types.items() if kind == "agent"]
    starts = facts.get("atlocation", [])
    if len(agents) != 1 or len(starts) != 1:
        raise ValueError(f"init: expected one agent at one place, got {len(agents)} and {len(starts)}")
    # Everything that a fact names gets its number, the idle facts included, as in the engine.
    named = {word for values in facts.values() for value in values for word in value}
    names = {id: name.strip() for id, name in demangle(named).items()}
    place_of = _one(facts, "receptacleatlocation")
    spot_of = _one(facts, "objectatlocation")
    places = {place: i for i, place in enumerate(sorted({*place_of.values(), starts[0][1]}))}
    problem.start = places[starts[0][1]]
    receptacle_type, object_type = _one(facts, "receptacletype"), _one(facts, "objecttype")

    def numbers(kind: str) -> list[str]:
        return sorted(name for name in named if types[name] == kind)

    # A thing without a type gets one of its own that nothing contains.
    rtypes = [*sorted({*receptacle_type.values(), goal.get("receptacle", "")} - {""}), ""]
    otypes = [*sorted({*object_type.values(), goal["object"], goal.get("toggle", "")} - {""}), ""]
    rtype = {name: i for i, name in enumerate(rtypes)}
    otype = {name: i for i, name in enumerate(otypes)}
    problem.receptacle_types, problem.object_types = list(map(_class, rtypes)), list(map(_class, otypes))
    problem.can_contain = {(rtype[r], otype[o]) for r, o in facts.get("cancontain", ()) if r in rtype and o in otype}
    flags: dict[str, set[str]] = defaultdict(set)
    for fact in ("openable", "opened", "isreceptacleobject", *_ABILITIES, *_STATES):
        for (thing,) in facts.get(fact, ()):
            flags[thing].add(fact)

    receptacles, objects = numbers("receptacle"), numbers("object")
    index = {id: i for i, id in enumerate(receptacles)}
    for id in receptacles:
        kind = receptacle_type.get(id, "")
        place = place_of.get(id)
        problem.receptacles.append(
            {
                "name": names[id],
                "type": rtype[kind],
                "location": -1 if place is None else places[place],
                "arrival": names[place] if problem.by_place and place is not None else names[id],
                "openable": "openable" in flags[id],
                "opened": "opened" in flags[id],
                "role": _ROLES.get(kind, ""),
            }
        )
    inside: dict[str, list[int]] = defaultdict(list)
    for thing, receptacle in facts.get("inreceptacle", ()):
        inside[thing].append(index[receptacle])
    order = {id: i for i, id in enumerate(objects)}
    within: dict[str, list[int]] = defaultdict(list)
    for thing, holder in facts.get("inreceptacleobject", ()):
        within[holder].append(order[thing])
    for id in objects:
        kind = object_type.get(id, "")
        problem.objects.append(
            {
                "name": names[id],
                "type": otype[kind],
                "abilities": sorted(flags[id] & set(_ABILITIES)),
                "holds": "isreceptacleobject" in flags[id],
                "knife": kind in _KNIVES,
                "states": sorted(flags[id] & set(_STATES)),
                "receptacles": sorted(set(inside[id])),
                "location": places.get(spot_of.get(id, ""), -1),
                "inside": sorted(set(within[id])),
            }
        )
    problem.goal = {
        "kind": goal["kind"],
        "object": otype[goal["object"]],
        "receptacle": rtype[goal["receptacle"]] if "receptacle" in goal else -1,
        "toggle": otype[goal["toggle"]] if "toggle" in goal else -1,
    }
