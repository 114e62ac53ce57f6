"""Plays again, in ALFWorld's own engine, what a policy played in the native one: the same answers, the same outcome?

    python -m benchmarks.replay_alfworld --data GAMES runs/alfworld_h200/played_gigpo-ours.jsonl …

A greedy policy is a function of the texts that it was shown. Where TextWorld answers each of its commands with the very
text that the native engine gave, it would have said the same there, and its success in TextWorld is the one that is
counted here. `benchmarks.bench_alfworld_training` writes the files: of each episode the task, the first observation and
each command with its answer, as digests, and whether it succeeded.

Writes benchmarks/results/alfworld_replay.json. Needs the package alfworld.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manus_fast.agent.trajectory import Trajectory
from manus_fast.envs.base import Env, Task

RESULTS = Path(__file__).resolve().parent / "results" / "alfworld_replay.json"


def digest(text: str) -> str:
    """A short name of a text: 64 bits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def played(episode: Trajectory) -> dict[str, Any]:
    """What of an episode is needed to play it again."""
    return {
        "task": episode.task,
        "success": episode.success,
        "begin": digest(episode.turns[0].observation) if episode.turns else None,
        "commands": [turn.action for turn in episode.turns],
        "answers": [digest(text) for text in [*(t.observation for t in episode.turns[1:]), episode.final_observation]],
    }


def write_played(path: Path, episodes: Sequence[Trajectory]) -> None:
    """Writes the episodes that were played to their ends, one a line."""
    lines = [json.dumps(played(episode)) for episode in episodes if episode.valid]
    path.write_text("".join(line + "\n" for line in lines))


def replay(episodes: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task], env: Env) -> dict[str, Any]:
    """Plays the commands of each episode in `env`: how often it answers alike, and how often its task is solved."""
    steps = different = solved = changed = 0
    for episode in episodes:
        text, info = env.reset(tasks[episode["task"]], 0)
        different += digest(text) != episode["begin"]
        for command, answer in zip(episode["commands"], episode["answers"], strict=True):
            text, _, _, _, info = env.step(command)
            steps += 1
            different += digest(text) != answer
        won = bool(info["success"])
        solved += won
        changed += won != episode["success"]
    return {
        "games": len(episodes),
        "steps": steps,
        "different_answers": different,
        "different_outcomes": changed,
        "success": solved / len(episodes),
        "success_native": sum(episode["success"] for episode in episodes) / len(episodes),
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="played_….jsonl of the benchmark")
    parser.add_argument("--data", required=True, type=Path, help="folder of the games")
    parser.add_argument("--split", default="valid_unseen")
    parser.add_argument("--stock", action="store_true", help="without what manus_fast memoises in TextWorld")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    arguments = parser.parse_args(argv)
    from manus_fast.envs.alfworld.panels import find_root, find_tasks
    from manus_fast.envs.alfworld.textworld import TextWorldEnv, engine_version

    root = find_root(arguments.data)
    tasks = {task.id: task for task in find_tasks(root, arguments.split)}
    env = TextWorldEnv(root, 10_000, fast=not arguments.stock)
    engine, rows = engine_version(), []
    for path in arguments.files:
        episodes = [json.loads(line) for line in path.read_text().splitlines()]
        began = time.monotonic()
        row = {"policy": path.stem.removeprefix("played_"), "split": arguments.split, "engine": engine}
        row |= replay(episodes, tasks, env)
        rows.append(row | {"seconds": time.monotonic() - began})
        print(json.dumps(rows[-1]), flush=True)
    env.close()
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
