"""The demo over several seeds: SFT, PPO from it, and a control that goes on with SFT for PPO's wall time.

    python -m benchmarks.bench_demo --seeds 0 1 2 --json benchmarks/results/demo.json

With `--jobs 6 --cores 0 1 … 11` the three seeds run side by side, then their six arms, each on two cores, which is what
the demo is meant for.

Every policy is measured on all of valid_unseen (layouts that training never shows), greedily, each task once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, output_file
from benchmarks.seeds import add_arguments, over_seeds, side_by_side
from manus_fast.commands.common import find_config, prepare
from manus_fast.demo import Demo, Stage
from manus_fast.evaluate import Report, compare
from manus_fast.versions import git_commit


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("demo", __doc__)
    add_arguments(parser)
    parser.add_argument("--output_dir", default="runs/bench_demo", help="one folder a seed is made in it")
    parser.add_argument("--json", type=output_file, default=None, help="where the rows go")
    parser.add_argument("--reuse_sft", action="store_true", help="take the imitating policies that lie in output_dir")
    parser.add_argument("overrides", nargs="*", default=[], help="of the config, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    imitating = list(over_seeds(partial(imitate, arguments), arguments))
    arms = [(seed, arm) for seed in arguments.seeds for arm in ("ppo", "control")]
    trained = dict(zip(arms, side_by_side(partial(go_on, arguments), arms, arguments), strict=True))
    rows = [
        _row(seed, [sft, trained[seed, "ppo"], trained[seed, "control"]])
        for seed, sft in zip(arguments.seeds, imitating, strict=True)
    ]
    record = {
        "command": f"python -m benchmarks.bench_demo --seeds {' '.join(map(str, arguments.seeds))}"
        + (" --reuse_sft" if arguments.reuse_sft else ""),
        "commit": git_commit(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "jobs": arguments.jobs,
        "seconds": time.monotonic() - began,
        "rows": rows,
        "mean": {name: _mean(rows, name) for name in ("sft", "ppo", "control", "ppo_minus_sft", "ppo_minus_control")},
    }
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n")
    print("\nsuccess on valid_unseen, per cent")
    print(f"{'seed':>6} {'SFT':>7} {'PPO':>7} {'control':>8} {'PPO-SFT':>8} {'PPO-control':>12}")
    for row in [*rows, {"seed": "mean", **record["mean"]}]:
        print(
            f"{row['seed']:>6} {100 * row['sft']:7.1f} {100 * row['ppo']:7.1f} {100 * row['control']:8.1f} "
            f"{100 * row['ppo_minus_sft']:8.1f} {100 * row['ppo_minus_control']:12.1f}"
        )


def demo(arguments: argparse.Namespace, seed: int) -> Demo:
    """The demo of one seed, with the arguments' overrides."""
    prepare()
    folder = Path(arguments.output_dir) / f"seed{seed}"
    return Demo(find_config(None, "demo_household"), folder, seed, arguments.overrides)


def imitate(arguments: argparse.Namespace, seed: int) -> Stage:
    """The policy that both arms begin with: a new one, or that of an earlier run which was interrupted later on."""
    if not arguments.reuse_sft:
        return demo(arguments, seed).imitate()
    folder = Path(arguments.output_dir) / f"seed{seed}" / "sft"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return Stage("SFT", folder, last["time"], Report.load(folder / "eval_unseen.json"))


def go_on(arguments: argparse.Namespace, item: tuple[int, str]) -> Stage:
    """An arm of a seed, "ppo" or "control": both have one limit, which counts all but the start and a last check."""
    seed, arm = item
    own = demo(arguments, seed)
    return own.improve() if arm == "ppo" else own.imitate_on(own.config("ppo").training.max_seconds)


def _row(seed: int, stages: list[Stage]) -> dict[str, Any]:
    sft, ppo, control = stages
    rates = {
        name: stage.report.summary.success.rate for name, stage in zip(("sft", "ppo", "control"), stages, strict=True)
    }
    row = {
        "seed": seed,
        "tasks": sft.report.summary.tasks,
        **rates,
        "ppo_minus_sft": rates["ppo"] - rates["sft"],
        "ppo_minus_control": rates["ppo"] - rates["control"],
        "ppo_against_sft": dataclasses.asdict(compare(sft.report, ppo.report)),
        "ppo_against_control": dataclasses.asdict(compare(control.report, ppo.report)),
        "seconds": {"sft": sft.seconds, "ppo": ppo.seconds, "control": control.seconds},
    }
    print(json.dumps({name: value for name, value in row.items() if "against" not in name}), flush=True)
    return row


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


if __name__ == "__main__":
    main()
