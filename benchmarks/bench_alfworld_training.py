"""A language model learns ALFWorld in one process: imitation, then reinforcement, measured before, between and after.

    python -m benchmarks.bench_alfworld_training --data GAMES --out runs/alfworld_h200 --algorithms gigpo --until 540
    python -m benchmarks.bench_alfworld_training … --algorithms ppo grpo --until 540
    python -m benchmarks.bench_alfworld_training … --variants ours lockstep reference textworld --seconds 90
    python -m benchmarks.bench_alfworld_training … --retry slow training.learning_rate.start=1e-5 --retry short …

The runs are those of `manus-fast sft`, `ppo` and `eval` (`FineTune`, `Trainer`, `Player`) on one config; one engine
serves them all. Parts, each written to OUT/alfworld_training.json once it is over:

    before, sft     the whole unseen panel: the model as it came, and after imitating the expert's episodes
    ALGORITHM-…     RL from the SFT policy for `--seconds`, or for an equal share of what `--until` leaves:
      ours          as the config says
      ahead         with rollout.staleness=1: empty slots begin episodes of the next iteration
      lockstep      with a barrier each turn: worlds step when all replies of a turn are there
      reference     with MANUS_FAST_BACKEND=reference
      textworld     with worlds that answer as late as TextWorld's workers (benchmarks/slow_worlds.py)
      NAME          with the settings of a `--retry NAME KEY=VALUE …`, which may be given several times

Each RL part has its curve (by seconds, environment steps and sampled tokens), its time by phase, and the panel after.
The panel is played greedily (`panel`) and at the training temperature (`sampled`). Shares are of the training time
without evaluations. generation: inside the engine; environment: inside the worlds; log_prob: scoring the collection;
update: gradients and steps; hand_over: new weights to the engine; other: the rest, as tokenising, rewards and records.
host_share is environment and other together, in which the engine may compute a step that it has under way. idle_share
is the part of the time in which it has no request, and no update and no hand-over is under way either.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.alfworld_tables import REACHED, VARIANTS, WINDOW
from benchmarks.arguments import Parser
from benchmarks.replay_alfworld import write_played
from benchmarks.rollout_setting import Lockstep
from benchmarks.slow_worlds import Delay, over_slow_worlds
from manus_fast.agent.trajectory import Trajectory
from manus_fast.commands.common import find_config, prepare
from manus_fast.config import to_dict
from manus_fast.envs.base import Task
from manus_fast.evaluate import Report, evaluate, make_panel
from manus_fast.finetune import FineTune
from manus_fast.ops import dispatch
from manus_fast.player import Player
from manus_fast.rollout.scheduler import Rollout
from manus_fast.run_config import Config
from manus_fast.search_trainer import make_trainer
from manus_fast.tracking import METRICS_FILE, read_metrics
from manus_fast.versions import git_commit, versions

FILE = "alfworld_training.json"
CURVE = {
    "train/success": "success",
    "train/reward": "reward",
    "train/turns": "turns",
    "train/valid_action_rate": "valid_actions",
    "train/truncated_rate": "truncated",
    "train/repeat_rate": "repeats",
    "eval/success": "panel",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clip_fraction",
    "policy/approx_kl_k3": "kl",
    "filter/zero_variance_share": "zero_variance",
    "correction/gap_mean": "gap_mean",
    "update/grad_norm": "grad_norm",
}
"""Metric → its name in a curve."""


class Run(NamedTuple):
    """One part of RL."""

    algorithm: str
    variant: str
    """One of VARIANTS, or the name of a retry."""
    overrides: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.variant}"


class Bench:
    """The parts of one run; see the module's docstring."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.out = Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self.runs = runs_of(arguments)
        what = list(arguments.algorithms)
        what += [] if arguments.variants == ["ours"] else ["--variants", *arguments.variants]
        what += [word for retry in arguments.retry for word in ("--retry", *retry)]
        self.record: dict[str, Any] = {
            "schema": 1,
            "command": f"python -m benchmarks.bench_alfworld_training --algorithms {' '.join(what)}",
            "commit": git_commit(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": {name: version for name, version in versions().items() if version is not None},
            "note": arguments.note,
            "parts": {},
        }

    @property
    def seconds(self) -> float:
        """Since the start of the process's work."""
        return time.monotonic() - self.began

    def config(self, part: str, algorithm: str, *more: str) -> Config:
        """The config of one part, whose run is written to OUT/`part`."""
        given = self.arguments
        own = [f"algorithm={algorithm}", f"training.output_dir={self.out / part}"]
        own += [f"environment.options.data_path={given.data}"] if given.data else []
        own += [f"model.path={given.model}"] if given.model else []
        return Config.load(find_config(given.config, given.config), [*own, *given.overrides, *more])

    def say(self, line: str) -> None:
        print(f"[{self.seconds:6.1f} s] {line}", flush=True)

    def save(self, name: str, part: Mapping[str, Any]) -> None:
        """Keeps what a part found: a run that is cut later has told so far."""
        self.record["parts"][name] = dict(part)
        self.record["seconds"] = self.seconds
        partial = self.out / f".{FILE}"
        partial.write_text(json.dumps(self.record, indent=1) + "\n")
        partial.replace(self.out / FILE)

    def measure(self, player: Player, name: str) -> dict[str, Any]:
        """Plays the unseen panel with the policy as it is, greedily and at the temperature of training."""
        found = {}
        for kind, temperature in (("panel", 0.0), ("sampled", player.config.rollout.temperature)):
            began = time.monotonic()
            panel = make_panel(player.environment, self.arguments.panel, self.arguments.tasks)
            file = f"{name}.json" if kind == "panel" else f"{name}_sampled.json"

            def play(tasks: Sequence[Task], temperature: float = temperature, file: str = file) -> list[Trajectory]:
                episodes = player.play(tasks, temperature)
                write_played(self.out / f"played_{file}l", episodes)
                return episodes

            report = evaluate(panel, play, name)
            report.save(self.out / f"eval_{file}")
            self.panel_seconds = time.monotonic() - began
            found[kind] = panel_figures(report, self.panel_seconds)
            solved = f"{100 * found[kind]['success']:.1f} % of {found[kind]['tasks']}"
            self.say(f"{name}: {solved} at temperature {temperature:g} in {self.panel_seconds:.1f} s")
        return found

    def run(self) -> None:
        config = self.config("sft", self.runs[0].algorithm)
        fine = FineTune(config)
        self.record["parameters"] = fine.policy.model.num_parameters()
        self.record["config"] = told(config)
        environment, engine = fine.player.environment, fine.player.engine
        self.say(f"model and engine ({type(engine).__name__}) are there")
        self.save("start", {"seconds": self.seconds, "engine": type(engine).__name__})
        self.save("before", self.measure(fine.player, "before"))
        began = time.monotonic()
        tuned = fine.run()
        seconds = time.monotonic() - began
        result = tuned.result
        self.say(f"sft: {result.steps} steps, ended by {result.stopped}; checks {result.history}")
        found = {"seconds": seconds, "steps": result.steps, "stopped": result.stopped, "rows": result.items}
        found |= {"checks": [list(check) for check in result.history], "step": result.best_step, **memory()}
        found |= sft_figures(self.out / "sft" / METRICS_FILE)
        self.save("sft", {**found, **self.measure(fine.player, "sft")})
        start = self.out / "sft" / "model"
        del fine, tuned
        for number, run in enumerate(self.runs):
            free()
            limit = self.left(len(self.runs) - number)
            self.save(run.name, self.reinforce(run, start, limit, environment, engine))

    def left(self, parts: int) -> float:
        """Seconds of training that the next of `parts` parts has."""
        if self.arguments.until is None:
            return self.arguments.seconds
        # Opening the trainer and saving the model take seconds, and three panels come after the time.
        rest = (self.arguments.until - self.seconds) / parts - 3 * self.panel_seconds - 6
        return max(1.0, min(rest, self.arguments.seconds))

    def reinforce(self, run: Run, start: Path, limit: float, environment: Any, engine: Any) -> dict[str, Any]:
        """RL from the model folder `start` for `limit` seconds."""
        own = [f"model.path={start}", f"training.max_seconds={limit}", *run.overrides]
        config = self.config(run.name, run.algorithm, *own)
        self.say(f"{run.name}: for {limit:.0f} s")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        delay = Delay.measured() if run.variant == "textworld" else None
        with dispatch.forced("reference") if run.variant == "reference" else contextlib.nullcontext():
            trainer = make_trainer(config, environment=environment, engine=engine)
            if run.variant == "lockstep":
                trainer.player.rollout_kind = Lockstep
            if delay is not None:
                trainer.player.rollout_kind = over_slow_worlds(delay)
            trainer.run()
            found = run_figures(self.out / run.name / METRICS_FILE, trainer.counters.seconds)
            found |= {"algorithm": run.algorithm, "variant": run.variant, "overrides": list(run.overrides)}
            found |= {"backend": dispatch.requested(), **memory()}
            if delay is not None:
                found["delay"] = dict(vars(delay))
        self.save(run.name, found)  # the panel is yet to come
        trainer.player.rollout_kind = Rollout
        return found | self.measure(trainer.player, run.name)


def runs_of(arguments: argparse.Namespace) -> list[Run]:
    """The parts of RL in their order: each algorithm in each variant, then the retries with the first algorithm.

    Raises:
        ValueError: a retry without a name of its own or without a setting, or no part at all.
    """
    ahead = {"ahead": ["rollout.staleness=1"]}
    runs = [Run(a, v, ahead.get(v, ())) for a in arguments.algorithms for v in arguments.variants]
    for name, *overrides in arguments.retry:
        if not overrides or "=" in name or Run(arguments.algorithms[0], name).name in {run.name for run in runs}:
            raise ValueError(f"--retry: expected a new name, then KEY=VALUE, got {' '.join([name, *overrides])}")
        runs.append(Run(arguments.algorithms[0], name, overrides))
    if not runs:
        raise ValueError("--variants: expected a variant or a --retry, got neither")
    return runs


def told(config: Config) -> dict[str, Any]:
    """A config without the places of one machine."""
    values = to_dict(config)
    del values["model"]["path"], values["training"]["output_dir"]
    values["environment"]["options"].pop("data_path", None)
    return values


def panel_figures(report: Report, seconds: float) -> dict[str, Any]:
    """A report in short."""
    s = report.summary
    return {
        "split": report.split,
        "tasks": s.tasks,
        "failed": s.failed,
        "success": s.success.rate,
        "low": s.success.low,
        "high": s.success.high,
        "types": {kind: rate.rate for kind, rate in s.per_type.items()},
        "steps": s.mean_steps,
        "valid_actions": s.valid_action_rate,
        "seconds": seconds,
        "tokens": s.tokens,
    }


def sft_figures(path: Path) -> dict[str, Any]:
    """Tokens and training seconds of an SFT run, without its checks."""
    rows = [row for row in read_metrics(path) if "sft/tokens" in row]
    tokens, seconds = sum(row["sft/tokens"] for row in rows), rows[-1]["sft/seconds"]
    loss = [row["sft/loss"] for row in rows]
    return {"tokens": tokens, "training_seconds": seconds, "tokens_per_s": tokens / seconds, "loss": loss}


def run_figures(path: Path, seconds: float) -> dict[str, Any]:
    """Curve, shares of time and rates of an RL run from its records.

    Args:
        path: metrics.jsonl.
        seconds: the trainer's own count at the end of the last iteration: without the evaluation after it.
    """
    rows = [row for row in read_metrics(path) if "train/iteration" in row]
    curve, tokens = [], 0.0
    for row in rows:
        tokens += row["rollout/sampled_tokens"]
        point = {"seconds": row["time"], "steps": row["step"], "tokens": tokens}
        curve.append(point | {name: row[key] for key, name in CURVE.items() if row.get(key) is not None})

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows)

    spent = seconds - sum(row.get("time/evaluate") or 0.0 for row in rows[:-1])
    took = {
        "generation": total("rollout/engine_seconds"),
        "environment": total("rollout/env_seconds"),
        "log_prob": total("update/score_seconds"),
        "update": total("time/update") - total("update/score_seconds"),
        "hand_over": total("time/load"),
    }
    took["other"] = spent - sum(took.values())
    idle = total("rollout/idle_seconds") + spent - total("rollout/seconds") - total("time/update") - took["hand_over"]
    episodes = total("rollout/episodes")
    return {
        "iterations": len(rows),
        "episodes": episodes,
        "steps": rows[-1]["step"],
        "tokens": tokens,
        "seconds": spent,
        "shares": {name: value / spent for name, value in took.items()},
        "host_share": (took["environment"] + took["other"]) / spent,
        "idle_share": idle / spent,
        "trajectories_per_hour": 3600 * episodes / spent,
        "sampled_tokens_per_s": tokens / took["generation"],
        "rollout_tokens_per_s": tokens / total("rollout/seconds"),
        "update_tokens_per_s": total("update/tokens") / total("time/update"),
        "hand_over_ms": 1e3 * took["hand_over"] / len(rows),
        "seconds_to": {str(REACHED): reached(curve, REACHED)},
        "curve": curve,
    }


def reached(curve: Sequence[Mapping[str, float]], success: float) -> float | None:
    """Seconds after which the training episodes of WINDOW iterations in a row had this mean success."""
    for end in range(WINDOW, len(curve) + 1):
        if sum(point["success"] for point in curve[end - WINDOW : end]) >= WINDOW * success:
            return curve[end - 1]["seconds"]
    return None


def memory() -> dict[str, float]:
    """MiB: the largest that torch held for tensors (vLLM's among them), and what the device has in use now."""
    if not torch.cuda.is_available():
        return {}
    free_bytes, all_bytes = torch.cuda.mem_get_info()
    return {"peak_mib": torch.cuda.max_memory_allocated() / 2**20, "used_mib": (all_bytes - free_bytes) / 2**20}


def free() -> None:
    """Drops what the part before held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = Parser("alfworld_training", __doc__)
    parser.add_argument("--config", default="alfworld_h200", help="a YAML file, or the name of a shipped one")
    parser.add_argument("--data", help="folder of the games; default: as the environment finds them")
    parser.add_argument("--model", help="where it begins: model.path")
    parser.add_argument("--out", required=True, help="folder of the runs and of the results")
    parser.add_argument("--algorithms", nargs="+", default=["gigpo"], help="ppo, grpo, gigpo or other presets")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=["ours"])
    parser.add_argument(
        "--retry", nargs="+", action="append", default=[], metavar="NAME KEY=VALUE", help="a part with other settings"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of RL, a variant")
    parser.add_argument("--until", type=float, help="seconds after the start at which all is to be over")
    parser.add_argument("--panel", default="valid_unseen", help="the split that is played whole")
    parser.add_argument("--tasks", type=int, help="so many of it, spread; default: all")
    parser.add_argument("--note", default="", help="a sentence that goes with the results")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the config")
    arguments = parser.parse_args(argv)
    prepare()
    bench = Bench(arguments)
    bench.run()
    bench.say("done")
    return bench.record


if __name__ == "__main__":
    main()
