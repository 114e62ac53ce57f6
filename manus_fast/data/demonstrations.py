"""Episodes that an environment's expert plays: what supervised fine-tuning starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manus_fast.data.react import Step
from manus_fast.envs.base import Environment, Task


@dataclass(frozen=True)
class Demonstration:
    """One episode of an expert: what it saw, thought and did, turn by turn."""

    task: Task
    steps: list[Step]
    success: bool


def demonstrate(
    environment: Environment, tasks: Sequence[Task], seeds: Sequence[int], expert: str | None = None, slots: int = 256
) -> list[Demonstration]:
    """Lets the environment's expert play tasks, `slots` worlds side by side.

    Args:
        environment: its batch has `expert(slots, kind) -> (actions, thoughts)`.
        tasks, seeds: what to play, and what each world is reset with.
        expert: the kind of expert, by the environment's own names; None: the environment's default.

    Returns:
        One demonstration a task, in order, won or not.

    Raises:
        ValueError: the environment has no expert, or not this one; `seeds` has another length than `tasks`.
    """
    if len(seeds) != len(tasks):
        raise ValueError(f"seeds: expected one for each of the {len(tasks)} tasks, got {len(seeds)}")
    demonstrations: list[Demonstration] = []
    for start in range(0, len(tasks), slots):
        part = tasks[start : start + slots]
        batch = environment.make_batch(len(part))
        if not hasattr(batch, "expert"):
            raise ValueError(f"environment.name: expected an environment with an expert, got {environment.name!r}")
        live = list(range(len(part)))
        seen, infos = batch.reset(live, part, seeds[start : start + slots])
        steps: list[list[Step]] = [[] for _ in live]
        success = [False] * len(part)
        while live:
            actions, thoughts = batch.expert(live, expert)
            for slot, action, thought in zip(live, actions, thoughts, strict=True):
                steps[slot].append(Step(seen[slot], thought, action, infos[slot].get("admissible")))
            going = []
            for slot, observation, _reward, terminated, truncated, info in zip(
                live, *batch.step(live, actions), strict=True
            ):
                seen[slot], infos[slot] = observation, info
                if terminated or truncated:
                    success[slot] = bool(info.get("success", False))
                else:
                    going.append(slot)
            live = going
        batch.close()
        demonstrations += map(Demonstration, part, steps, success)
    return demonstrations
