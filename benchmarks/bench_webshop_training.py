"""A small policy learns to shop: it imitates an expert, then PPO goes on from there, on WebShop's generated catalogue.

    python -m benchmarks.bench_webshop_training --seeds 0 --out runs/webshop_training --cpus 0 1
    python -m benchmarks.bench_webshop_training --collect runs/webshop_training --json webshop_training.json

Every policy is measured on the 500 goals of the split test, each once, greedily and at the temperature that PPO samples
with: mean score and share of score 1. The difference of PPO and imitation is paired goal by goal (bootstrap, 95 %).
With --control a third policy imitates on for as long as PPO took.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, output_file
from benchmarks.data_tables import training
from manus_fast.commands.common import find_config, prepare
from manus_fast.demo import Stage, run
from manus_fast.evaluate import Report, compare, evaluate, make_panel
from manus_fast.modeling.load import load_model
from manus_fast.player import Player
from manus_fast.run_config import Config
from manus_fast.versions import git_commit

SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 128}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("webshop_training", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", default="runs/webshop_training", help="seedN/ and seedN.json are made in it")
    parser.add_argument("--cpus", type=int, nargs="+", help="the cores to run on, as many threads as them")
    parser.add_argument("--control", action="store_true", help="also imitate on for as long as PPO took")
    parser.add_argument("--shape", nargs="+", default=[], metavar="NAME=N", help="of the policy: hidden=128 layers=3 …")
    parser.add_argument("--collect", metavar="OUT", help="train nothing: put the seeds in OUT together")
    parser.add_argument("--json", type=output_file, help="with --collect: where the record goes")
    parser.add_argument("overrides", nargs="*", default=[], help="of configs/demo_webshop.yaml, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    if arguments.collect:
        record = collect(Path(arguments.collect))
        show(record)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
        return
    if arguments.cpus:
        os.sched_setaffinity(0, arguments.cpus)
        torch.set_num_threads(len(arguments.cpus))
    prepare()
    shape = SHAPE | {name: int(size) for name, size in (word.split("=") for word in arguments.shape)}
    for seed in arguments.seeds:
        row = train(seed, Path(arguments.out), arguments.control, arguments.overrides, shape)
        print(json.dumps(row), flush=True)


def train(seed: int, out: Path, control: bool, overrides: Sequence[str], shape: dict[str, int]) -> dict[str, Any]:
    """One seed's stages as a row, which is also written to `out`/seedN.json."""
    began = time.monotonic()
    config = find_config(None, "demo_webshop")
    stages = run(config, out / f"seed{seed}", seed=seed, control=control, overrides=overrides, shape=shape)
    sft, ppo, *others = stages
    sampled = [played(stage, config, overrides) for stage in stages[:2]]
    row: dict[str, Any] = {
        "seed": seed,
        "tasks": sft.report.summary.tasks,
        "settings": sft.report.settings,
        **{name: figures(stage) for name, stage in zip(("sft", "ppo", "control"), stages, strict=False)},
        "ppo_minus_sft": difference(sft.report, ppo.report),
        "sampled": {
            **{
                n: {"score": r.summary.score, "success": r.summary.success.rate}
                for n, r in zip(("sft", "ppo"), sampled, strict=True)
            },
            "ppo_minus_sft": difference(*sampled),
        },
        **({"ppo_minus_control": difference(others[0].report, ppo.report)} if others else {}),
        "seconds": time.monotonic() - began,
        "threads": torch.get_num_threads(),
        "overrides": list(overrides),
        "shape": shape,
        "commit": git_commit(),
        "torch": torch.__version__,
    }
    (out / f"seed{seed}.json").write_text(json.dumps(row, indent=1) + "\n")
    return row


def played(stage: Stage, file: Path, overrides: Sequence[str]) -> Report:
    """The test goals played at the temperature that PPO trains at."""
    config = Config.load(file, overrides)
    player = Player(config, *load_model(stage.folder / "model"))
    panel = make_panel(player.environment, player.environment.splits[-1])
    report = evaluate(panel, lambda tasks: player.play(tasks, config.rollout.temperature), stage.name)
    report.settings = {"temperature": config.rollout.temperature, **player.environment.settings}
    report.save(stage.folder / "eval_sampled.json")
    return report


def figures(stage: Stage) -> dict[str, float]:
    summary = stage.report.summary
    return {
        "score": summary.score,
        "success": summary.success.rate,
        "steps": summary.mean_steps,
        "valid_action_rate": summary.valid_action_rate,
        "seconds": stage.seconds,
    }


def difference(a: Report, b: Report) -> dict[str, Any]:
    """b - a with intervals, of score and of success."""
    result = compare(a, b)
    score = result.score
    return {
        "score": {"difference": score.difference, "low": score.low, "high": score.high},
        "success": {"difference": result.difference, "low": result.low, "high": result.high},
        "mcnemar_p": result.p_value,
    }


def collect(out: Path) -> dict[str, Any]:
    """The seeds' rows and their means.

    Raises:
        SystemExit: no row there, or rows that were not made in one way.
    """
    rows = sorted((json.loads(file.read_text()) for file in out.glob("seed*.json")), key=lambda row: row["seed"])
    if not rows:
        sys.exit(f"--collect: expected seedN.json in {str(out)!r}, found none")
    for name in ("overrides", "shape", "commit", "torch", "settings"):
        if any(row[name] != rows[0][name] for row in rows):
            sys.exit(f"--collect: expected one {name} for all seeds, got {[row[name] for row in rows]}")

    def mean(parts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
        names = [name for name in ("sft", "ppo", "control") if all(name in part for part in parts)]
        return {
            name: {figure: statistics.fmean(part[name][figure] for part in parts) for figure in ("score", "success")}
            for name in names
        }

    means = {"greedy": mean(rows)}
    if all("sampled" in row for row in rows):
        means["sampled"] = mean([row["sampled"] for row in rows])
    first = rows[0]
    words = ["--seeds", *(str(row["seed"]) for row in rows)]
    other = [f"{name}={size}" for name, size in first["shape"].items() if SHAPE.get(name) != size]
    words += ["--shape", *other] if other else []
    words += ["--", *first["overrides"]] if first["overrides"] else []
    return {
        "command": f"python -m benchmarks.bench_webshop_training {' '.join(words)}",
        **{name: first[name] for name in ("commit", "torch", "tasks", "settings", "threads")},
        "rows": rows,
        "mean": means,
    }


def show(record: dict[str, Any]) -> None:
    for line in training(record)[3:]:
        print(line)


if __name__ == "__main__":
    main()
