"""The handcoded expert of the package alfworld on generated games of each type: as it is, and told of its moves.

    python -m benchmarks.alfworld_expert --json benchmarks/results/alfworld_expert.json

Needs the package alfworld. The expert strikes an object off its inventory when its last command had the word "put";
since 0.4 that command is "move O to R". "Told" shows it the word that it looks for. Some minutes on one core.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from manus_fast.envs.alfworld import fast
from manus_fast.envs.alfworld.games import make_games
from manus_fast.envs.alfworld.layout import TASK_TYPES
from manus_fast.envs.alfworld.panels import find_root, find_tasks
from manus_fast.envs.alfworld.textworld import engine_version
from manus_fast.versions import git_commit

LIMITS = (60, 199)
"""Commands within which a game is won; the package's expert gives up after 200."""


def make_env() -> Any:
    """The package's environment with its expert, as `AlfredTWEnv` builds it for imitation, memoised."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredExpert
    from textworld.envs import PddlEnv

    fast.install()
    infos = textworld.EnvInfos(won=True, admissible_commands=True, facts=True, extras=["expert_plan"])
    return AlfredExpert(AlfredDemangler(PddlEnv(infos), shuffle=False), expert_type="handcoded")


def told(track: Any) -> Any:
    """`update_state_tracking` of the expert, shown "put" where the last command was "move"."""

    def shown(policy: Any, game_state: Any, last_action: str) -> None:
        track(policy, game_state, f"put{last_action[4:]}" if last_action.startswith("move ") else last_action)

    return shown


def play(env: Any, game: str) -> int | None:
    """Commands to the goal, None where the expert has not reached it within the larger limit."""
    # The expert draws from Python's own generator.
    random.seed(0)
    env.load(game)
    state = env.reset()
    for step in range(1, LIMITS[-1] + 1):
        try:
            state, _, done = env.step(state["extra.expert_plan"][0])
        except IndexError:  # it draws from the objects that it wants and sees here, also where there are none
            return None
        if done:
            return step
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", type=int, default=20, help="of each type")
    parser.add_argument("--seed", type=int, default=51)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    from alfworld.agents.expert.handcoded_expert import BasePolicy

    stock = BasePolicy.update_state_tracking
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_games(folder, {"train": args.games * len(TASK_TYPES)}, args.seed)
        root = find_root(folder)
        tasks = find_tasks(root, "train")
        env = make_env()
        for task_type in TASK_TYPES:
            row: dict[str, Any] = {"type": task_type, "games": args.games}
            games = [str(root / task.data["game"]) for task in tasks if task.type == task_type]
            for name, track in (("as it is", stock), ("told", told(stock))):
                BasePolicy.update_state_tracking = track
                lengths = [play(env, game) for game in games]
                row[name] = {str(n): sum(steps is not None and steps <= n for steps in lengths) for n in LIMITS}
            print(json.dumps(row), flush=True)
            rows.append(row)
    record = {"schema": 1, "command": "python -m benchmarks.alfworld_expert", "engine": engine_version()}
    record |= {"commit": git_commit(), "seed": args.seed, "rows": rows}
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
