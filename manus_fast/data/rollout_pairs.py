"""Preference pairs from an agent's own episodes: what succeeded against what failed, on the same task.

    pairs = episode_pairs(load_trajectories("runs/ppo/trajectories.jsonl", dropped), fingerprint(tokenizer))

Pairs carry the tokens that were sampled, so that training on them sees no text encoded anew.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manus_fast.agent.trajectory import Trajectory, Turn, build_rows
from manus_fast.data.preferences import LEVELS, Preference, encode_rows
from manus_fast.paths import check_path

BY = ("success", "reward")


def load_trajectories(path: str | Path, dropped: Counter[str]) -> Iterator[Trajectory]:
    """The valid episodes of a trajectories.jsonl; others are counted by reason.

    Raises:
        ValueError: no such file.
    """
    check_path("trajectories", path)
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"trajectories: expected a trajectories.jsonl, found no file at {str(path)!r}")
    with file.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
                record.pop("iteration", None)
                trajectory = Trajectory.from_json(record)
            except (ValueError, AttributeError, KeyError, TypeError):
                dropped["no episode of this schema"] += 1
                continue
            if not trajectory.valid:
                dropped["failed episode"] += 1
            elif not trajectory.sampled_tokens:
                dropped["episode without a reply"] += 1
            else:
                yield trajectory


def episode_pairs(
    trajectories: Iterable[Trajectory],
    tokenizer: str,
    *,
    level: str = "trajectory",
    by: str = "success",
    margin: float = 0.0,
    per_task: int = 4,
    seed: int = 0,
    dropped: Counter[str] | None = None,
) -> list[Preference]:
    """Pairs within each set of episodes that began alike: one task, one first prompt.

    Args:
        tokenizer: the fingerprint of the one that the episodes were sampled with (`preferences.fingerprint`).
        level: "trajectory": both episodes whole. "step": the first reply in which the two differ, after a prompt that
            is the same in both.
        by: "success": a success against a failure. "reward": any two episodes whose rewards differ.
        margin: by how much the chosen episode's reward has to be higher, at least; for "reward" above 0.
        per_task: pairs that one task gives at most, drawn by the seed.
        dropped: counts candidate pairs and tasks that give nothing, by reason.

    Raises:
        ValueError: unknown level or criterion, a limit below 1, a negative margin.
    """
    if level not in LEVELS:
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
    if by not in BY:
        raise ValueError(f"by: expected one of {', '.join(BY)}, got {by!r}")
    if per_task < 1:
        raise ValueError(f"per_task: expected an integer >= 1, got {per_task}")
    if not margin >= 0:
        raise ValueError(f"margin: expected a number >= 0, got {margin}")
    dropped = Counter() if dropped is None else dropped
    groups: dict[tuple[Any, ...], list[Trajectory]] = {}
    for trajectory in trajectories:
        first = np.asarray(trajectory.turns[0].prompt_ids, np.int64).tobytes()
        groups.setdefault((trajectory.env, trajectory.task, first), []).append(trajectory)
    pairs: list[Preference] = []
    for number, group in enumerate(groups.values()):
        candidates = [(a, b) for a, b in itertools.permutations(group, 2) if _better(a, b, by, margin)]
        if not candidates:
            dropped["task without a pair"] += 1
            continue
        taken, seen = 0, set()
        for index in np.random.default_rng([seed, number]).permutation(len(candidates)):
            if taken == per_task:
                break
            pair = _pair(*candidates[index], level, tokenizer)
            if pair is None:
                dropped["episodes without a differing reply to one prompt"] += 1
                continue
            key = json.dumps([pair.tokens["chosen"], pair.tokens["rejected"]])
            if key in seen:
                dropped["the same pair again"] += 1
                continue
            seen.add(key)
            pairs.append(pair)
            taken += 1
    return pairs


def _better(a: Trajectory, b: Trajectory, by: str, margin: float) -> bool:
    difference = a.reward - b.reward
    if by == "success":
        return a.success and not b.success and difference >= margin
    return difference > 0 and difference >= margin


def _pair(a: Trajectory, b: Trajectory, level: str, tokenizer: str) -> Preference | None:
    if level == "step":
        at = _divergence(a.turns, b.turns)
        if at is None:
            return None
        prompt = [*_exchanges(a.turns[:at]), _user(a.turns[at])]
        sides = [[_assistant(t.turns[at])] for t in (a, b)]
        rows = [_turn_rows(t.turns[at], at) for t in (a, b)]
    else:
        if _divergence(a.turns, b.turns) is None:
            return None
        prompt = [_user(a.turns[0])]
        sides = [_exchanges(t.turns)[1:] for t in (a, b)]
        rows = [encode_rows(build_rows([t])) for t in (a, b)]
    return Preference(
        prompt,
        *sides,
        level,
        a.env,
        float(a.reward - b.reward),
        (float(a.success), float(b.success)),
        {"tokenizer": tokenizer, "chosen": rows[0], "rejected": rows[1]},
        a.task,
    )


def _divergence(a: Sequence[Turn], b: Sequence[Turn]) -> int | None:
    """The first turn in which two episodes reply differently to one prompt; None: there is none."""
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        if not np.array_equal(x.prompt_ids, y.prompt_ids):
            return None
        if not np.array_equal(x.ids, y.ids):
            return number if len(x.ids) and len(y.ids) else None
    return None


def _turn_rows(turn: Turn, number: int) -> list[dict[str, Any]]:
    ids = [*map(int, turn.prompt_ids), *map(int, turn.ids)]
    return [{"ids": ids, "spans": [[len(turn.prompt_ids), len(ids), number]]}]


def _exchanges(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [message for turn in turns for message in (_user(turn), _assistant(turn))]


def _user(turn: Turn) -> dict[str, str]:
    return {"role": "user", "content": turn.observation}


def _assistant(turn: Turn) -> dict[str, str]:
    return {"role": "assistant", "content": turn.text}
