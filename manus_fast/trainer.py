"""Policy-gradient training: collect → advantages → update → evaluate → save.

config = Config.load("configs/ppo_household.yaml", ["training.total_steps=20000"])
Trainer(config).run()
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manus_fast.agent.trajectory import Trajectory, build_rows
from manus_fast.checkpoint import Checkpoint, latest, load, save
from manus_fast.config import save_config, to_dict
from manus_fast.envs.base import Environment
from manus_fast.evaluate import Report, evaluate, make_panel
from manus_fast.learn.advantages import Episodes
from manus_fast.learn.backend import make_backend
from manus_fast.learn.correction import warn_of_truncated_sampling
from manus_fast.learn.policy import Policy
from manus_fast.learn.schedules import schedule
from manus_fast.learn.update import PolicyGradientUpdate, check_batch_size, check_group_size
from manus_fast.player import Player
from manus_fast.process import prepare_process
from manus_fast.profile import Phases
from manus_fast.progress import Progress
from manus_fast.rollout.seeds import derive
from manus_fast.run_config import Config
from manus_fast.tracking import Tracking, prepare_folder
from manus_fast.versions import write_versions

__all__ = ["Config", "Trainer"]


@dataclass
class Counters:
    """Where a run stands, in whole iterations: what a checkpoint keeps besides weights."""

    iteration: int = 0
    steps: int = 0
    """Environment steps."""
    episodes: int = 0
    tokens: int = 0
    """Sampled tokens."""
    failed: int = 0
    """Episodes given up because an environment or the engine failed: in no statistic and no loss."""
    seconds: float = 0.0


class Trainer:
    """One run of policy-gradient training, in one process.

    Args:
        config: see run_config.py. The run is written to `config.training.output_dir`.
        model, tokenizer: where they are loaded already; None opens `config.model.path`.
        environment: where it exists already; None makes the one that the config names.

    Raises:
        ValueError: whatever in the config cannot be served, before anything is written or trained.
    """

    def __init__(
        self, config: Config, model: Any = None, tokenizer: Any = None, environment: Environment | None = None
    ):
        prepare_process()
        training = config.training
        check_batch_size(config.ppo.batch_size, training.num_rollouts)
        check_group_size(config.ppo, training.group_size)
        self.config = config
        self.folder = prepare_folder(training.output_dir)
        if model is None:
            model, tokenizer = config.model.open()
        self.player = Player(config, model, tokenizer, environment)
        self.tokenizer = tokenizer
        self.tasks = self.player.environment.tasks(config.environment.split)
        self.panel = make_panel(self.player.environment, config.evaluation.split, config.evaluation.tasks)
        self.policy = Policy(model, config.ppo.critic_kind, config.model.gradient_checkpointing, config.model.compile)
        self.backend = make_backend(self.policy, config.backend, config.ppo.optimizer(), config.model.dtype)
        self.updater = PolicyGradientUpdate(
            self.policy,
            self.backend,
            config.ppo,
            temperature=config.rollout.temperature,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            seed=training.seed,
            correction=config.rollout.correction,
            dump_folder=self.folder / "skipped",
        )
        rollout = config.rollout
        warn_of_truncated_sampling(rollout.correction, rollout.top_p, rollout.top_k, rollout.min_p)
        self.rate = schedule(training.learning_rate, "training.learning_rate")
        self.counters = Counters()
        self.phases = Phases()
        newest = latest(self.folder) if training.resume else None
        if newest is not None:
            self._restore(load(newest))
        self.tracking = Tracking(
            self.folder,
            resume_step=self.counters.steps if newest is not None else None,
            wandb_project="manus_fast" if training.use_wandb else None,
            config=to_dict(config),
        )
        self._started = time.monotonic() - self.counters.seconds
        save_config(config, self.folder / "config.json")
        write_versions(self.folder)

    # The loop

    def run(self) -> Report:
        """Trains to the end and returns the last evaluation; the trained model is in `output_dir`/model."""
        report = None
        with Progress(self.config.algorithm, self.config.training.total_steps) as progress:
            while self.progress < 1.0:
                trajectories = self.collect()
                stats = self.update(trajectories)
                if self._due(self.config.evaluation.freq):
                    report = self.evaluate()
                    stats |= _figures(report)
                self.record(trajectories, stats, progress)
                if self._save_due():
                    self.save()
            if report is None or not self._due(self.config.evaluation.freq):
                report = self.evaluate()
                self.tracking.log(self.counters.steps, _figures(report))
        if self.config.training.save_strategy != "no":
            self.save()
        self.policy.model.save_pretrained(self.folder / "model")
        self.tokenizer.save_pretrained(self.folder / "model")
        report.save(self.folder / "eval.json")
        self.tracking.close()
        return report

    def collect(self) -> list[Trajectory]:
        """Plays one iteration's episodes with the current weights."""
        self._before = self.counters.steps
        training, iteration = self.config.training, self.counters.iteration
        groups = training.num_rollouts // training.group_size
        tasks = [self.tasks[derive(training.seed, iteration, group) % len(self.tasks)] for group in range(groups)]
        with self.phases("rollout"):
            return self.player.collect(tasks, iteration, training.group_size)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Improves the policy on them and hands the new weights to the engine."""
        with self.phases("update"):
            stats = self.updater.run(
                build_rows(trajectories),
                Episodes.of(trajectories),
                iteration=self.counters.iteration,
                progress=self.progress,
                learning_rate=self.rate.at(self.progress),
            )
        with self.phases("load"):
            self.player.load(self.policy.named_weights(), self.counters.iteration + 1)
        counters = self.counters
        counters.iteration += 1
        counters.steps += sum(len(t.turns) for t in trajectories)
        counters.episodes += len(trajectories)
        counters.tokens += sum(t.sampled_tokens for t in trajectories)
        counters.failed += sum(not t.valid for t in trajectories)
        counters.seconds = time.monotonic() - self._started
        return stats

    def evaluate(self) -> Report:
        """Plays the validation panel."""
        temperature = self.config.evaluation.temperature
        with self.phases("evaluate"):
            report = evaluate(self.panel, lambda tasks: self.player.play(tasks, temperature), str(self.folder))
        report.settings = {"temperature": temperature, "step": self.counters.steps}
        return report

    def record(self, trajectories: Sequence[Trajectory], stats: dict[str, float], progress: Progress) -> None:
        """Metrics, sample trajectories, and the line that a person sees."""
        training, counters = self.config.training, self.counters
        numbers = {**summarise(trajectories), **self.player.stats.metrics(), **stats, **self.phases.take()}
        numbers["train/failed_total"] = counters.failed
        numbers["train/iteration"] = counters.iteration
        if counters.iteration % training.logging_steps == 0:
            self.tracking.log(counters.steps, numbers)
        with (self.folder / "trajectories.jsonl").open("a") as file:
            for trajectory in trajectories[: training.save_trajectories]:
                file.write(json.dumps({"iteration": counters.iteration, **trajectory.to_json()}) + "\n")
        shown = {name: numbers[f"train/{name}"] for name in ("reward", "success") if f"train/{name}" in numbers}
        if "eval/success" in stats:
            shown["eval_success_rate"] = stats["eval/success"]
        done = int(self.progress * training.total_steps) if training.max_seconds else counters.steps
        progress.update(done, **shown, tokens_per_second=self.player.stats.tokens_per_second)

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1]."""
        training = self.config.training
        shares = [self.counters.steps / training.total_steps]
        if training.max_seconds is not None:
            shares.append(self.counters.seconds / training.max_seconds)
        return min(1.0, max(shares))

    # State

    def save(self) -> None:
        """Writes a checkpoint from which a run goes on exactly."""
        with self.phases("save"):
            save(
                self.folder,
                self.counters.steps,
                scalars={"counters": vars(self.counters), "updater": self.updater.state_dict()},
                tensors={"optimizer": self.backend.tensors()},
                model=self.policy.model,
                tokenizer=self.tokenizer,
                keep=self.config.training.keep_checkpoints,
            )

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.backend.load(checkpoint.tensors("optimizer"))
        self.updater.load_state_dict(checkpoint.scalars["updater"])
        self.counters = Counters(**checkpoint.scalars["counters"])
        self.player.load(self.policy.named_weights(), self.counters.iteration)

    def _due(self, freq: int | None) -> bool:
        """Whether the latest iteration passed a multiple of `freq` environment steps."""
        return freq is not None and self.counters.steps // freq > self._before // freq

    def _save_due(self) -> bool:
        training = self.config.training
        if training.save_strategy == "epoch":
            return True
        return training.save_strategy == "steps" and self._due(training.save_freq)


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a collection looks like; failed episodes are counted and in no mean."""
    valid = [t for t in trajectories if t.valid]
    numbers: dict[str, float] = {"train/episodes": len(trajectories), "train/failed": len(trajectories) - len(valid)}
    if not valid:
        return numbers
    turns = [turn for t in valid for turn in t.turns]
    numbers |= {
        "train/reward": float(np.mean([t.reward for t in valid])),
        "train/reward_std": float(np.std([t.reward for t in valid])),
        "train/success": float(np.mean([t.success for t in valid])),
        "train/turns": float(np.mean([len(t.turns) for t in valid])),
        "train/tokens": float(np.mean([t.sampled_tokens for t in valid])),
        "train/truncated_rate": float(np.mean([t.truncated for t in valid])),
        "train/valid_action_rate": float(np.mean([turn.admissible for turn in turns])),
        "train/format_rate": float(np.mean([turn.format_ok for turn in turns])),
    }
    names = sorted({name for t in valid for name in t.reward_parts})
    for name in names:
        numbers[f"reward/{name}"] = float(np.mean([t.reward_parts.get(name, 0.0) for t in valid]))
    return numbers


def _figures(report: Report) -> dict[str, float]:
    summary = report.summary
    return {
        "eval/success": summary.success.rate,
        "eval/steps": summary.mean_steps,
        "eval/valid_action_rate": summary.valid_action_rate,
        "eval/format_rate": summary.format_rate,
        **{f"eval_success/{kind}": rate.rate for kind, rate in summary.per_type.items()},
    }
