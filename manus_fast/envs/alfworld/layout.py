"""Sampling of household layouts: which receptacles and objects there are, where they are, and what the goal is.

A `Layout` says nothing about PDDL; `pddl.py` writes it down for the planner-based engine. A scene number fixes
the furniture of a room, a trial the objects in it, so that a "seen" split shares rooms with training and an
"unseen" one does not, with the scene numbers of ALFRED (kitchens 1-30, living rooms 201-230, bedrooms 301-330,
bathrooms 401-430; the first six of each are unseen).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""The six types in the order of the package's numbers 1 to 6."""

APPLIANCE = {
    "pick_clean_then_place_in_recep": "SinkBasin",
    "pick_heat_then_place_in_recep": "Microwave",
    "pick_cool_then_place_in_recep": "Fridge",
}
"""What each change of state needs at hand."""

_ABILITY = {
    "pick_clean_then_place_in_recep": "cleanable",
    "pick_heat_then_place_in_recep": "heatable",
    "pick_cool_then_place_in_recep": "coolable",
}

# Furniture per room: class -> fewest and most of it.
_ROOMS: dict[str, dict[str, tuple[int, int]]] = {
    "Kitchen": {
        "CounterTop": (1, 3), "Cabinet": (2, 12), "Drawer": (2, 9), "Fridge": (1, 1), "Microwave": (1, 1),
        "SinkBasin": (1, 2), "StoveBurner": (0, 4), "CoffeeMachine": (0, 1), "Toaster": (0, 1),
        "GarbageCan": (0, 1), "DiningTable": (0, 2), "SideTable": (0, 2), "Shelf": (0, 3), "Cart": (0, 1),
    },
    "LivingRoom": {
        "Sofa": (1, 2), "ArmChair": (0, 2), "CoffeeTable": (0, 2), "SideTable": (1, 3), "Shelf": (0, 6),
        "TVStand": (0, 1), "Drawer": (0, 6), "Dresser": (0, 1), "Ottoman": (0, 1), "Cabinet": (0, 4),
        "DiningTable": (0, 1), "Desk": (0, 1), "GarbageCan": (0, 1), "Safe": (0, 1), "PaintingHanger": (0, 1),
    },
    "Bedroom": {
        "Bed": (1, 2), "Desk": (1, 2), "Drawer": (1, 8), "Shelf": (0, 6), "SideTable": (0, 2), "Dresser": (0, 1),
        "ArmChair": (0, 1), "LaundryHamper": (0, 1), "Safe": (0, 1), "GarbageCan": (0, 1), "Ottoman": (0, 1),
        "Cabinet": (0, 3),
    },
    "Bathroom": {
        "SinkBasin": (1, 2), "Toilet": (1, 1), "CounterTop": (1, 2), "Cabinet": (0, 4), "Drawer": (0, 4),
        "BathtubBasin": (0, 1), "HandTowelHolder": (0, 2), "TowelHolder": (0, 2), "ToiletPaperHanger": (0, 1),
        "GarbageCan": (0, 1), "Cart": (0, 1), "Shelf": (0, 2), "SideTable": (0, 1),
    },
}  # fmt: skip
_FIRST_SCENE = {"Kitchen": 1, "LivingRoom": 201, "Bedroom": 301, "Bathroom": 401}
_SCENES_PER_ROOM = 30
_UNSEEN_PER_ROOM = 6
# Fittings that stand or hang in a room and are in no receptacle. They only take numbers and places.
_FITTINGS = {
    "Kitchen": ("Chair", "LightSwitch", "Sink", "StoveKnob", "Window", "HousePlant"),
    "LivingRoom": ("Blinds", "Boots", "Curtains", "HousePlant", "LightSwitch", "Painting", "Television", "Window"),
    "Bedroom": ("Blinds", "Chair", "Curtains", "Footstool", "LaundryHamperLid", "LightSwitch", "Mirror", "Poster",
                "TeddyBear", "Window"),
    "Bathroom": ("Bathtub", "LightSwitch", "Mirror", "PaperTowelRoll", "ScrubBrush", "ShowerDoor", "ShowerGlass",
                 "Sink", "Window"),
}  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Classes and what may be done with them. `contains`: receptacle class -> object classes it takes."""

    receptacles: frozenset[str]
    openable: frozenset[str]
    movable: frozenset[str]
    """Objects that hold other objects (bowl, plate, …)."""
    objects: frozenset[str]
    contains: Mapping[str, frozenset[str]]
    abilities: Mapping[str, frozenset[str]]
    """cleanable, heatable, coolable, toggleable, sliceable, pickupable -> classes."""
    rooms: Mapping[str, frozenset[str]]
    """Task type -> rooms that have it."""

    @classmethod
    def of_package(cls) -> Vocabulary:
        """Reads the vocabulary of the installed `alfworld`. Raises ImportError without it."""
        from alfworld.gen import constants

        movable = frozenset(constants.MOVABLE_RECEPTACLES)
        receptacles = frozenset(constants.RECEPTACLES) - movable
        contains = {k: frozenset(v) for k, v in constants.VAL_RECEPTACLE_OBJECTS.items()}
        objects = frozenset(constants.OBJECTS) - receptacles
        abilities = {k.lower(): frozenset(v) & objects for k, v in constants.VAL_ACTION_OBJECTS.items()}
        abilities["pickupable"] = frozenset().union(*contains.values()) & objects
        rooms = {k: frozenset(v) for k, v in constants.GOALS_VALID.items()}
        openable = frozenset(constants.OPENABLE_CLASS_LIST) & receptacles
        return cls(receptacles, openable, movable, objects, contains, abilities, rooms)


@dataclass(frozen=True)
class Receptacle:
    id: str
    cls: str
    location: str | None
    """None: the room has it, but no place to stand before it."""
    openable: bool
    opened: bool = False


@dataclass(frozen=True)
class Thing:
    """An object. `inside`: receptacles that list it (mostly one); `within`: the object that holds it."""

    id: str
    cls: str
    location: str | None
    inside: tuple[str, ...] = ()
    within: str | None = None
    facts: frozenset[str] = frozenset()
    """pickupable, cleanable, …, and initial states isClean, isHot, isCool, isSliced."""


@dataclass(frozen=True)
class Goal:
    type: str
    object: str
    receptacle: str = ""
    toggle: str = ""


@dataclass(frozen=True)
class Layout:
    scene: int
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    locations: tuple[str, ...]
    start: str
    goal: Goal
    contains: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Variety:
    """How often a sampled home departs from the plain case; every one of these occurs in ALFRED scenes or may.

    Probabilities per receptacle (first four), per object (the rest), except `start_facing` (per game).
    """

    shared_location: float = 0.15
    unreachable: float = 0.02
    stuck: float = 0.03
    """Of a class that opens, but does not."""
    opened: float = 0.05
    other_location: float = 0.3
    """The object's own place differs from its receptacle's: ALFRED computes the two apart."""
    two_receptacles: float = 0.03
    within_object: float = 0.15
    on_floor: float = 0.03
    prepared: float = 0.06
    """Each of clean, hot or cool, sliced from the start, where the class allows."""
    start_facing: float = 0.05


RARE = Variety(0.3, 0.1, 0.1, 0.3, 0.5, 0.2, 0.4, 0.1, 0.4, 0.5)
"""Everything rare made frequent: homes for comparing engines rather than for training."""


@dataclass
class _Builder:
    rng: random.Random
    vocabulary: Vocabulary
    variety: Variety
    used: set[str] = field(default_factory=set)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def coordinate(self) -> str:
        value = self.rng.uniform(-4.0, 4.0)
        return f"{value:+06.2f}".replace("+", "_plus_").replace("-", "_minus_").replace(".", "_dot_")

    def identify(self, cls: str) -> str:
        """An id in the manner of AI2-THOR: the class and three coordinates, basins under the thing they are in."""
        while True:
            suffix = ""
            name = cls
            if cls.endswith("Basin"):
                name, suffix = cls.removesuffix("Basin"), f"_bar_{cls}"
            new = name + "".join(f"_bar_{self.coordinate()}" for _ in range(3)) + suffix
            if new.lower() not in self.used:
                self.used.add(new.lower())
                return new

    def locate(self) -> str:
        while True:
            x, y = self.rng.randint(-12, 12), self.rng.randint(-12, 12)
            new = f"loc_bar_{x}_bar_{y}_bar_{self.rng.randrange(4)}_bar_{self.rng.choice((-30, 0, 15, 30, 45, 60))}"
            new = new.replace("-", "_minus_")
            if new not in self.used:
                self.used.add(new)
                return new


def room_of(scene: int) -> str:
    for room, first in _FIRST_SCENE.items():
        if first <= scene < first + _SCENES_PER_ROOM:
            return room
    raise ValueError(f"scene: expected 1-30, 201-230, 301-330 or 401-430, got {scene}")


def scenes(rooms: Iterable[str], unseen: bool) -> list[int]:
    """Scene numbers of the given rooms: the first six of each room are the unseen ones."""
    steps = range(_UNSEEN_PER_ROOM) if unseen else range(_UNSEEN_PER_ROOM, _SCENES_PER_ROOM)
    return [_FIRST_SCENE[room] + step for room in sorted(rooms) for step in steps]


def _furnish(builder: _Builder, room: str) -> list[Receptacle]:
    furniture: list[Receptacle] = []
    for cls, (fewest, most) in sorted(_ROOMS[room].items()):
        for i in range(builder.rng.randint(fewest, most)):
            # What a task may need stays within reach and in order.
            needed = i < max(fewest, 1)
            location: str | None = builder.locate()
            if furniture and builder.chance(builder.variety.shared_location):
                location = builder.rng.choice(furniture).location or location
            elif not needed and builder.chance(builder.variety.unreachable):
                location = None
            opens = cls in builder.vocabulary.openable
            stuck = opens and not needed and builder.chance(builder.variety.stuck)
            furniture.append(Receptacle(builder.identify(cls), cls, location, opens and not stuck))
    return furniture


def _abilities(builder: _Builder, cls: str) -> set[str]:
    facts = {ability for ability, classes in builder.vocabulary.abilities.items() if cls in classes}
    for ability, state in (("cleanable", "isClean"), ("sliceable", "isSliced")):
        if ability in facts and builder.chance(builder.variety.prepared):
            facts.add(state)
    states = [s for a, s in (("heatable", "isHot"), ("coolable", "isCool")) if a in facts]
    if states and builder.chance(builder.variety.prepared):
        facts.add(builder.rng.choice(states))
    return facts


def _place(builder: _Builder, cls: str, homes: Sequence[Receptacle], rooms_places: Sequence[str]) -> Thing | None:
    """Puts a new object of `cls` into one of `homes`, or on the floor; None where no home takes it."""
    takes = [r for r in homes if cls in builder.vocabulary.contains.get(r.cls, ())]
    if not takes:
        return None
    facts = frozenset(_abilities(builder, cls))
    if builder.chance(builder.variety.on_floor):
        return Thing(builder.identify(cls), cls, builder.rng.choice(rooms_places), facts=facts)
    home = builder.rng.choice(takes)
    inside = [home.id]
    if len(takes) > 1 and builder.chance(builder.variety.two_receptacles):
        inside.append(builder.rng.choice([r.id for r in takes if r is not home]))
    location = home.location
    if builder.chance(builder.variety.other_location):
        location = builder.rng.choice(rooms_places)
    return Thing(builder.identify(cls), cls, location, tuple(sorted(inside)), None, facts)


def _choose_goal(builder: _Builder, task_type: str, furniture: Sequence[Receptacle]) -> Goal | None:
    vocabulary = builder.vocabulary
    reachable = sorted({r.cls for r in furniture if r.location})
    pickable = vocabulary.abilities["pickupable"]
    takes = {cls: vocabulary.contains.get(cls, frozenset()) & pickable for cls in reachable}
    if task_type == "look_at_obj_in_light":
        objects = sorted(frozenset().union(*takes.values()))
        lamps = sorted(vocabulary.abilities["toggleable"])
        return Goal(task_type, builder.rng.choice(objects), toggle=builder.rng.choice(lamps))
    if task_type in APPLIANCE and APPLIANCE[task_type] not in reachable:
        return None
    wanted = vocabulary.abilities[_ABILITY[task_type]] if task_type in _ABILITY else pickable
    # The object has to fit somewhere else than at its goal, and the goal is not the appliance that is used.
    pairs = [
        (obj, target)
        for target in reachable
        if target != APPLIANCE.get(task_type)
        for obj in sorted(takes[target] & wanted)
        if any(obj in takes[cls] for cls in reachable if cls != target)
    ]
    if not pairs:
        return None
    obj, target = builder.rng.choice(pairs)
    return Goal(task_type, obj, target)


def sample_layout(
    seed: int, scene: int, trial: int, task_type: str, vocabulary: Vocabulary, variety: Variety | None = None
) -> Layout | None:
    """A home and a goal of `task_type` in it, the same for the same arguments; None when the room offers none.

    The goal can be reached and is not reached yet; `games.py` proves both in the engine.
    """
    variety = variety or Variety()
    room = room_of(scene)
    builder = _Builder(random.Random(f"{seed}/scene/{scene}"), vocabulary, variety)
    furniture = _furnish(builder, room)
    builder.rng = random.Random(f"{seed}/scene/{scene}/trial/{trial}/{task_type}")
    goal = _choose_goal(builder, task_type, furniture)
    if goal is None:
        return None
    places = sorted({r.location for r in furniture if r.location}) + [builder.locate() for _ in range(3)]
    reachable = [r for r in furniture if r.location]

    things: list[Thing] = []
    # The goal's own objects: none of them at the goal (at most one of two), all within reach.
    plain = _Builder(builder.rng, vocabulary, Variety(on_floor=0.0, two_receptacles=0.0, prepared=0.0), builder.used)
    homes = [r for r in reachable if r.cls != goal.receptacle]
    fewest = 2 if task_type == "pick_two_obj_and_place" else 1
    for _ in range(builder.rng.randint(fewest, fewest + 2)):
        thing = _place(plain, goal.object, homes, places)
        if thing is None:
            return None
        things.append(thing)
    for lamp in [goal.toggle] if goal.toggle else []:
        home = builder.rng.choice(reachable)
        facts = frozenset({"toggleable"})
        things.append(Thing(builder.identify(lamp), lamp, home.location, (home.id,), None, facts))

    others = sorted(vocabulary.abilities["pickupable"] - {goal.object})
    for cls in builder.rng.sample(others, builder.rng.randint(8, 22)):
        for _ in range(builder.rng.choice((1, 1, 1, 2, 3))):
            thing = _place(builder, cls, furniture, places)
            if thing is not None:
                things.append(thing)
    things = _nest(builder, things, goal)
    for cls in _FITTINGS[room]:
        for _ in range(builder.rng.choice((0, 1, 1, 2))):
            things.append(Thing(builder.identify(cls), cls, builder.rng.choice(places)))

    furniture = [
        Receptacle(r.id, r.cls, r.location, r.openable, r.openable and builder.chance(variety.opened))
        for r in furniture
    ]
    start = builder.rng.choice(places) if builder.chance(variety.start_facing) else builder.locate()
    classes = sorted({t.cls for t in things})
    contains = frozenset(
        (r.cls, cls) for r in furniture for cls in classes if cls in vocabulary.contains.get(r.cls, ())
    )
    locations = sorted({*places, start, *(t.location for t in things if t.location)})
    return Layout(scene, tuple(furniture), tuple(things), tuple(locations), start, goal, contains)


def _nest(builder: _Builder, things: list[Thing], goal: Goal) -> list[Thing]:
    """Puts some objects into bowls, boxes and the like: there they stay on the receptacle's list, or leave it."""
    holders = [t for t in things if t.cls in builder.vocabulary.movable]
    nested = []
    for thing in things:
        takes = [h for h in holders if h is not thing and thing.cls in builder.vocabulary.contains.get(h.cls, ())]
        free = thing.cls not in (goal.object, goal.toggle) and thing.cls not in builder.vocabulary.movable
        if takes and free and builder.chance(builder.variety.within_object):
            holder = builder.rng.choice(takes)
            inside = holder.inside if builder.chance(0.7) else ()
            nested.append(Thing(thing.id, thing.cls, holder.location, inside, holder.id, thing.facts))
        else:
            nested.append(thing)
    return nested
