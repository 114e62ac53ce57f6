"""The proof that two engines say the same: walks through games in both, compared string by string.

Compared are the introduction, every observation, the admissible commands, reward and the end of the episode. Walks
are the walkthrough as it is and with detours, an expert's that searches the rooms, and random ones that prefer commands
that change something; detours and random walks are sprinkled with commands that are not admissible. A walk is the same
for the same seed, game and number.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manus_fast.envs.alfworld.panels import SPLITS, find_root, find_tasks
from manus_fast.envs.alfworld.textworld import TextWorldEnv, read_game
from manus_fast.envs.base import Env, Task

_NO_STEP_LIMIT = 60_000
_IDLE = frozenset({"look", "inventory", "help", "examine"})
_FIRST = 20
"""Mismatches kept in full."""
_EXPERT_STEPS = 100
_NAMED = re.compile(r"([a-z]+) \d")


@dataclass
class Mismatch:
    game: str
    walk: str
    step: int
    command: str
    what: str
    expected: str
    got: str
    history: list[str]


@dataclass
class Summary:
    """What a comparison found. `refused`: games that the candidate does not play, by reason; not mismatches."""

    reference: str
    candidate: str
    games: int = 0
    steps: int = 0
    walks: int = 0
    wins: int = 0
    not_admissible: int = 0
    mismatches: int = 0
    types: dict[str, int] = field(default_factory=dict)
    verbs: dict[str, int] = field(default_factory=dict)
    """Admissible commands played, by their first word."""
    named: list[str] = field(default_factory=list)
    """Classes of the objects and receptacles that admissible commands named, sorted."""
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    first: list[Mismatch] = field(default_factory=list)


def detours(rng: random.Random, walkthrough: Sequence[str]) -> Iterator[str | None]:
    """The walkthrough's commands in order; None where the walk should take a random command instead."""
    for command in walkthrough:
        while rng.random() < 0.35:
            yield None
        yield command


def _spoil(rng: random.Random, command: str, seen: Sequence[str]) -> str:
    """A command that need not be admissible: one seen before, or a near miss of an admissible one."""
    words = command.split()
    match rng.randrange(7):
        case 0 if seen:
            return rng.choice(seen)
        case 1:
            return f"  {command}\t"
        case 2:
            return command.upper()
        case 3:
            return command.replace(" ", "  ", 1)
        case 4:
            return " ".join(words[:-1])
        case 5:
            return f"{command} 1"
        case _:
            return rng.choice(("", "dance", "go to moon 1", "take the mug", "put mug 1 in/on desk 1", "açaí ☃"))


def choose(rng: random.Random, admissible: Sequence[str], seen: Sequence[str]) -> str:
    """A random command: mostly one that changes something, one in twelve spoilt."""
    command = rng.choice(admissible)
    if rng.random() < 0.75:
        acting = [c for c in admissible if c.split()[0] not in _IDLE]
        verbs = sorted({c.split()[0] for c in acting})
        if verbs:
            # By verb first: otherwise a room full of furniture is all walking.
            verb = rng.choice(verbs)
            command = rng.choice([c for c in acting if c.split()[0] == verb])
    return _spoil(rng, command, seen) if rng.random() < 1 / 12 else command


def _differences(expected: Any, got: Any) -> Iterator[tuple[str, str, str]]:
    for what, left, right in zip(("observation", "reward", "terminated"), expected[:3], got[:3], strict=True):
        if left != right:
            yield what, repr(left), repr(right)
    left, right = expected[-1]["admissible"], got[-1]["admissible"]
    if left != right:
        missing = [c for c in left if c not in right]
        extra = [c for c in right if c not in left]
        order = "" if missing or extra else " (order)"
        yield "admissible" + order, f"also {missing}", f"also {extra}"


def walk(
    reference: Env,
    candidate: Env,
    task: Task,
    rng: random.Random,
    guide: Iterator[str | None],
    name: str,
    summary: Summary,
) -> tuple[bool, set[str]]:
    """Plays one walk in both engines until `guide` ends, the game is won or they differ.

    Returns whether they agree, and all commands that were admissible on the way."""
    observation, info = reference.reset(task, 0)
    expected: tuple[Any, ...] = (observation, 0.0, False, info)
    observation, info = candidate.reset(task, 0)
    got: tuple[Any, ...] = (observation, 0.0, False, info)
    history: list[str] = []
    seen: set[str] = set()
    summary.walks += 1
    for step in range(_NO_STEP_LIMIT):
        command = history[-1] if history else ""
        found = list(_differences(expected, got))
        for what, left, right in found:
            summary.mismatches += 1
            if len(summary.first) < _FIRST:
                mismatch = Mismatch(task.id, name, step, command, what, left, right, list(history))
                summary.first.append(mismatch)
        if found:
            return False, seen
        if expected[2]:
            summary.wins += 1
            return True, seen
        admissible = expected[-1]["admissible"]
        seen.update(admissible)
        try:
            command = next(guide) or choose(rng, admissible, sorted(seen))
        except StopIteration:
            return True, seen
        if command in admissible:
            verb = command.split()[0]
            summary.verbs[verb] = summary.verbs.get(verb, 0) + 1
        else:
            summary.not_admissible += 1
        observation, reward, terminated, _, info = reference.step(command)
        expected = (observation, reward, terminated, info)
        observation, reward, terminated, _, info = candidate.step(command)
        got = (observation, reward, terminated, info)
        history.append(command)
        summary.steps += 1
    return True, seen


def compare(
    root: Path,
    tasks: Sequence[Task],
    reference: Env,
    candidate: Env,
    *,
    random_walks: int = 1,
    random_steps: int = 40,
    seed: int = 0,
    names: tuple[str, str] = ("textworld", "native"),
    expert: Callable[[], str] | None = None,
    report: Callable[[str], None] | None = None,
) -> Summary:
    """Compares two engines on `tasks`: per game its walkthrough (where it has one), the same with detours, at most 100
    commands of an expert, and `random_walks` of `random_steps` commands.

    expert: gives a command in the candidate's present state; None: no such walk.
    report: called with a line now and then.
    """
    summary = Summary(*names)
    named: set[str] = set()
    refused: Counter[str] = Counter()
    types: Counter[str] = Counter()
    start = time.monotonic()
    for number, task in enumerate(tasks):
        try:
            candidate.reset(task, 0)
        except ValueError as error:
            refused[str(error).split(" (", 1)[0]] += 1
            continue
        types[task.type] += 1
        summary.games += 1
        walkthrough = read_game(root / task.data["game"]).get("walkthrough") or []
        guides = [] if not walkthrough else ["walkthrough", "detours"]
        guides += [] if expert is None else ["expert"]
        for name in [*guides, *(f"random {w}" for w in range(random_walks))]:
            rng = random.Random(f"{seed}/{task.id}/{name}")
            guide: Iterator[str | None]
            match name:
                case "walkthrough":
                    guide = iter(walkthrough)
                case "detours":
                    guide = detours(rng, walkthrough)
                case "expert" if expert is not None:
                    guide = (expert() for _ in range(_EXPERT_STEPS))
                case _:
                    guide = itertools.repeat(None, random_steps)
            agree, seen = walk(reference, candidate, task, rng, guide, name, summary)
            named.update(*(_NAMED.findall(command) for command in seen))
            if not agree:
                break
        if report is not None and (number + 1) % 20 == 0:
            report(f"{number + 1}/{len(tasks)} games, {summary.steps} steps, {summary.mismatches} mismatches")
    summary.refused, summary.types = dict(sorted(refused.items())), dict(sorted(types.items()))
    summary.verbs, summary.named = dict(sorted(summary.verbs.items())), sorted(named)
    summary.seconds = round(time.monotonic() - start, 1)
    return summary


def main(
    data: str | None = None,
    *,
    splits: Sequence[str] = SPLITS,
    games: int | None = None,
    random_walks: int = 1,
    random_steps: int = 40,
    seed: int = 0,
    output: str | None = None,
) -> int:
    """`manus-fast env diff`: the real engine against the native one on the games in `data` (default as `find_root`).

    games: at most so many per split, spread evenly over it. Prints progress on stderr and the summary as JSON on
    stdout, or writes it to `output`. Returns 0 when nothing differs, 1 when something does. Raises ValueError where
    no games or no engine are found.
    """
    from manus_fast.envs.alfworld.native import NativeEnv

    root = find_root(data)
    tasks: list[Task] = []
    for split in splits:
        if (root / split).is_dir():
            found = find_tasks(root, split)
            count = len(found) if games is None else min(games, len(found))
            tasks += [found[i * len(found) // count] for i in range(count)]
    if not tasks:
        raise ValueError(f"data: expected games in {', '.join(splits)} of {root}, got none")
    reference, candidate = TextWorldEnv(root, _NO_STEP_LIMIT), NativeEnv(root, _NO_STEP_LIMIT)
    summary = compare(
        root,
        tasks,
        reference,
        candidate,
        random_walks=random_walks,
        random_steps=random_steps,
        seed=seed,
        expert=lambda: candidate.expert()[0],
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    text = json.dumps({"schema": 1} | asdict(summary), indent=1)
    if output is None:
        print(text)
    else:
        Path(output).write_text(text + "\n")
    return 1 if summary.mismatches else 0
