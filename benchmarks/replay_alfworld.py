"""Plays again, in ALFWorld's own engine, what a policy played in the native one: the same answers, the same outcome?

    python -m benchmarks.replay_alfworld --data GAMES runs/alfworld_h200/played_gigpo-ours.jsonl …

A greedy policy is a function of the texts that it was shown. Where TextWorld answers each of its commands with the very
text that the native engine gave, it would have said the same there, and its success in TextWorld is the one that is
counted here. `benchmarks.bench_alfworld_training` writes the files: of each episode the task, the first observation and
each command with its answer, as digests, and whether it succeeded. A run's trajectories.jsonl serves as well.

Writes benchmarks/results/alfworld_replay.json. Needs the package alfworld.

    python -m benchmarks.replay_alfworld --live NAME NATIVE TEXTWORLD …

instead compares, game by game, two panels that a policy played itself: eval.json of `manus-fast eval` or of the
benchmark, the second of them with `environment.backend=textworld`. Writes benchmarks/results/alfworld_live.json.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manus_fast.agent.trajectory import Trajectory
from manus_fast.envs.base import Env, Task
from manus_fast.evaluate import Report, compare

RESULTS = Path(__file__).resolve().parent / "results" / "alfworld_replay.json"
LAST = 20
"""Commands at the end of a lost game that tell how it was lost: half of them refused, or half given before."""
LIVE = RESULTS.with_name("alfworld_live.json")


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


def read_played(path: Path) -> list[dict[str, Any]]:
    """Episodes of a file that `write_played` or a training run (trajectories.jsonl) wrote, packed by gzip or not."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        record.pop("iteration", None)
    return [played(Trajectory.from_json(record)) if "turns" in record else record for record in records]


def write_played(path: Path, episodes: Sequence[Trajectory]) -> None:
    """Writes the episodes that were played to their ends, one a line."""
    lines = [json.dumps(played(episode)) for episode in episodes if episode.valid]
    path.write_text("".join(line + "\n" for line in lines))


def way_of_losing(episode: Mapping[str, Any]) -> str:
    """What a lost game did at its end: circles, refused or otherwise; see `LAST`."""
    commands, answers = episode["commands"], episode["answers"][-LAST:]
    first = max(0, len(commands) - LAST)
    again = sum(command in commands[:at] for at, command in enumerate(commands[first:], first))
    if 2 * answers.count(digest("Nothing happens.")) >= len(answers):
        return "refused"
    return "circles" if 2 * again >= len(answers) else "otherwise"


def losses(episodes: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task]) -> dict[str, dict[str, int]]:
    """Kind of task → its games, and how many of them were lost in which way."""
    found: dict[str, dict[str, int]] = {}
    for episode in episodes:
        none = {"games": 0, "circles": 0, "refused": 0, "otherwise": 0}
        kind = found.setdefault(tasks[episode["task"]].type, none)
        kind["games"] += 1
        if not episode["success"]:
            kind[way_of_losing(episode)] += 1
    return dict(sorted(found.items()))


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


def live(name: str, native: str, other: str) -> dict[str, Any]:
    """Two panels of one policy: how many games each solved alone, and whether the difference is more than chance."""
    found = compare(Report.load(native), Report.load(other))
    return {
        "policy": name,
        "games": found.tasks,
        "success": found.rate_b,
        "success_native": found.rate_a,
        "both": found.both,
        "only_native": found.only_a,
        "only_textworld": found.only_b,
        "p_value": found.p_value,
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="played_….jsonl, or trajectories.jsonl of a run")
    parser.add_argument("--data", type=Path, help="folder of the games")
    parser.add_argument("--live", nargs=3, action="append", default=[], metavar=("NAME", "NATIVE", "TEXTWORLD"))
    parser.add_argument("--stock", action="store_true", help="without what manus_fast memoises in TextWorld")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    arguments = parser.parse_args(argv)
    if arguments.live:
        rows = [live(*given) for given in arguments.live]
        arguments.json.with_name(LIVE.name).write_text(json.dumps(rows, indent=1) + "\n")
        return rows
    if not arguments.files or arguments.data is None:
        parser.error("expected --data and files, or --live")
    from manus_fast.envs.alfworld.panels import find_root, find_tasks
    from manus_fast.envs.alfworld.textworld import TextWorldEnv, engine_version

    root = find_root(arguments.data)
    env = TextWorldEnv(root, 10_000, fast=not arguments.stock)
    engine, rows = engine_version(), []
    for path in arguments.files:
        episodes = read_played(path)
        splits = sorted({episode["task"].split("/")[1] for episode in episodes})
        tasks = {task.id: task for split in splits for task in find_tasks(root, split)}
        began = time.monotonic()
        name = path.name.split(".")[0].removeprefix("played_")
        row = {"policy": name, "split": ", ".join(splits), "engine": engine}
        row |= replay(episodes, tasks, env)
        row["losses"] = losses(episodes, tasks)
        rows.append(row | {"seconds": time.monotonic() - began})
        print(json.dumps(rows[-1]), flush=True)
    env.close()
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
