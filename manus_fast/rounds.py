"""A run in rounds, each of which begins from the policy that the one before came to: play, learn from it, measure.

What expert_iteration.py and preference_rounds.py share: the model, its evaluation panel, fresh tasks for each round,
figures, checkpoints between rounds and going on from one. A round leaves its records in `output_dir`/round<n>.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from manus_fast.checkpoint import folders, load, save, save_model
from manus_fast.config import save_config, to_dict
from manus_fast.envs.base import Environment
from manus_fast.evaluate import Report, evaluate, make_panel
from manus_fast.finetune import training_tasks
from manus_fast.modeling.lora import has_adapters, merge
from manus_fast.player import Player
from manus_fast.process import prepare_process
from manus_fast.ranks import connect
from manus_fast.rollout.seeds import derive
from manus_fast.run_config import Config, TrainingConfig
from manus_fast.run_folder import open_run
from manus_fast.tracking import Tracking
from manus_fast.versions import write_versions


class RoundRecord(Protocol):
    """What one round did: a dataclass that JSON can hold."""

    number: int
    """From 1."""

    def metrics(self) -> dict[str, float]:
        """Named figures for tracking."""
        ...


Done = TypeVar("Done", bound=RoundRecord)


class RoundsRun(Generic[Done]):
    """One run in rounds, in one process.

    Args:
        config: its model, agent, environment, evaluation and training blocks are used, and what a subclass adds.
        count: rounds.
        tasks: training tasks of a round, none of them twice in a run.
        model, tokenizer: where they are loaded already; None opens `config.model.path`. Trained in place.
        environment: where it exists already; None makes the one that the config names.

    Raises:
        ValueError: several ranks, or fewer tasks in the split than all rounds take.
    """

    block: ClassVar[str]
    """Name of the config's block, for messages."""
    record: ClassVar[type]
    """Dataclass of a finished round."""
    salt: ClassVar[int]
    """Keeps the tasks and seeds of the rounds apart from those of other uses of the split."""

    def __init__(
        self,
        config: Config,
        count: int,
        tasks: int,
        model: Any = None,
        tokenizer: Any = None,
        environment: Environment | None = None,
    ):
        prepare_process()
        self.config, self.count = config, count
        ranks = connect()
        if ranks.size > 1:
            raise ValueError(f"{self.block}: expected one process for a run in rounds, got {ranks.size} ranks")
        self.opened = open_run(config.training.output_dir, config.training.resume, ranks)
        self.folder = self.opened.path
        if model is None:
            model, tokenizer = config.model.open()
        self.model, self.tokenizer = model, tokenizer
        self.done: list[Done] = []
        """The rounds so far."""
        self._resumed = self.opened.newest is not None
        if self.opened.newest is not None:
            checkpoint = load(self.opened.newest, verify=False)
            self.done = [self.record(**record) for record in checkpoint.part(f"{self.block}_rounds")]
            trained, _ = dataclasses.replace(config.model, path=str(checkpoint.model)).open()
            model.load_state_dict(trained.state_dict())
        self.player = Player(config, model, tokenizer, environment)
        self.environment = self.player.environment
        split = self.environment.tasks(config.environment.split)
        if count * tasks > len(split):
            raise ValueError(
                f"{self.block}.tasks: expected at most the {len(split)} tasks of {config.environment.split} over "
                f"all {count} rounds, got {tasks} a round"
            )
        self._tasks = training_tasks(split, count * tasks, derive(self.salt, config.training.seed))
        self._each = tasks
        self.panel = make_panel(self.environment, config.evaluation.split, config.evaluation.tasks)
        self.report: Report | None = None
        """The evaluation panel as the policy plays it now; None before the first evaluation."""

    def rounds(self) -> Iterator[Done]:
        """Goes through the rounds that are left; the model after each of them is `self.model`, the last one is also
        written to `output_dir`/model."""
        tracking = Tracking(
            self.folder,
            resume_step=len(self.done) if self._resumed else None,
            wandb_project="manus_fast" if self.config.training.use_wandb else None,
            config=to_dict(self.config),
        )
        with self.opened, tracking:
            yield from self._rounds(tracking)

    def _rounds(self, tracking: Tracking) -> Iterator[Done]:
        save_config(self.config, self.folder / "config.json")
        write_versions(self.folder)
        if not self.done:
            self.report = self.evaluate()
            self.report.save(self.folder / "eval_before.json")
            tracking.log(0, {"eval/success": self.report.summary.success.rate})
        while len(self.done) < self.count:
            done = self._round(len(self.done) + 1)
            self.done.append(done)
            tracking.log(done.number, done.metrics())
            if self.config.training.save_strategy != "no":
                self.save()
            yield done
        if self.report is None:
            self.report = self.evaluate()
        self.report.save(self.folder / "eval.json")
        save_model(self.folder / "model", self.model, self.tokenizer)

    def run(self) -> Report:
        """All rounds; returns the last evaluation."""
        for _ in self.rounds():
            pass
        assert self.report is not None
        return self.report

    def evaluate(self) -> Report:
        """Plays the evaluation panel with the policy as it is."""
        temperature = self.config.evaluation.temperature
        report = evaluate(self.panel, lambda tasks: self.player.play(tasks, temperature), str(self.folder))
        report.settings = {"temperature": temperature, "round": len(self.done)}
        return report

    def save(self) -> None:
        """Writes a checkpoint from which the run goes on with the next round."""
        save(
            self.folder,
            len(self.done),
            scalars={f"{self.block}_rounds": [vars(done) for done in self.done]},
            model=self.model,
            tokenizer=self.tokenizer,
            keep=self.config.training.keep_checkpoints,
        )

    def tasks_of(self, number: int) -> list[Any]:
        """The training tasks of round `number`."""
        return self._tasks[(number - 1) * self._each : number * self._each]

    def _round(self, number: int) -> Done:
        """Plays and learns; sets `self.player` and `self.report` to those of the policy after it."""
        raise NotImplementedError

    def _folder(self, number: int) -> Path:
        return self.folder / f"round{number}"

    def _own(self, number: int, training: TrainingConfig, **blocks: Any) -> Config:
        """The config of a round's training, with these blocks; it writes to the round's folder."""
        folder = self._folder(number)
        resume = training.resume and bool(folders(folder))
        training = dataclasses.replace(training, output_dir=str(folder), use_wandb=False, resume=resume)
        lora = self.config.model.lora
        if lora is not None:  # an adapter's folder names its base model, and that of a later round is in no file
            lora = dataclasses.replace(lora, export="merged")
        net = dataclasses.replace(self.config.model, lora=lora)
        return dataclasses.replace(self.config, model=net, training=training, **blocks)

    def _merge(self) -> None:
        """Puts a round's adapters into the weights: the next round begins from what this one came to."""
        if has_adapters(self.model):
            merge(self.model)
