"""Policy-gradient training: collect → advantages → update → evaluate → save.

config = Config.load("configs/ppo_household.yaml", ["training.total_steps=20000"])
Trainer(config).run()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manus_fast.agent.trajectory import Trajectory, build_rows
from manus_fast.checkpoint import Checkpoint, load, save, save_model
from manus_fast.config import save_config, to_dict
from manus_fast.data.preferences import check_tokenizer
from manus_fast.envs.base import Environment, Task
from manus_fast.evaluate import Report, evaluate, make_panel
from manus_fast.learn.advantages import Episodes
from manus_fast.learn.backend import DTYPES, make_backend, playing_model
from manus_fast.learn.correction import warn_of_truncated_sampling
from manus_fast.learn.curriculum import Curriculum
from manus_fast.learn.filters import EmptySteps, Selection
from manus_fast.learn.policy import Policy, Reference
from manus_fast.learn.schedules import schedule
from manus_fast.learn.update import PolicyGradientUpdate, check_batch_size, check_group_size
from manus_fast.player import Player, make_environment
from manus_fast.process import prepare_process
from manus_fast.profile import Phases
from manus_fast.progress import Progress
from manus_fast.ranks import connect
from manus_fast.rewards.episode import EpisodeRewards, Scorer
from manus_fast.rewards.model import RewardModel
from manus_fast.rollout.engine import Engine
from manus_fast.rollout.scheduler import RolloutStats
from manus_fast.rollout.seeds import derive
from manus_fast.rollout.summary import summarise
from manus_fast.run_config import Config
from manus_fast.run_folder import open_run
from manus_fast.tracking import Tracking
from manus_fast.versions import write_versions

__all__ = ["Config", "Trainer"]

log = logging.getLogger("manus_fast.trainer")


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
    """One run of policy-gradient training, in one process or on every rank that a launcher started.

    Args:
        config: see run_config.py. The run is written to `config.training.output_dir`.
        model, tokenizer: where they are loaded already; None opens `config.model.path`.
        environment: where it exists already; None makes the one that the config names.
        reward_model: rows → scores, for the part `reward_model` of `config.rewards`; None opens
            `config.reward_model.path` where that part is asked for.
        engine: what an earlier run of this process sampled with (see `Player`); None opens one.

    Raises:
        ValueError: whatever in the config cannot be served, before anything is written or trained.
    """

    collects = "play"
    """The value of `training.collect` that this trainer serves."""

    def __init__(
        self,
        config: Config,
        model: Any = None,
        tokenizer: Any = None,
        environment: Environment | None = None,
        reward_model: Scorer | None = None,
        engine: Engine | None = None,
    ):
        prepare_process()
        training = config.training
        check_batch_size(config.ppo.batch_size, training.num_rollouts)
        check_group_size(config.ppo, training.group_size)
        if training.collect != self.collects:
            raise ValueError(
                f"training.collect: expected {self.collects} for {type(self).__name__}, got {training.collect!r} "
                "(search_trainer.make_trainer chooses)"
            )
        _check_staleness(config, self.collects)
        self.config = config
        self.ranks = connect()
        longest = config.rollout.max_traj_tokens
        overlong = (longest, config.ppo.overlong_buffer * longest, config.ppo.overlong_penalty)
        judge = None
        if reward_model is None and "reward_model" in config.rewards and config.reward_model.path is not None:
            judge = RewardModel.load(config.reward_model.path, config.model.place())
            reward_model = judge.scorer("outcome", probability=config.reward_model.pays == "probability")
        self.rewards = EpisodeRewards(config.rewards, reward_model, overlong)
        self.opened = open_run(training.output_dir, training.resume, self.ranks)
        self.folder = self.opened.path
        if self.opened.newest is not None:
            _check_same(config, self.folder / "config.json")
        if model is None:
            model, tokenizer = config.model.open()
        if judge is not None:
            check_tokenizer(judge.tokenizer, tokenizer)
        self.playing = playing_model(model, config.backend, config.model.dtype, self.ranks)
        self.player = Player(config, self.playing, tokenizer, environment, self.ranks, engine)
        self.tokenizer = tokenizer
        self.curriculum = Curriculum(config.curriculum)
        self._stages = [make_environment(config, s.options, s.max_steps) for s in self.curriculum.stages]
        self._enter_stage()
        self.panel = make_panel(self.player.environment, config.evaluation.split, config.evaluation.tasks)
        trained = config.model.adapted(model, training.seed)
        self.policy = Policy(trained, config.ppo.critic_kind, config.model.gradient_checkpointing, config.model.compile)
        reference = None
        if config.ppo.needs_reference and self.playing is not model:  # while the policy is whole
            reference = Reference(self.policy, DTYPES[config.model.dtype])
        self.backend = make_backend(self.policy, config.backend, config.ppo.optimizer(), config.model.dtype, self.ranks)
        self.updater = PolicyGradientUpdate(
            self.policy,
            self.backend,
            config.ppo,
            temperature=config.rollout.temperature,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            seed=training.seed,
            correction=config.rollout.correction,
            reference=reference,
            dump_folder=self.folder / "skipped",
        )
        self._looked_at_ratio = False
        self.rate = schedule(training.learning_rate, "training.learning_rate")
        self.counters = Counters()
        self.empty = EmptySteps(config.ppo.max_empty_steps)
        self.phases = Phases()
        resumed = self.opened.newest is not None
        if self.opened.newest is not None:
            self._restore(load(self.opened.newest, verify=False))
        self._started = time.monotonic() - self.counters.seconds
        self.tracking: Tracking | None = None
        if self.ranks.first:
            self.tracking = Tracking(
                self.folder,
                resume_step=self.counters.steps if resumed else None,
                samples_until=self.counters.iteration,
                wandb_project="manus_fast" if training.use_wandb else None,
                config=to_dict(config),
            )
            save_config(config, self.folder / "config.json")
            write_versions(self.folder)

    # The loop

    def run(self) -> Report:
        """Trains to the end and returns the last evaluation; the trained model is in `output_dir`/model."""
        with self.opened, self.tracking or nullcontext():
            return self._run()

    def _run(self) -> Report:
        report = None
        training = self.config.training
        limits = {"max_seconds": training.max_seconds, "seconds": self.counters.seconds}
        silent = not self.ranks.first
        try:
            with Progress(self.config.algorithm, training.total_steps, silent=silent, **limits) as progress:
                while not self.done:
                    played = self.collect()
                    stats = self.update(played)
                    if self._due(self.config.evaluation.freq):
                        report = self.evaluate()
                        stats |= _figures(report)
                    self.record(played, stats, progress)
                    if self._save_due():
                        self.save()
                self.player.stop()
                if report is None or not self._due(self.config.evaluation.freq):
                    report = self.evaluate()
                    if self.tracking is not None:
                        self.tracking.log(self.counters.steps, _figures(report))
        finally:
            self.player.stop()
        if self.config.training.save_strategy != "no":
            self.save()
        whole = self.policy.saved_as(self.playing, self.config.model.exports_adapter)
        if self.tracking is not None:
            save_model(self.folder / "model", whole, self.tokenizer)
            report.save(self.folder / "eval.json")
        self.ranks.wait()
        return report

    def collect(self) -> Selection:
        """Plays one iteration's episodes with the current weights, and judges them; where the algorithm asks for it,
        goes on until enough groups have something to teach."""
        self._before = self.counters.steps
        training, iteration = self.config.training, self.counters.iteration
        groups = training.num_rollouts // training.group_size
        played, stats = Selection(self.config.ppo, groups), RolloutStats()
        while played.wants_more:
            first = played.batches * groups
            played.add(self.play(self._tasks(iteration, first, groups), first))
            stats += self.player.stats
        self.player.stats = stats
        return played

    def _tasks(self, iteration: int, first: int, groups: int) -> list[Task]:
        """What an iteration plays, a task for each group from number `first` on."""
        seed, count = self.config.training.seed, len(self.tasks)
        return [self.tasks[derive(seed, iteration, n) % count] for n in range(first, first + groups)]

    def play(self, tasks: Sequence[Task], first: int) -> list[Trajectory]:
        """Judged episodes of each task, a group a task, numbered from `first`."""
        training, iteration = self.config.training, self.counters.iteration
        groups = training.num_rollouts // training.group_size
        ahead = [self._tasks(iteration + n, 0, groups) for n in range(1, self.config.rollout.staleness + 1)]
        with self.phases("rollout"):
            episodes = self.player.collect(tasks, iteration, training.group_size, first, self.environment, ahead)
        with self.phases("reward"):
            self._judge(episodes)
        return episodes

    def _judge(self, episodes: list[Trajectory]) -> None:
        """Adds the rewards of whole episodes. Each rank judges its share, so that all learn from one answer."""
        mine = self.ranks.share(len(episodes))
        self.rewards(episodes[mine.start : mine.stop])
        if self.ranks.size == 1:
            return
        given = [(e.error, [(turn.reward, turn.reward_parts) for turn in e.turns]) for e in episodes]
        for episode, (error, rewards) in zip(episodes, self.ranks.gather([given[n] for n in mine]), strict=True):
            episode.error = error
            for turn, (reward, parts) in zip(episode.turns, rewards, strict=True):
                turn.reward, turn.reward_parts = reward, parts

    def update(self, played: Selection) -> dict[str, float]:
        """Improves the policy on them and hands the new weights to the engine."""
        trajectories, kept = played.trajectories, played.kept
        self.empty.check(played)
        self.player.rest()
        with self.phases("update"):
            stats = self.updater.run(
                [row for row in build_rows(trajectories) if kept[row.episode]],
                Episodes.of(trajectories),
                iteration=self.counters.iteration,
                progress=self.progress,
                learning_rate=self.rate.at(self.progress),
                planned=self.config.training.num_rollouts,
            )
        self._look_at_ratio(stats)
        with self.phases("load"):
            self.player.load(self.policy.weights_for(self.player.engine), self.counters.iteration + 1)
        counters = self.counters
        counters.iteration += 1
        self.count(trajectories)
        counters.seconds = self.ranks.of_first(time.monotonic() - self._started)  # all ranks stop at one time
        stats |= {**played.metrics(), **self.curriculum.metrics()}
        if self.curriculum.observe(trajectories):
            self._enter_stage()
        return stats

    def count(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds what was played to the counters."""
        counters = self.counters
        counters.steps += sum(len(t.turns) for t in trajectories)
        counters.episodes += len(trajectories)
        counters.tokens += sum(t.sampled_tokens for t in trajectories)
        counters.failed += sum(not t.valid for t in trajectories)

    def describe(self, played: Selection) -> tuple[list[Trajectory], dict[str, float]]:
        """What a person is shown of an iteration: episodes, and figures of how they came about."""
        return played.trajectories, self.player.stats.metrics()

    def _look_at_ratio(self, stats: dict[str, float]) -> None:
        """After the first update of the process: says where truncated sampling biases the weights, and by how much."""
        if not self._looked_at_ratio and self.ranks.first:
            rollout, measured = self.config.rollout, stats.get("correction/ratio_mean")
            warn_of_truncated_sampling(rollout.correction, rollout.top_p, rollout.top_k, rollout.min_p, measured)
        self._looked_at_ratio = True

    def evaluate(self) -> Report:
        """Plays the validation panel."""
        temperature, collected = self.config.evaluation.temperature, self.player.stats
        with self.phases("evaluate"):
            report = evaluate(self.panel, lambda tasks: self.player.play(tasks, temperature), str(self.folder))
        report.settings = {"temperature": temperature, "step": self.counters.steps}
        self.player.engine.forget()  # so that training is the same, to the last digit, whether or not it is watched
        self.player.stats = collected  # what is recorded of the iteration
        return report

    def record(self, played: Selection, stats: dict[str, float], progress: Progress) -> None:
        """Metrics, sample trajectories, and the line that a person sees."""
        training, counters = self.config.training, self.counters
        trajectories, figures = self.describe(played)
        numbers = {**summarise(trajectories), **figures, **stats, **self.phases.take()}
        numbers["train/failed_total"] = counters.failed
        numbers["train/iteration"] = counters.iteration
        if self.tracking is None:
            return
        if counters.iteration % training.logging_steps == 0:
            self.tracking.log(counters.steps, numbers)
        kept = trajectories[: training.save_trajectories]
        self.tracking.sample({"iteration": counters.iteration, **trajectory.to_json()} for trajectory in kept)
        shown = {name: numbers[f"train/{name}"] for name in ("reward", "success") if f"train/{name}" in numbers}
        if "eval/success" in stats:
            shown["eval_success_rate"] = stats["eval/success"]
        progress.update(counters.steps, **shown, tokens_per_second=self.player.stats.tokens_per_second)

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1]."""
        training = self.config.training
        shares = [self.counters.steps / training.total_steps]
        if training.max_seconds is not None:
            shares.append(self.counters.seconds / training.max_seconds)
        return min(1.0, max(shares))

    @property
    def done(self) -> bool:
        """Whether the run is over: all steps are made, or most of another iteration would lie beyond max_seconds."""
        limit, counters = self.config.training.max_seconds, self.counters
        if self.progress >= 1.0 or limit is None or counters.iteration == 0:
            return self.progress >= 1.0
        return limit - counters.seconds < 0.5 * counters.seconds / counters.iteration

    # State

    def save(self) -> None:
        """Writes a checkpoint from which a run goes on exactly; with `rollout.staleness` above 0 validly, but not
        number for number: episodes that were begun ahead are in no checkpoint, and a run that is taken up begins them
        anew, under the weights of the checkpoint."""
        with self.phases("save"):
            tensors = self.backend.tensors()
            whole = self.policy.saved_as(self.playing, adapter=True)
            if self.ranks.first:
                save(
                    self.folder,
                    self.counters.steps,
                    scalars={
                        "counters": vars(self.counters),
                        "updater": self.updater.state_dict(),
                        "curriculum": self.curriculum.state_dict(),
                        "empty_steps": self.empty.in_row,
                    },
                    tensors={"optimizer": tensors},
                    model=whole,
                    tokenizer=self.tokenizer,
                    keep=self.config.training.keep_checkpoints,
                )
            self.ranks.wait()

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.updater.load_state_dict(checkpoint.part("updater"))
        self.backend.load(checkpoint.tensors("optimizer"))
        self.counters = Counters(**checkpoint.scalars["counters"])
        self.curriculum.load_state_dict(checkpoint.scalars["curriculum"])
        self.empty.in_row = int(checkpoint.scalars["empty_steps"])
        self._enter_stage()
        self.player.load(self.policy.weights_for(self.player.engine), self.counters.iteration)
        if self.config.rollout.staleness:
            log.warning(
                "rollout.staleness: episodes that the stopped run had begun ahead are begun anew, so the run goes on "
                "validly, but not number for number"
            )

    def _enter_stage(self) -> None:
        """Trains on the environment of the curriculum's stage, or on the config's own where there is none."""
        self.environment = self._stages[self.curriculum.index] if self._stages else self.player.environment
        self.tasks = self.environment.tasks(self.config.environment.split)

    def _due(self, freq: int | None) -> bool:
        """Whether the latest iteration passed a multiple of `freq` environment steps."""
        return freq is not None and self.counters.steps // freq > self._before // freq

    def _save_due(self) -> bool:
        training = self.config.training
        if training.save_strategy == "epoch":
            return True
        return training.save_strategy == "steps" and self._due(training.save_freq)


def _check_same(config: Config, file: Path) -> None:
    """Refuses to go on from a run whose weights are others: with a critic where none is trained now, or the like.

    Args:
        file: the config of the run that is taken up; one that is absent or cannot be read is passed over, for loading
            the weights compares them too.
    """
    try:
        earlier = Config.load(file)
    except ValueError:
        return
    settings = [("model.lora", earlier.model.lora, config.model.lora)]
    if earlier.ppo.critic_kind != config.ppo.critic_kind:  # which one may have chosen by any of these
        settings += [
            ("algorithm", earlier.algorithm, config.algorithm),
            ("ppo.advantage", earlier.ppo.advantage, config.ppo.advantage),
            ("ppo.critic", earlier.ppo.critic_kind, config.ppo.critic_kind),
        ]
    for key, before, now in settings:
        if before != now:
            raise ValueError(
                f"training.resume: expected {key} {_short(before)}, as the run in {str(file.parent)!r} was begun with, "
                f"got {_short(now)} (set it so, or begin a new run in another folder)"
            )


def _short(value: Any) -> str:
    return "null" if value is None else str(value)


def _check_staleness(config: Config, collects: str) -> None:
    staleness = config.rollout.staleness
    if staleness and (collects != "play" or len(Curriculum(config.curriculum).stages) > 1):
        what = "a curriculum of several stages" if collects == "play" else f"training.collect: {collects}"
        raise ValueError(
            f"rollout.staleness: expected 0 with {what}, whose episodes cannot be begun ahead, got {staleness}"
        )


def _figures(report: Report) -> dict[str, float]:
    summary = report.summary
    return {
        "eval/success": summary.success.rate,
        "eval/steps": summary.mean_steps,
        "eval/valid_action_rate": summary.valid_action_rate,
        "eval/format_rate": summary.format_rate,
        **{f"eval_success/{kind}": rate.rate for kind, rate in summary.per_type.items()},
    }
