"""GRPO on episodes against GRPO on searched trees, from one imitating policy a seed, for the same time.

    python -m benchmarks.bench_search_grpo --models runs/curves --seeds 0 1 2 --jobs 6 --json search_grpo.json

`--models` holds seed<n>/sft/model, as bench_curves leaves them. `play` has 64 episodes an iteration (8 tasks of 8);
`search` has the trees of 8 tasks, 2,000 generated tokens each, whose sibling replies are the groups
(`training.collect=search`). A curve is greedy success on the validation panel against seconds of the run; its checks
are part of the time. At the end each policy and the start play all of valid_unseen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, output_file
from benchmarks.seeds import add_arguments, side_by_side
from manus_fast.commands.common import find_config, prepare
from manus_fast.demo import measured
from manus_fast.evaluate.comparison import compare
from manus_fast.player import make_environment
from manus_fast.run_config import Config
from manus_fast.search_trainer import make_trainer
from manus_fast.tracking import METRICS_FILE, read_metrics
from manus_fast.versions import git_commit

# Way of collecting → its keys, and the environment steps between checks (a tree plays fewer turns a second).
WAYS = {
    "play": ((), 12000),
    "search": (
        (
            "training.collect=search",
            "search.strategy=mcts",
            "search.budget_tokens=2000",
            "search.stop_on_success=false",
            "ppo.share_prefixes=true",
            "ppo.drop_zero_variance=true",
        ),
        3000,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("search_grpo", __doc__)
    add_arguments(parser)
    parser.add_argument("--models", required=True, help="folder with seed<n>/sft/model")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, a run")
    parser.add_argument("--output_dir", default="runs/bench_search_grpo")
    parser.add_argument("--json", type=output_file, default=None, help="where the curves go")
    parser.add_argument("overrides", nargs="*", default=[], help="of the config, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    items = [(seed, way) for seed in arguments.seeds for way in WAYS]
    runs: list[dict[str, Any]] = []
    for row in side_by_side(partial(run, arguments), items, arguments):
        runs.append(row)
        print(line(row), flush=True)
        record = {
            "command": f"python -m benchmarks.bench_search_grpo --models MODELS --seconds {arguments.seconds:g} "
            f"--jobs {arguments.jobs} --seeds " + " ".join(map(str, [*arguments.seeds, *arguments.overrides])),
            "commit": git_commit(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "jobs": arguments.jobs,
            "runs": runs,
        }
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


def run(arguments: argparse.Namespace, item: tuple[int, str]) -> dict[str, Any]:
    """One seed, one way: the curve, and the policy before and after on valid_unseen."""
    seed, way = item
    keys, freq = WAYS[way]
    prepare()
    folder = Path(arguments.output_dir) / f"{way}{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    # A copy of its own: a measured model's report goes beside it.
    start = folder / "start" / "model"
    shutil.copytree(Path(arguments.models) / f"seed{seed}" / "sft" / "model", start)
    words = (
        "algorithm=grpo", f"model.path={start}", f"training.output_dir={folder / 'run'}", f"training.seed={seed}",
        f"training.max_seconds={arguments.seconds}", "training.save_strategy=no", f"evaluation.freq={freq}",
    )  # fmt: skip
    config = Config.load(find_config(None, "demo_household"), (*words, *keys, *arguments.overrides))
    environment = make_environment(config)
    trainer = make_trainer(config, environment=environment)
    first = trainer.evaluate().summary.success.rate
    trainer.run()
    records = read_metrics(folder / "run" / METRICS_FILE)
    before, after = (measured(config, model, environment) for model in (start, folder / "run" / "model"))
    difference = compare(before, after)
    return {
        "seed": seed,
        "way": way,
        "steps": trainer.counters.steps,
        "iterations": sum("train/success" in record for record in records),
        "panel": [[0, first], *([r["time"], r["eval/success"]] for r in records if "eval/success" in r)],
        "train": [[r["time"], r["train/success"]] for r in records if "train/success" in r],
        "before": before.summary.success.rate,
        "after": after.summary.success.rate,
        "difference": difference.difference,
        "interval": [difference.low, difference.high],
        "p_value": difference.p_value,
        "tasks": difference.tasks,
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    low, high = (100 * bound for bound in row["interval"])
    return (
        f"| {row['seed']} | {row['way']} | {row['iterations']} | {row['steps']:,} | {100 * row['before']:.1f} | "
        f"{100 * row['after']:.1f} | {100 * row['difference']:+.1f} ({low:+.1f} to {high:+.1f}) |"
    )


if __name__ == "__main__":
    main()
