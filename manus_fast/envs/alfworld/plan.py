"""A plan for a layout's goal, made with full knowledge of where everything is: the walkthrough of a game file."""

from __future__ import annotations

from collections.abc import Mapping

from manus_fast.envs.alfworld.layout import APPLIANCE, Layout, Receptacle, Thing

_VERB = {"SinkBasin": "clean", "Microwave": "heat", "Fridge": "cool"}


class _Walk:
    """Commands so far, and where they have led."""

    def __init__(self, layout: Layout, names: Mapping[str, str]):
        self.names = names
        self.receptacles = {r.id: r for r in layout.receptacles}
        self.location = layout.start
        self.opened = {r.id for r in layout.receptacles if r.opened}
        self.commands: list[str] = []

    def name(self, entity: Receptacle | Thing) -> str:
        return self.names[entity.id.lower()]

    def go(self, receptacle: Receptacle) -> None:
        # Going to the place where one stands is not admissible, also when another receptacle led there.
        if receptacle.location != self.location:
            self.commands.append(f"go to {self.name(receptacle)}")
            self.location = receptacle.location

    def reach_into(self, receptacle: Receptacle) -> None:
        self.go(receptacle)
        if receptacle.openable and receptacle.id not in self.opened:
            self.commands.append(f"open {self.name(receptacle)}")
            self.opened.add(receptacle.id)

    def take(self, thing: Thing) -> None:
        home = next(self.receptacles[id] for id in thing.inside if self.receptacles[id].location)
        self.reach_into(home)
        self.commands.append(f"take {self.name(thing)} from {self.name(home)}")


def plan(layout: Layout, names: Mapping[str, str]) -> list[str] | None:
    """Commands that reach the goal, in the grammar of alfworld 0.4 (`move … to`); None where this planner finds
    no way (an object out of reach). names: lower-cased id -> name, as `demangle` gives."""
    goal = layout.goal
    walk = _Walk(layout, names)
    reachable = {r.id for r in layout.receptacles if r.location}
    wanted = [
        t
        for t in layout.things
        if t.cls == goal.object and "pickupable" in t.facts and any(id in reachable for id in t.inside)
    ]
    wanted.sort(key=lambda t: t.id)
    targets = [r for r in layout.receptacles if r.cls == goal.receptacle and r.location]
    count = 2 if goal.type == "pick_two_obj_and_place" else 1
    if len(wanted) < count:
        return None
    if goal.type == "look_at_obj_in_light":
        lamps = [t for t in layout.things if t.cls == goal.toggle and any(id in reachable for id in t.inside)]
        if not lamps:
            return None
        walk.take(wanted[0])
        walk.go(next(walk.receptacles[id] for id in lamps[0].inside if id in reachable))
        walk.commands.append(f"use {walk.name(lamps[0])}")
        return walk.commands
    if not targets:
        return None
    for thing in wanted[:count]:
        walk.take(thing)
        if goal.type in APPLIANCE:
            cls = APPLIANCE[goal.type]
            appliance = next((r for r in layout.receptacles if r.cls == cls and r.location), None)
            if appliance is None:
                return None
            walk.go(appliance)
            walk.commands.append(f"{_VERB[cls]} {walk.name(thing)} with {walk.name(appliance)}")
        walk.reach_into(targets[0])
        walk.commands.append(f"move {walk.name(thing)} to {walk.name(targets[0])}")
    return walk.commands
