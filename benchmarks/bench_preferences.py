"""Preferences over several seeds: do DPO, and best of n by a reward model, solve more tasks than their start?

    python -m benchmarks.bench_preferences --start --seeds 0 --out runs/bench_preferences    # the imitating policies
    python -m benchmarks.bench_preferences --seeds 0 --out runs/bench_preferences            # pairs, DPO, reward model
    python -m benchmarks.bench_preferences --merge --out runs/bench_preferences --json preferences.json

A seed is one process with a policy of its own, which plays training tasks `--members` times each; successes against
failures of a task are the pairs. The reward model learns from whole episodes, DPO from the first replies in which they
differ (`--level step`): a failure is most of the time a success's way and then some, and pushing all of it down
unlearns what both have in common. With `--level search` its pairs come from tree search over the same tasks instead.
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
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_expert_iteration import measured, start
from manus_fast.agent.trajectory import Trajectory, build_rows
from manus_fast.commands.common import find_config, prepare
from manus_fast.data.preferences import fingerprint, preference, save_preferences
from manus_fast.data.rollout_pairs import episode_pairs
from manus_fast.evaluate import Report, compare, evaluate, make_panel
from manus_fast.finetune import training_tasks
from manus_fast.modeling.load import load_model
from manus_fast.player import Player
from manus_fast.preference import PreferenceTune, RewardTune
from manus_fast.run_config import Config
from manus_fast.search.config import SearchConfig
from manus_fast.search.targets import preference_pairs
from manus_fast.versions import git_commit

_NAMED = ("tasks", "members", "per_task", "level", "budget_tokens", "steps_per_task", "n", "panel")

# What DPO and the reward model of a policy this small take; the shipped configs are for language models.
SETTINGS = (
    "dpo.batch_size=32",
    "dpo.epochs=2",
    "dpo.learning_rate.start=5.0e-5",
    "dpo.beta=0.5",
    "dpo.sft_coef=0.5",
    "dpo.eval_every=12",
    "dpo.patience=null",
    "reward_model.batch_size=32",
    "reward_model.epochs=3",
    "reward_model.learning_rate.start=1.0e-3",
    "reward_model.eval_every=25",
    "training.save_strategy=no",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/bench_preferences", help="a folder seed<n> is made in it")
    parser.add_argument("--name", default="run", help="of the folder and record, to tell variants apart")
    parser.add_argument("--start", action="store_true", help="make the imitating policies that the rest begins with")
    parser.add_argument("--sft_seconds", type=float, default=240.0, help="of imitation at most, with --start")
    parser.add_argument("--tasks", type=int, default=500, help="training tasks that give pairs")
    parser.add_argument("--members", type=int, default=8, help="episodes of each")
    parser.add_argument("--per_task", type=int, default=4, help="most pairs of episodes of each")
    parser.add_argument("--level", default="step", help="of DPO's pairs: step, trajectory, or search")
    parser.add_argument("--budget_tokens", type=int, default=600, help="of a search, with --level search")
    parser.add_argument("--steps_per_task", type=int, default=12, help="most of DPO's pairs of each")
    parser.add_argument("--n", type=int, default=4, help="episodes that a judge chooses from")
    parser.add_argument("--panel", type=int, default=512, help="tasks of valid_unseen")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--merge", action="store_true", help="gather the seeds' records")
    parser.add_argument("--json", default=None, help="where --merge writes")
    parser.add_argument("overrides", nargs="*", default=[], help="of configs/demo_household.yaml, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    prepare()
    torch.set_num_threads(arguments.threads)
    root = Path(arguments.out)
    if arguments.merge:
        merge(root, arguments.name, arguments.json)
        return
    for seed in arguments.seeds:
        if arguments.start:
            start(root / f"seed{seed}", seed, arguments.sft_seconds, arguments.overrides)
        else:
            learn(root / f"seed{seed}", seed, arguments)


def learn(root: Path, seed: int, arguments: argparse.Namespace) -> None:
    """Pairs, DPO, reward model and the panel of one seed; writes `root`/`name`.json after each part."""
    folder = root / arguments.name
    folder.mkdir(parents=True, exist_ok=True)

    def config(part: str) -> Config:
        own = [f"training.seed={seed}", f"training.output_dir={folder / part}", f"model.path={root / 'sft' / 'model'}"]
        own.append(f"environment.options.num_valid_unseen={arguments.panel}")
        return Config.load(find_config(None, "demo_household"), [*own, *SETTINGS, *arguments.overrides])

    settings = config("dpo")
    model, tokenizer = load_model(root / "sft" / "model")
    player = Player(settings, model, tokenizer)
    environment = player.environment
    record: dict[str, Any] = {
        "commit": git_commit(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "arguments": {name: getattr(arguments, name) for name in _NAMED},
        "overrides": list(arguments.overrides),
        "dpo": dataclasses.asdict(settings.dpo),
        "reward_model": dataclasses.asdict(settings.reward_model),
        "row": {"seed": seed, "seconds": {}, "success": {}, "against_start": {}},
    }
    row, began = record["row"], time.perf_counter()
    base: Report | None = None

    def note(part: str, report: Report | None = None) -> None:
        nonlocal began
        row["seconds"][part] = round(time.perf_counter() - began, 1)
        if report is not None:
            row["success"][part] = report.summary.success.rate
            if base is not None:
                row["against_start"][part] = dataclasses.asdict(compare(base, report))
        (root / f"{arguments.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"seed {seed}: {part} {row['success'].get(part, '')} {row['seconds'][part]} s", flush=True)
        began = time.perf_counter()

    report = measured(player, environment)
    note("start", report)
    base = report

    # Tasks that were not demonstrated: the draw of more tasks begins with the demonstrated ones.
    seen = settings.data.demonstrations
    tasks = training_tasks(environment.tasks("train"), seen + arguments.tasks, seed)[seen:]
    episodes = player.collect(tasks, 0, arguments.members)
    dropped: Counter[str] = Counter()
    name = fingerprint(tokenizer)
    pairs = episode_pairs(episodes, name, per_task=arguments.per_task, seed=seed, dropped=dropped)
    if arguments.level == "search":
        sought = SearchConfig("mcts", arguments.budget_tokens, temperature=1.0, stop_on_success=False)
        found = [preference_pairs(t, player.system_prompt, tokenizer=name) for t in player.search(tasks, 1, sought)]
        replies = [preference(pair) for pairs_of_tree in found for pair in pairs_of_tree]
    else:
        most = arguments.steps_per_task
        replies = episode_pairs(episodes, name, level=arguments.level, per_task=most, seed=seed)
    save_preferences(pairs, folder / "preferences.jsonl")
    save_preferences(replies, folder / "preferences_dpo.jsonl")
    row |= {"episodes": len(episodes), "sampled_success": _rate(episodes), "dropped": dict(dropped)}
    row |= {"pairs": len(pairs), "dpo_pairs": len(replies)}
    note("pairs")

    rewarded = RewardTune(config("reward_model"), model, tokenizer)
    row["accuracy"] = rewarded.run(pairs).accuracy
    judge = rewarded.policy.scorer("outcome")
    note("reward_model")

    panel = make_panel(environment, "valid_unseen")
    drawn: list[list[Trajectory]] = []
    reports: dict[str, Report] = {}

    def choose(name: str, score: Callable[[list[Trajectory]], np.ndarray]) -> None:
        best = [int(np.argmax(score(list(members)))) for members in zip(*drawn, strict=True)]
        picks = [drawn[k][task] for task, k in enumerate(best)]
        reports[name] = evaluate(panel, lambda _: picks, name)

    def sample(chosen: Any) -> list[Trajectory]:
        drawn.extend(player.play(chosen, settings.rollout.temperature, 1 + k) for k in range(arguments.n))
        return drawn[0]

    reports["one_sample"] = evaluate(panel, sample, "one_sample")
    choose("best_of_n", lambda members: judge([build_rows([t])[-1] for t in members]))
    choose("shortest", lambda members: -np.asarray([len(t.turns) for t in members]))
    choose("oracle", lambda members: np.asarray([t.success for t in members]))
    row["success"]["mean"] = float(np.mean([_rate(members) for members in drawn]))
    for name, found in reports.items():
        note(name, found)

    # Last, for it trains the very weights that played so far.
    tune = PreferenceTune(settings, model, tokenizer, environment)
    trained = tune.run(replies)
    row["dpo"] = {"steps": trained.result.steps, "kept": trained.result.best_step, "valid_seen": trained.result.history}
    note("dpo_training")
    note("dpo", measured(tune.player, environment))


def _rate(episodes: Sequence[Trajectory]) -> float:
    return float(np.mean([episode.success for episode in episodes]))


def merge(root: Path, name: str, target: str | None) -> None:
    """All seeds' records as one; refuses seeds that were run differently."""
    files = sorted(root.glob(f"seed*/{name}.json"))
    if not files:
        raise SystemExit(f"--out: expected folders seed<n> with {name}.json, got none in {root}")
    records = [json.loads(file.read_text()) for file in files]
    rows = [record.pop("row") for record in records]
    if any(record != records[0] for record in records):
        raise SystemExit(f"--merge: expected seeds of one commit, machine and config in {root}, got several")
    options = " ".join(f"--{key} {value}" for key, value in records[0]["arguments"].items())
    seeds = " ".join(str(row["seed"]) for row in rows)
    command = " ".join(["python -m benchmarks.bench_preferences --seeds", seeds, options, *records[0]["overrides"]])
    for row in rows:
        print(line(row))
    if target:
        Path(target).write_text(json.dumps({"command": command, **records[0], "rows": rows}, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row of the table in Markdown: the start, then each with its difference in points and its 95 % interval."""
    cells = [f"{100 * row['success']['start']:.1f}"]
    for name in ("dpo", "best_of_n", "shortest", "oracle"):
        found = row["against_start"][name]
        points = " to ".join(f"{100 * found[end]:+.1f}" for end in ("low", "high"))
        cells.append(f"{100 * row['success'][name]:.1f} ({100 * found['difference']:+.1f}, {points})")
    cells += [f"{100 * row['success']['mean']:.1f}", str(row["pairs"]), str(row["dpo_pairs"])]
    return f"| {row['seed']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
