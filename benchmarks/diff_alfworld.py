"""The full proof that the native engine says what ALFWorld's own says: three sets of games, compared string by string.

    python -m benchmarks.diff_alfworld --json benchmarks/results/alfworld_diff.json

Needs the package alfworld. Games are made anew (720, equally many of each of the six types), each walkthrough is
played in the real engine before it counts, and every game is walked through in both engines (`envs/alfworld/diff.py`);
a quarter of an hour on one core. The same seeds give the same games and walks on any machine.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from manus_fast.envs.alfworld.diff import compare
from manus_fast.envs.alfworld.games import make_games
from manus_fast.envs.alfworld.layout import RARE
from manus_fast.envs.alfworld.native import NativeEnv
from manus_fast.envs.alfworld.panels import find_root, find_tasks
from manus_fast.envs.alfworld.textworld import TextWorldEnv, engine_version
from manus_fast.versions import git_commit

SETS = (
    ("usual homes, grammar 0.4", {"games": 360, "seed": 101, "rare": False, "grammar": "0.4"}),
    ("everything rare made frequent, grammar 0.4", {"games": 240, "seed": 303, "rare": True, "grammar": "0.4"}),
    ("everything rare made frequent, grammar 0.3", {"games": 120, "seed": 202, "rare": True, "grammar": "0.3"}),
)
NO_STEP_LIMIT = 60_000


def prove(games: int, seed: int, rare: bool, grammar: str) -> dict:
    """The summary of one set, as JSON has it."""
    with tempfile.TemporaryDirectory() as folder:
        make_games(folder, {"train": games}, seed, variety=RARE if rare else None, grammar=grammar)
        root = find_root(folder)
        tasks = find_tasks(root, "train")
        reference, candidate = TextWorldEnv(root, NO_STEP_LIMIT), NativeEnv(root, NO_STEP_LIMIT)
        report = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        summary = compare(
            root, tasks, reference, candidate,
            random_walks=2, random_steps=50, seed=seed, expert=lambda: candidate.expert()[0], report=report,
        )  # fmt: skip
        reference.close()
        candidate.close()
    return asdict(summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the summaries to this file")
    parser.add_argument("--share", type=float, default=1.0, help="share of the games, for a shorter run")
    args = parser.parse_args()
    results = []
    for name, options in SETS:
        options = options | {"games": max(6, round(options["games"] * args.share))}
        results.append({"set": name, "options": options, **prove(**options)})
        shown = {key: results[-1][key] for key in ("set", "games", "steps", "wins", "mismatches", "refused", "seconds")}
        print(json.dumps(shown), flush=True)
    record = {"schema": 1, "engine": engine_version(), "command": "python -m benchmarks.diff_alfworld"}
    record |= {"commit": git_commit(), "sets": results}
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if any(result["mismatches"] for result in results) else 0)


if __name__ == "__main__":
    main()
