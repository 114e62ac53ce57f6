"""ALFWorld's written forms: layouts as PDDL problems, and the names that a player reads for their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from manus_fast.envs.alfworld.layout import Layout, Vocabulary

_KNIVES = ("Knife", "ButterKnife")


def demangle(ids: Iterable[str]) -> dict[str, str]:
    """Maps ids to names: `apple_bar__plus_01…` to "apple 2". Ids of one class are numbered downwards in sorted
    order (the first gets the highest number), basins by their own class; an id without `_bar_` keeps its text and
    has a trailing space, as in the engine."""
    ordered = sorted(ids)
    classes = {id: _class_of(id) for id in ordered if "_bar_" in id}
    left = Counter(classes.values())
    names = {}
    for id in ordered:
        if id not in classes:
            text = id
            for code, sign in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
                text = text.replace(code, sign)
            names[id] = f"{text} "
        else:
            names[id] = f"{classes[id]} {left[classes[id]]}"
            left[classes[id]] -= 1
    return names


def _class_of(id: str) -> str:
    name = id.split("_bar_", 1)[0]
    return name + "basin" if "basin" in id else name


def entities(layout: Layout) -> set[str]:
    """Lower-cased ids of a layout's receptacles, objects and locations, that is, all that get numbers."""
    ids = {r.id for r in layout.receptacles} | {t.id for t in layout.things}
    ids |= {r.location for r in layout.receptacles if r.location} | {layout.start}
    ids |= {t.location for t in layout.things if t.location}
    return {id.lower() for id in ids}


def _goal(layout: Layout) -> str:
    """The goal in the package's own form, taken from its library of goals."""
    from alfworld.gen import goal_library

    goal = layout.goal
    text = goal_library.gdict[goal.type]["pddl"].format(obj=goal.object, recep=goal.receptacle, toggle=goal.toggle)
    return text.replace("#", "-").strip()


def describe_goal(layout: Layout, choice: int) -> str:
    """The task as a sentence, one of the package's two templates for the type."""
    from alfworld.gen import goal_library

    goal = layout.goal
    template = goal_library.gdict[goal.type]["templates"][choice]
    return template.format(obj=goal.object.lower(), recep=goal.receptacle.lower(), toggle=goal.toggle.lower())


def write_problem(layout: Layout, name: str, vocabulary: Vocabulary) -> str:
    """The layout as the `pddl_problem` of a game file."""
    # The domain names these four as constants, so they are declared whatever the room has.
    otypes = sorted(vocabulary.objects | set(_KNIVES))
    rtypes = sorted(vocabulary.receptacles | {"SinkBasin", "Microwave", "Fridge"})
    objects = ["agent1 - agent"]
    objects += [f"{cls} - object" for cls in otypes]
    objects += [f"{cls}Type - otype" for cls in otypes]
    objects += [f"{cls}Type - rtype" for cls in rtypes]
    objects += [f"{t.id} - object" for t in sorted(layout.things, key=lambda t: t.id)]
    objects += [f"{r.id} - receptacle" for r in sorted(layout.receptacles, key=lambda r: r.id)]
    objects += [f"{location} - location" for location in layout.locations]

    init = [f"receptacleType {r.id} {r.cls}Type" for r in layout.receptacles]
    init += [f"objectType {t.id} {t.cls}Type" for t in layout.things]
    init += [f"canContain {receptacle}Type {cls}Type" for receptacle, cls in sorted(layout.contains)]
    init += [f"isReceptacleObject {t.id}" for t in layout.things if t.cls in vocabulary.movable]
    init += [f"openable {r.id}" for r in layout.receptacles if r.openable]
    init += [f"atLocation agent1 {layout.start}"]
    init += [f"opened {r.id}" for r in layout.receptacles if r.opened]
    init += [f"{fact} {t.id}" for t in layout.things for fact in sorted(t.facts)]
    init += [f"inReceptacle {t.id} {receptacle}" for t in layout.things for receptacle in t.inside]
    init += [f"inReceptacleObject {t.id} {t.within}" for t in layout.things if t.within]
    init += [f"receptacleAtLocation {r.id} {r.location}" for r in layout.receptacles if r.location]
    init += [f"objectAtLocation {t.id} {t.location}" for t in layout.things if t.location]

    lines = [f"(define (problem plan_{name})", "(:domain alfred)", "(:objects"]
    lines += [f"    {text}" for text in objects]
    lines += [")", "(:init"]
    lines += [f"    ({text})" for text in init]
    return "\n".join([*lines, ")", _goal(layout)]) + "\n"
