"""What a collection could take at best, and where its time went, from the lengths of its replies and its steps' times.

A step of the engine that only decodes takes `once + each * requests` seconds, as fitted to the steps of the loop in
lockstep. In such steps:

    full      all slots busy from the first step to the last: tokens / slots steps
    waited    lockstep: for each turn of each wave the longest reply
    ended     without barriers each slot takes the next episode when it is free, but the collection is over only with
              its last episode, and slots stand empty meanwhile
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Lengths = Sequence[Sequence[int]]
"""Tokens of each reply of each episode, in the order in which episodes begin."""
Step = tuple[int, float, bool]
"""Requests in a step of the engine, its seconds, and whether it took in prompts or ended replies."""


def step_cost(steps: Sequence[Step]) -> tuple[float, float]:
    """(once, each) seconds of a step that only decodes, by least squares over all but the slowest 5 % of them."""
    plain = np.asarray([(count, seconds) for count, seconds, more in steps if not more])
    plain = plain[plain[:, 1] <= np.quantile(plain[:, 1], 0.95)]
    each, once = (max(0.0, float(x)) for x in np.polyfit(plain[:, 0], plain[:, 1], 1))
    return once, each


def waited(lengths: Lengths, slots: int) -> int:
    """Steps of a loop that begins a wave of `slots` episodes when the wave before is over and a turn when all replies
    of the turn before are there."""
    steps = 0
    for start in range(0, len(lengths), slots):
        wave = lengths[start : start + slots]
        steps += sum(max(e[turn] for e in wave if len(e) > turn) for turn in range(max(map(len, wave))))
    return steps


def ended(lengths: Lengths, slots: int) -> int:
    """Steps until the last episode is over, where a slot that is free takes the next one."""
    free = [0] * min(slots, len(lengths))
    for episode in lengths:
        heapq.heapreplace(free, free[0] + sum(episode))
    return max(free)


@dataclass(frozen=True)
class Bounds:
    """How much faster than lockstep a loop without barriers can be over the same replies."""

    equal: float
    """Were all steps equally long and all slots busy to the end: Σ longest / Σ mean."""
    timed: float
    """With steps as long as those of lockstep were: one with few requests is shorter."""
    ended: float
    """`timed`, with slots that stand empty until the last episode is over."""


def bounds(lengths: Lengths, slots: int, once: float, each: float) -> Bounds:
    tokens = sum(map(sum, lengths))
    full, barriers, last = tokens / slots, waited(lengths, slots), ended(lengths, slots)
    lockstep = once * barriers + each * tokens
    timed, finite = (lockstep / (once * steps + each * tokens) for steps in (full, last))
    return Bounds(barriers / full, timed, finite)


@dataclass(frozen=True)
class Parts:
    """Where the seconds of a collection went; they add up to all of it."""

    decoding: float
    """What its tokens take with all slots busy."""
    empty: float
    """Steps with empty slots: at barriers, or at the end of the collection."""
    further: float
    """Steps beyond these, as where a slot's next request is not there yet."""
    prompts: float
    """What steps took beyond one that only decodes: new prompts, replies that end."""
    host: float
    """Outside the engine's `poll`."""


def parts(
    lengths: Lengths, slots: int, once: float, each: float, steps: int, engine: float, seconds: float, barriers: bool
) -> Parts:
    """Of a collection of `seconds`, of which `engine` in the engine's `poll`, in `steps` steps."""
    tokens = sum(map(sum, lengths))
    full, needed = tokens / slots, waited(lengths, slots) if barriers else ended(lengths, slots)
    return Parts(
        decoding=once * full + each * tokens,
        empty=once * (needed - full),
        further=once * (steps - needed),
        prompts=engine - once * steps - each * tokens,
        host=seconds - engine,
    )
