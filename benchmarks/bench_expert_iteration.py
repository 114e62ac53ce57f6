"""Expert iteration over several seeds: does a policy that imitates what its own search solves play better greedily?

    python -m benchmarks.bench_expert_iteration --start --seeds 0 --out runs/bench_expert   # the policies to begin with
    python -m benchmarks.bench_expert_iteration --seeds 0 --out runs/bench_expert           # the rounds
    python -m benchmarks.bench_expert_iteration --merge --out runs/bench_expert --json expert_iteration.json

A seed is one process (`--jobs 3`: side by side), and its own policy: random weights, demonstrations, searched tasks and
sampling. Nothing but the policy's own sampled replies is imitated in the rounds (`configs/expert_household.yaml`).
Before and after each round the policy plays a panel of valid_unseen greedily, which nothing is chosen by; its success
is compared with that before the rounds, task by task (paired bootstrap). --merge gathers the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, output_file
from benchmarks.seeds import add_arguments, over_seeds
from manus_fast.commands.common import find_config, prepare
from manus_fast.demo import make_small_policy
from manus_fast.envs.base import Environment
from manus_fast.evaluate import Report, compare, evaluate, make_panel
from manus_fast.expert_iteration import ExpertIteration
from manus_fast.finetune import FineTune
from manus_fast.player import Player, make_environment
from manus_fast.run_config import Config
from manus_fast.versions import git_commit


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("expert_iteration", __doc__)
    add_arguments(parser)
    parser.add_argument("--out", default="runs/bench_expert", help="a folder seed<n> is made in it")
    parser.add_argument("--name", default="run", help="of the rounds' folder and record, to tell variants apart")
    parser.add_argument("--start", action="store_true", help="make the imitating policies that the rounds begin with")
    parser.add_argument("--sft_seconds", type=float, default=240.0, help="of imitation at most, with --start")
    parser.add_argument("--merge", action="store_true", help="gather the seeds' records")
    parser.add_argument("--json", type=output_file, default=None, help="where --merge writes")
    parser.add_argument("--panel", type=int, default=1024, help="tasks of valid_unseen")
    parser.add_argument("overrides", nargs="*", default=[], help="of the config, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    prepare()
    root = Path(arguments.out)
    if arguments.merge:
        merge(root, arguments.name, arguments.json)
        return
    list(over_seeds(partial(start if arguments.start else rounds, arguments), arguments))


def start(arguments: argparse.Namespace, seed: int) -> None:
    """Imitates the demo's demonstrations; the policy is in `--out`/seed<n>/sft/model."""
    prepare()
    folder, seconds, overrides = Path(arguments.out) / f"seed{seed}", arguments.sft_seconds, arguments.overrides
    shutil.rmtree(folder / "sft", ignore_errors=True)  # of an earlier run
    own = [f"training.seed={seed}", f"training.output_dir={folder / 'sft'}", f"model.path={folder / 'untrained'}"]
    config = Config.load(find_config(None, "demo_household"), [*own, f"sft.time_limit={seconds}", *overrides])
    environment = make_environment(config)
    make_small_policy(config, environment, folder / "untrained", seed)
    began = time.perf_counter()
    tuned = FineTune(config, environment=environment).run()
    rate = tuned.report.summary.success.rate
    print(f"seed {seed}: {tuned.result.steps} steps, {time.perf_counter() - began:.0f} s, valid_seen {rate:.3f}")


def rounds(arguments: argparse.Namespace, seed: int) -> None:
    """Runs the rounds and writes `--out`/seed<n>/`--name`.json."""
    prepare()
    folder, name, overrides = Path(arguments.out) / f"seed{seed}", arguments.name, arguments.overrides
    if name in ("sft", "untrained", "..") or Path(name).name != name:
        raise ValueError(f"--name: expected a folder's name other than sft and untrained, got {name!r}")
    shutil.rmtree(folder / name, ignore_errors=True)  # of an earlier run
    own = [f"training.seed={seed}", f"training.output_dir={folder / name}", f"model.path={folder / 'sft' / 'model'}"]
    sizes = [
        f"environment.options.num_valid_unseen={arguments.panel}",
        "evaluation.tasks=20",
        "training.save_strategy=no",
    ]
    config = Config.load(find_config(None, "expert_household"), [*own, *sizes, *overrides])
    run = ExpertIteration(config)
    first = measured(run.player, run.environment)
    print(f"seed {seed}: before {first.summary.success.rate:.4f}", flush=True)
    rows: list[dict[str, Any]] = []
    for done in run.rounds():
        began = time.perf_counter()
        report = measured(run.player, run.environment)
        row = {**vars(done), "seed": seed, "before": first.summary.success.rate, "after": report.summary.success.rate}
        row.pop("success")  # of the 20 tasks, a mere check
        row |= {"comparison": dataclasses.asdict(compare(first, report)), "panel_seconds": time.perf_counter() - began}
        rows.append(row)
        print(line(row), flush=True)
        record = {
            "commit": git_commit(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "overrides": list(overrides),
            "environment": dataclasses.asdict(config.environment),
            "search": dataclasses.asdict(config.search),
            "expert_iteration": dataclasses.asdict(config.expert_iteration),
            "sft": dataclasses.asdict(config.sft),
            "rows": rows,
        }
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def measured(player: Player, environment: Environment) -> Report:
    return evaluate(make_panel(environment, "valid_unseen"), lambda chosen: player.play(chosen, 0.0), "policy")


def merge(root: Path, name: str, target: str | None) -> None:
    """All seeds' records as one, with the mean over seeds; refuses seeds that were run differently."""
    files = sorted(root.glob(f"seed*/{name}.json"))
    if not files:
        raise SystemExit(f"--out: expected folders seed<n> with {name}.json, got none in {root}")
    records = [json.loads(file.read_text()) for file in files]
    rows = [row for record in records for row in record.pop("rows")]
    if any(record != records[0] for record in records):
        raise SystemExit(f"--merge: expected seeds of one commit, machine and config in {root}, got several")
    last = [row for row in rows if row["number"] == records[0]["expert_iteration"]["rounds"]]
    differences = [row["comparison"]["difference"] for row in last]
    panel = last[0]["comparison"]["tasks"]
    record = {
        "command": f"python -m benchmarks.bench_expert_iteration --seeds {' '.join(str(row['seed']) for row in last)} "
        f"--out FOLDER --panel {panel}" + "".join(f" {word}" for word in records[0]["overrides"]),
        **records[0],
        "mean_difference": statistics.mean(differences),
        "rows": rows,
    }
    for row in rows:
        print(line(row))
    print(f"mean difference after the last round: {100 * record['mean_difference']:+.1f} points over {len(last)} seeds")
    if target:
        Path(target).write_text(json.dumps(record, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    found = row["comparison"]
    points = " ".join(f"{100 * found[name]:+.1f}" for name in ("difference", "low", "high"))
    rates = f"{100 * row['before']:.1f} | {100 * row['after']:.1f}"
    times = f"{row['search_seconds']:.0f} | {row['seconds']:.0f}"
    solved = f"{row['solved']}/{row['tasks']} | {row['rows']}"
    return f"| {row['seed']} | {row['number']} | {solved} | {rates} | {points} | {found['p_value']:.2g} | {times} |"


if __name__ == "__main__":
    main()
