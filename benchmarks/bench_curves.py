"""Learning curves on the household demo: PPO, GRPO and GiGPO from the same imitating policy, over several seeds.

    python -m benchmarks.bench_curves --seeds 0 1 2 --seconds 200 --json curves.json --plot curves.svg
    python -m benchmarks.bench_curves --from curves.json --plot docs/curves.svg    # of runs made elsewhere

Every seed imitates the demo's expert once (`--sft_seconds` of it; `--start FOLDER` takes FOLDER/seed<n>/sft/model), and
each algorithm goes on from there for `--seconds`, with the demo's settings and 64 episodes an iteration: 64 tasks for
PPO, 8 tasks of 8 episodes for the groups. `--set ALGORITHM KEY=VALUE …` gives one of them settings of its own. A curve
is success on the validation panel (greedy), checked every `--freq` environment steps, and success of the training
episodes (sampled). Afterwards each policy plays all of valid_unseen. With `--jobs 6 --cores 0 1 … 11` six runs go side
by side, each on two cores. `--json` is written again after every run, so that an interrupted command leaves those that
were over.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, output_file
from benchmarks.seeds import add_arguments, over_seeds, side_by_side
from manus_fast.commands.common import find_config, prepare
from manus_fast.demo import make_small_policy, measured
from manus_fast.files import write_text
from manus_fast.finetune import FineTune
from manus_fast.player import make_environment
from manus_fast.run_config import Config
from manus_fast.tracking import METRICS_FILE, read_metrics
from manus_fast.trainer import Trainer
from manus_fast.versions import git_commit

ALGORITHMS = ("ppo", "grpo", "gigpo")
COLOURS = {"ppo": "#3b6fb6", "grpo": "#c8553d", "gigpo": "#4c956c"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("curves", __doc__)
    add_arguments(parser)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--seconds", type=float, default=200.0, help="of training, a run")
    parser.add_argument("--sft_seconds", type=float, default=150.0, help="of imitation, a seed")
    parser.add_argument("--freq", type=int, default=4000, help="environment steps between checks")
    parser.add_argument("--output_dir", default="runs/bench_curves", help="one folder a seed is made in it")
    parser.add_argument("--start", default=None, help="a folder with imitating policies, seed<n>/sft/model")
    parser.add_argument("--json", type=output_file, default=None, help="where the curves go")
    parser.add_argument("--plot", type=output_file, default=None, help="where a picture of them goes, .svg or .png")
    parser.add_argument("--from", nargs="+", dest="made", metavar="FILE", help="run nothing: the curves of these files")
    parser.add_argument(
        "--set", nargs="+", action="append", default=[], metavar="ALGORITHM KEY=VALUE", help="settings of one algorithm"
    )
    parser.add_argument("overrides", nargs="*", default=[], help="of the config, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    for name, *settings in arguments.set:
        if name not in arguments.algorithms or not settings:
            parser.error(f"--set: expected one of {', '.join(arguments.algorithms)}, then KEY=VALUE, got {name}")
    if arguments.made:
        record = joined([json.loads(Path(file).read_text()) for file in arguments.made])
        _write(record, arguments.json)
    else:
        cores = arguments.cores or os.sched_getaffinity(0)
        record = {
            "command": "python -m benchmarks.bench_curves " + " ".join(_command(arguments)),
            "commit": git_commit(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "jobs": arguments.jobs,
            "cores": len(cores) // arguments.jobs,
            "runs": [],
        }
        for row in measure(arguments):
            record["runs"] = sorted([*record["runs"], row], key=lambda run: (run["seed"], run["algorithm"]))
            _write(record, arguments.json)
    if arguments.plot:
        plot(record, Path(arguments.plot))
    print("\nsuccess on valid_unseen, per cent, mean over seeds")
    for name, rate in record["mean_unseen"].items():
        print(f"{name:>8} {100 * rate:6.1f}")


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a run, as soon as it is there: each seed's imitating policy ("sft") and each algorithm from it."""
    if arguments.start is None:
        list(over_seeds(partial(imitate, arguments), arguments))
    items = [(seed, name) for name in (*arguments.algorithms, "sft") for seed in arguments.seeds]
    for row in side_by_side(partial(one_run, arguments), items, arguments, ordered=False):
        print(json.dumps({name: row[name] for name in row if name not in ("train", "panel", "solved")}), flush=True)
        yield row


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of runs that were made in parts.

    Raises:
        SystemExit: parts of several commits, machines or settings, or a run that is in two of them.
    """
    same = ("commit", "torch", "cpus", "cores")
    if any(record[name] != records[0][name] for record in records for name in same):
        raise SystemExit(f"--from: expected files of one {', '.join(same)}, got several")
    runs: dict[tuple[int, str], dict[str, Any]] = {}
    for run in (run for record in records for run in record["runs"]):
        key = (run["seed"], run["algorithm"])
        if runs.setdefault(key, run) != run:
            raise SystemExit(f"--from: expected each run once, got two of {key[1]} with seed {key[0]}")
    commands = list(dict.fromkeys(record["command"] for record in records))
    return {**records[0], "command": "; ".join(commands), "runs": [runs[key] for key in sorted(runs)]}


def mean_unseen(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Algorithm → success on valid_unseen, mean over the seeds; "sft", where all of them begin, comes first."""
    names = dict.fromkeys(["sft", *ALGORITHMS, *(run["algorithm"] for run in runs)])
    found = {name: [run["unseen"] for run in runs if run["algorithm"] == name] for name in names}
    return {name: statistics.mean(rates) for name, rates in found.items() if rates}


def _config(arguments: argparse.Namespace, seed: int, name: str, model: Path, *more: str) -> Config:
    out = Path(arguments.output_dir) / f"seed{seed}" / name
    own = (f"training.seed={seed}", f"training.output_dir={out}", f"model.path={model}")
    return Config.load(find_config(None, "demo_household"), (*own, *arguments.overrides, *more))


def imitate(arguments: argparse.Namespace, seed: int) -> None:
    """The policy that a seed's runs begin with."""
    prepare()
    root = Path(arguments.output_dir) / f"seed{seed}"
    shutil.rmtree(root, ignore_errors=True)
    config = _config(arguments, seed, "sft", root / "untrained", f"sft.time_limit={arguments.sft_seconds}")
    environment = make_environment(config)
    make_small_policy(config, environment, root / "untrained", seed)
    FineTune(config, environment=environment).run()


def one_run(arguments: argparse.Namespace, item: tuple[int, str]) -> dict[str, Any]:
    """The row of a seed and an algorithm, or of the seed's imitating policy as it is ("sft")."""
    prepare()
    seed, name = item
    folder = Path(arguments.start or arguments.output_dir) / f"seed{seed}" / "sft" / "model"
    if name == "sft":
        config = _config(arguments, seed, name, folder)
        return {"algorithm": name, "seed": seed, **_unseen(config, folder, make_environment(config))}
    more = [f"algorithm={name}", f"training.max_seconds={arguments.seconds}", f"evaluation.freq={arguments.freq}"]
    more += [setting for algorithm, *settings in arguments.set if algorithm == name for setting in settings]
    config = _config(arguments, seed, name, folder, *more)
    environment, out = make_environment(config), Path(config.training.output_dir)
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    trainer = Trainer(config, environment=environment)
    first = trainer.evaluate().summary.success.rate
    trainer.run()
    records = read_metrics(out / METRICS_FILE)
    return {
        "algorithm": name,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "steps": trainer.counters.steps,
        **_unseen(config, out / "model", environment),
        "train": [[r["step"], round(r["train/success"], 4)] for r in records if "train/success" in r],
        "panel": [[0, first], *([r["step"], r["eval/success"]] for r in records if "eval/success" in r)],
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Success on the panel over environment steps: each seed thin, their mean thick where all of them have got to."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name in (name for name in record["mean_unseen"] if name != "sft"):
        curves = [np.asarray(r["panel"]) for r in record["runs"] if r["algorithm"] == name]
        colour = COLOURS.get(name)
        for curve in curves:
            axes.plot(curve[:, 0], 100 * curve[:, 1], color=colour, alpha=0.35, linewidth=1)
        shared = np.linspace(0, min(curve[-1, 0] for curve in curves), 60)
        mean = np.mean([np.interp(shared, curve[:, 0], 100 * curve[:, 1]) for curve in curves], axis=0)
        axes.plot(shared, mean, color=colour, linewidth=2.4, label=name)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("environment steps after imitation")
    axes.set_ylabel("success on valid_seen, per cent")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _unseen(config: Config, model: Path, environment: Any) -> dict[str, Any]:
    """Success on valid_unseen, and task by task: 1 solved, 0 not, - failed (by no fault of the policy's)."""
    report = measured(config, model, environment)
    marks = ("-" if task.error is not None else str(int(task.success)) for task in report.tasks)
    return {"unseen": report.summary.success.rate, "solved": "".join(marks)}


def _write(record: dict[str, Any], target: str | None) -> None:
    """Brings the means up to date, and the file: an old one stays whole until the new one is."""
    record["mean_unseen"] = mean_unseen(record["runs"])
    if target:
        write_text(Path(target), json.dumps(record, indent=1) + "\n")


def _command(arguments: argparse.Namespace) -> list[str]:
    words = ["--seeds", *map(str, arguments.seeds), "--algorithms", *arguments.algorithms]
    words += ["--start", "FOLDER"] if arguments.start else ["--sft_seconds", f"{arguments.sft_seconds:g}"]
    for name in ("seconds", "freq"):
        words += [f"--{name}", f"{getattr(arguments, name):g}"]
    words += arguments.overrides
    for settings in arguments.set:
        words += ["--set", *settings]
    return words


if __name__ == "__main__":
    main()
