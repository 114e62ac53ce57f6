"""Preferences over several seeds: do DPO, and best of n by a reward model, solve more tasks than their start?

    python -m benchmarks.bench_preferences --start --jobs 3 --out runs/bench_preferences    # the imitating policies
    python -m benchmarks.bench_preferences --jobs 6 --out runs/bench_preferences            # both parts of three seeds
    python -m benchmarks.bench_preferences --merge --out runs/bench_preferences --json preferences.json

A seed has a policy of its own, which plays training tasks `--members` times each; successes against failures of a task
are the pairs, of whole episodes. The reward model learns from these. DPO compares the first replies in which they
differ, and imitates the chosen episode whole (`dpo.compare: first_difference`, `dpo.sft_coef`): a failure is for the
most part a success's way and then turns that no success has, and pushing those down makes every late turn unlikely.
With `--level step` or `search` its pairs are single replies, of episodes or of tree search over the same tasks. With
`--rounds` the policy plays `--tasks` other tasks for each round, and its pairs are those of the policy as it then is
(`dpo.rounds`).
On a panel of valid_unseen, which nothing is chosen by, the start and the DPO policy play greedily; the start also
plays `--n` sampled episodes a task, of which the reward model chooses one without being told which is solved. An
episode of this world ends when its task is solved, so that length tells much: `shortest` chooses by length alone,
`mean` takes any of the n, `oracle` is told. Each is compared with the start's greedy play, task by task (paired
bootstrap).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import Parser, output_file
from benchmarks.bench_expert_iteration import measured, start
from benchmarks.preferences_tables import table
from benchmarks.seeds import add_arguments, over_seeds, side_by_side
from manus_fast.agent.trajectory import Trajectory, build_rows
from manus_fast.commands.common import find_config, prepare
from manus_fast.data.preferences import fingerprint, preference
from manus_fast.data.rollout_pairs import episode_pairs
from manus_fast.envs.base import Environment
from manus_fast.evaluate import Report, compare, evaluate, make_panel
from manus_fast.finetune import training_tasks
from manus_fast.modeling.load import load_model
from manus_fast.player import Player
from manus_fast.preference import PreferenceTune, RewardTune
from manus_fast.preference_rounds import PreferenceRounds
from manus_fast.run_config import Config
from manus_fast.search.config import SearchConfig
from manus_fast.search.driver import ScoreRows
from manus_fast.search.targets import preference_pairs
from manus_fast.versions import git_commit

PARTS = ("dpo", "reward_model")
_NAMED = ("tasks", "members", "per_task", "level", "rounds", "budget_tokens", "steps_per_task", "n", "panel")

# What DPO and the reward model of a policy this small take; the shipped configs are for language models.
SETTINGS = (
    "dpo.batch_size=32",
    "dpo.epochs=2",
    "dpo.learning_rate={start: 1.0e-3, kind: linear, end: 5.0e-5}",
    "dpo.beta=0.1",
    "dpo.compare=first_difference",
    "dpo.sft_coef=3.0",
    "dpo.eval_every=15",
    "dpo.patience=null",
    "reward_model.batch_size=32",
    "reward_model.epochs=2",
    "reward_model.learning_rate.start=1.0e-3",
    "reward_model.eval_every=15",
    "training.save_strategy=no",
)
NOTE = "DPO's settings were chosen on seed 0 and this panel: its row is no clean evidence, those of other seeds are."


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("preferences", __doc__)
    add_arguments(parser)
    parser.add_argument("--out", default="runs/bench_preferences", help="a folder seed<n> is made in it")
    parser.add_argument("--name", default="run", help="of the folder and record, to tell variants apart")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to train and measure")
    parser.add_argument("--start", action="store_true", help="make the imitating policies that the rest begins with")
    parser.add_argument("--policies", default=None, help="a folder with seed<n>/sft/model; default: --out")
    parser.add_argument("--sft_seconds", type=float, default=240.0, help="of imitation at most, with --start")
    parser.add_argument("--tasks", type=int, default=1000, help="training tasks that give pairs")
    parser.add_argument("--members", type=int, default=4, help="episodes of each")
    parser.add_argument("--per_task", type=int, default=2, help="most pairs of episodes of each")
    parser.add_argument("--level", default="trajectory", help="of DPO's pairs: trajectory, step, or search")
    parser.add_argument(
        "--rounds", type=int, default=0, help="of DPO on the policy's own episodes; 0: one on a fixed set"
    )
    parser.add_argument("--budget_tokens", type=int, default=600, help="of a search, with --level search")
    parser.add_argument("--steps_per_task", type=int, default=12, help="most pairs of each, with --level step")
    parser.add_argument("--n", type=int, default=4, help="episodes that a judge chooses from")
    parser.add_argument("--panel", type=int, default=512, help="tasks of valid_unseen")
    parser.add_argument("--merge", action="store_true", help="gather the seeds' records")
    parser.add_argument("--json", type=output_file, default=None, help="where --merge writes")
    parser.add_argument("--note", default=NOTE, help="what --merge says of how the settings were chosen")
    parser.add_argument("overrides", nargs="*", default=[], help="of configs/demo_household.yaml, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    prepare()
    if arguments.merge:
        merge(Path(arguments.out), arguments.name, arguments.json, arguments.parts, arguments.note)
    elif arguments.start:
        list(over_seeds(partial(start, arguments), arguments))
    else:
        items = [(seed, part) for part in reversed(arguments.parts) for seed in arguments.seeds]
        list(side_by_side(partial(learn, arguments), items, arguments))


def learn(arguments: argparse.Namespace, item: tuple[int, str]) -> None:
    """Pairs and one part of one seed; writes `--out`/seed<n>/`--name`_<part>.json after each step of it."""
    prepare()
    seed, part = item
    root = Path(arguments.out) / f"seed{seed}"
    folder = root / f"{arguments.name}_{part}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    folder.mkdir(parents=True)
    policy = Path(arguments.policies or arguments.out) / f"seed{seed}" / "sft" / "model"
    began = time.perf_counter()

    def config(name: str) -> Config:
        own = [f"training.seed={seed}", f"training.output_dir={folder / name}", f"model.path={policy}"]
        own.append(f"environment.options.num_valid_unseen={arguments.panel}")
        return Config.load(find_config(None, "demo_household"), [*own, *SETTINGS, *arguments.overrides])

    settings = config("dpo")
    model, tokenizer = load_model(policy)
    player = Player(settings, model, tokenizer)
    environment = player.environment
    record: dict[str, Any] = {
        "commit": git_commit(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "arguments": {name: getattr(arguments, name) for name in _NAMED},
        "overrides": list(arguments.overrides),
        "dpo": dataclasses.asdict(settings.dpo),
        "reward_model": dataclasses.asdict(settings.reward_model),
        "row": {"seed": seed, "threads": torch.get_num_threads(), "seconds": {}, "success": {}, "against_start": {}},
    }
    row = record["row"]
    base: Report | None = None

    def note(step: str, report: Report | None = None) -> None:
        nonlocal began
        row["seconds"][step] = round(time.perf_counter() - began, 1)
        if report is not None:
            row["success"][step] = report.summary.success.rate
            if base is not None:
                row["against_start"][step] = dataclasses.asdict(compare(base, report))
        (root / f"{arguments.name}_{part}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"seed {seed}: {step} {row['success'].get(step, '')} {row['seconds'][step]} s", flush=True)
        began = time.perf_counter()

    report = measured(player, environment)
    note("start", report)
    base = report

    if part == "dpo" and arguments.rounds:
        given = ("rounds", "tasks", "members", "per_task")
        block = dataclasses.replace(settings.dpo, **{name: getattr(arguments, name) for name in given})
        run = PreferenceRounds(dataclasses.replace(settings, dpo=block), model, tokenizer, environment)
        row["rounds"] = []
        for done in run.rounds():
            row["rounds"].append(vars(done))
            note(f"training{done.number}")
            note(f"round{done.number}", measured(run.player, environment))
        for found in (row["success"], row["against_start"]):
            found["dpo"] = found[f"round{arguments.rounds}"]
        note("done")
        return

    # Tasks that were not demonstrated: the draw of more tasks begins with the demonstrated ones.
    seen = settings.data.demonstrations
    tasks = training_tasks(environment.tasks("train"), seen + arguments.tasks, seed)[seen:]
    episodes = player.collect(tasks, 0, arguments.members)
    dropped: Counter[str] = Counter()
    name = fingerprint(tokenizer)
    row |= {"episodes": len(episodes), "sampled_success": _rate(episodes)}
    if part == "reward_model":
        pairs = episode_pairs(episodes, name, per_task=arguments.per_task, seed=seed, dropped=dropped)
        row |= {"pairs": len(pairs), "dropped": dict(dropped)}
        note("pairs")
        rewarded = RewardTune(config(part), model, tokenizer)
        row["accuracy"] = rewarded.run(pairs).accuracy
        note("reward_model")
        temperature = settings.rollout.temperature
        judge = rewarded.policy.scorer("outcome")
        for step, found in best_of_n(player, environment, judge, arguments.n, temperature).items():
            if isinstance(found, Report):
                note(step, found)
            else:
                row["success"][step] = found
        note("done")
        return
    if arguments.level == "search":
        sought = SearchConfig("mcts", arguments.budget_tokens, temperature=1.0, stop_on_success=False)
        trees = player.search(tasks, 1, sought)
        pairs = [preference(p) for tree in trees for p in preference_pairs(tree, player.system_prompt, tokenizer=name)]
    else:
        most = arguments.per_task if arguments.level == "trajectory" else arguments.steps_per_task
        pairs = episode_pairs(episodes, name, level=arguments.level, per_task=most, seed=seed, dropped=dropped)
    row |= {"dpo_pairs": len(pairs), "dropped": dict(dropped)}
    note("pairs")
    tune = PreferenceTune(settings, model, tokenizer, environment)
    trained = tune.run(pairs)
    row["dpo"] = {"steps": trained.result.steps, "kept": trained.result.best_step, "valid_seen": trained.result.history}
    note("dpo_training")
    note("dpo", measured(tune.player, environment))


def best_of_n(
    player: Player, environment: Environment, judge: ScoreRows, n: int, temperature: float
) -> dict[str, Report | float]:
    """The panel as sampled n times: one of them, the judge's choice, the shortest, a solved one; "mean" is a rate."""
    panel = make_panel(environment, "valid_unseen")
    drawn: list[list[Trajectory]] = []

    def sample(chosen: Any) -> list[Trajectory]:
        drawn.extend(player.play(chosen, temperature, 1 + k) for k in range(n))
        return drawn[0]

    def choose(name: str, score: Callable[[list[Trajectory]], np.ndarray]) -> Report:
        best = [int(np.argmax(score(list(members)))) for members in zip(*drawn, strict=True)]
        picks = [drawn[k][task] for task, k in enumerate(best)]
        return evaluate(panel, lambda _: picks, name)

    return {
        "one_sample": evaluate(panel, sample, "one_sample"),
        "best_of_n": choose("best_of_n", lambda members: judge([build_rows([t])[-1] for t in members])),
        "shortest": choose("shortest", lambda members: -np.asarray([len(t.turns) for t in members])),
        "oracle": choose("oracle", lambda members: np.asarray([t.success for t in members])),
        "mean": float(np.mean([_rate(members) for members in drawn])),
    }


def _rate(episodes: Sequence[Trajectory]) -> float:
    return float(np.mean([episode.success for episode in episodes]))


def merge(root: Path, name: str, target: str | None, parts: Sequence[str] = PARTS, remark: str = NOTE) -> None:
    """All seeds' records as one, the parts of a seed in one row; refuses seeds that were run differently."""
    files = {part: sorted(root.glob(f"seed*/{name}_{part}.json")) for part in parts}
    found = {part: [json.loads(file.read_text()) for file in files[part]] for part in parts}
    seeds = [[record["row"]["seed"] for record in found[part]] for part in parts]
    if not seeds[0] or seeds[0] != seeds[-1]:
        raise SystemExit(
            f"--out: expected folders seed<n> with {' and '.join(f'{name}_{part}.json' for part in parts)} in {root}"
        )
    rows = []
    for members in zip(*found.values(), strict=True):
        row, *others = (record.pop("row") for record in members)
        row["seconds"] = {parts[0]: row["seconds"]}
        for part, other in zip(parts[1:], others, strict=True):
            if row["success"]["start"] != other["success"]["start"]:
                raise SystemExit(f"--merge: expected all parts of seed {row['seed']} to begin alike, they do not")
            row["seconds"][part] = other.pop("seconds")
            row = other | row | {key: row[key] | other[key] for key in ("success", "against_start")}
        rows.append(row)
    records = [record for part in parts for record in found[part]]
    if any(record != records[0] for record in records):
        raise SystemExit(f"--merge: expected seeds of one commit, machine and config in {root}, got several")
    options = " ".join(f"--{key} {value}" for key, value in records[0]["arguments"].items())
    numbers = " ".join(str(row["seed"]) for row in rows)
    words = ["python -m benchmarks.bench_preferences --seeds", numbers, options, *records[0]["overrides"]]
    whole = {"command": " ".join(words), "note": remark, **records[0], "rows": rows}
    print("\n".join(table(whole)))
    if target:
        Path(target).write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
