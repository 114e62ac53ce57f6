"""Supervised fine-tuning as a run: demonstrations → rows → SFT with validation by play → a model folder.

config = Config.load("configs/sft_household.yaml", ["model.path=runs/tiny"])
FineTune(config).run()
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manus_fast.agent.trajectory import Row
from manus_fast.checkpoint import latest, load, save
from manus_fast.config import save_config, to_dict
from manus_fast.data.demonstrations import demonstrate
from manus_fast.data.load import load_conversations
from manus_fast.data.react import demonstration_rows, keep_trainable, message_rows
from manus_fast.data.schema import Conversation
from manus_fast.envs.base import Environment, Task
from manus_fast.evaluate import Report, evaluate, make_panel
from manus_fast.learn.backend import make_backend, playing_model
from manus_fast.learn.minibatch import steps_per_epoch
from manus_fast.learn.policy import Policy
from manus_fast.learn.sft import SFTResult, SFTState, check_rows, train_sft
from manus_fast.player import Player
from manus_fast.process import prepare_process
from manus_fast.progress import Progress
from manus_fast.ranks import connect
from manus_fast.rollout.seeds import derive
from manus_fast.run_config import Config
from manus_fast.tracking import Tracking, prepare_folder
from manus_fast.versions import write_versions

_LOG = logging.getLogger(__name__)


@dataclass
class FineTuned:
    """How a run ended."""

    result: SFTResult
    report: Report
    """The validation panel, played with the weights that were kept."""


class FineTune:
    """One SFT run, in one process or on every rank that a launcher started.

    Args:
        config: its model, agent, environment, data, sft, evaluation and training blocks are used.
        model, tokenizer: where they are loaded already; None opens `config.model.path`.
        environment: where it exists already; None makes the one that the config names.

    Raises:
        ValueError: whatever in the config cannot be served, before anything is trained.
    """

    def __init__(
        self, config: Config, model: Any = None, tokenizer: Any = None, environment: Environment | None = None
    ):
        prepare_process()
        self.config = config
        self.ranks = connect()
        self.folder = prepare_folder(config.training.output_dir)
        if model is None:
            model, tokenizer = config.model.open()
        self.playing = playing_model(model, config.backend, config.model.dtype, self.ranks)
        self.player = Player(config, self.playing, tokenizer, environment, self.ranks)
        self.tokenizer = tokenizer
        # A named dataset takes the expert's place.
        split = self.player.environment.tasks(config.environment.split)
        count = config.data.demonstrations if config.data.name is None else 0
        self.tasks = training_tasks(split, count, config.training.seed)
        self.panel = make_panel(self.player.environment, config.evaluation.split, config.evaluation.tasks)
        self.policy = Policy(model, "none", config.model.gradient_checkpointing, config.model.compile)
        self.backend = make_backend(self.policy, config.backend, config.sft.optimizer(), config.model.dtype, self.ranks)
        self.state = SFTState()
        newest = self.ranks.of_first(latest(self.folder)) if config.training.resume else None
        if newest is not None:
            checkpoint = load(newest)
            self.backend.load(checkpoint.tensors("optimizer"))
            self.state = SFTState.of(checkpoint.scalars["sft"], checkpoint.tensors("best") or None)
        self._version = self.state.step
        self._resumed = newest is not None
        self.tracking: Tracking | None = None
        """Of rank 0."""

    def run(self, rows: Sequence[Row] | None = None) -> FineTuned:
        """Trains on `rows`, or on demonstrations of the environment's expert; the model is in `output_dir`/model."""
        config, training = self.config, self.config.training
        if rows is None:
            rows = self.demonstrations() if config.data.name is None else self.conversations(config.data.name)
        check_rows(rows, config.sft)
        self._open()
        total = config.sft.epochs * steps_per_epoch(len(rows), config.sft.batch_size)
        with Progress("sft", total, silent=not self.ranks.first) as progress:

            def on_step(state: SFTState, stats: dict[str, float]) -> None:
                checked = "sft/validation" in stats
                if self.tracking is not None and (checked or state.step % training.logging_steps == 0):
                    self.tracking.log(state.step, stats)
                shown = {"loss": stats["sft/loss"]}
                if state.history:
                    shown["validation_success_rate"] = state.history[-1][1]
                progress.update(state.step, **shown)
                if self._save_due(state, steps_per_epoch(len(rows), config.sft.batch_size)):
                    self.save(state)

            result = train_sft(
                self.backend,
                rows,
                config.sft,
                evaluate=lambda: self.evaluate().summary.success.rate,
                on_step=on_step,
                gradient_accumulation_steps=training.gradient_accumulation_steps,
                seed=training.seed,
                state=self.state,
                dump_folder=self.folder / "skipped",
            )
        report = self.evaluate()
        if training.save_strategy != "no":
            self.save(self.state)
        self._whole()
        if self.tracking is not None:
            self.playing.save_pretrained(self.folder / "model")
            self.tokenizer.save_pretrained(self.folder / "model")
            report.save(self.folder / "eval.json")
            self.tracking.close()
        self.ranks.wait()
        return FineTuned(result, report)

    def _open(self) -> None:
        """Begins the run's records: only now, so that a run without data to train on leaves none."""
        if not self.ranks.first:
            return
        self.tracking = Tracking(
            self.folder,
            resume_step=self.state.step if self._resumed else None,
            wandb_project="manus_fast" if self.config.training.use_wandb else None,
            config=to_dict(self.config),
        )
        save_config(self.config, self.folder / "config.json")
        write_versions(self.folder)

    def demonstrations(self) -> list[Row]:
        """Rows of the episodes that the expert won."""
        config, player, tasks = self.config, self.player, self.tasks
        seeds = [derive(config.training.seed, number) for number in range(len(tasks))]
        system = player.system_prompt
        mine = self.ranks.share(len(tasks))
        played = demonstrate(player.environment, [tasks[i] for i in mine], [seeds[i] for i in mine], config.data.expert)
        rows = self.ranks.gather(
            [
                row
                for number, episode in zip(mine, played, strict=True)
                if episode.success
                for row in demonstration_rows(player.context, player.protocol, system, episode.steps, number)
            ]
        )
        if not rows:
            raise ValueError(
                f"data.demonstrations: expected at least one episode that the expert wins within "
                f"{player.environment.max_steps} steps (environment.max_steps), got none of {len(tasks)}"
            )
        return rows

    def conversations(self, name: str) -> list[Row]:
        """Rows of a named dataset, its replies in the agent's form; skipped rows are logged with their reasons."""
        dropped: Counter[str] = Counter()
        items = load_conversations(name, dropped, self.player.protocol, streaming=self.config.data.streaming)
        rows = [row for number, item in enumerate(items) for row in self._rows(item, number)]
        rows, empty = keep_trainable(rows)
        if empty:
            dropped["row without a trainable token"] = empty
        if dropped:
            _LOG.warning("data.name: skipped %s", ", ".join(f"{n} ({reason})" for reason, n in dropped.items()))
        if not rows:
            raise ValueError(f"data.name: expected at least one conversation to train on, got none in {name!r}")
        return rows

    def _rows(self, item: Conversation, number: int) -> list[Row]:
        """Rows of one conversation, with the agent's system message where it brings none."""
        system = {"role": "system", "content": self.player.system_prompt}
        own = item.messages[0]["role"] == "system"
        return message_rows(self.player.context, item.messages if own else [system, *item.messages], number)

    def evaluate(self) -> Report:
        """Plays the validation panel with the policy as it is."""
        self._version += 1
        self.player.load(self.policy.named_weights(), self._version)
        temperature = self.config.evaluation.temperature
        report = evaluate(self.panel, lambda tasks: self.player.play(tasks, temperature), str(self.folder))
        report.settings = {"temperature": temperature, "step": self.state.step}
        return report

    def _whole(self) -> None:
        """Brings the model that is saved up to date, where it is not the trained one itself."""
        if self.playing is not self.policy.model:
            self.policy.write_to(self.playing)

    def save(self, state: SFTState) -> None:
        """Writes a checkpoint from which a run goes on exactly."""
        self._whole()
        tensors = {"optimizer": self.backend.tensors(), "best": state.best or {}}
        if self.ranks.first:
            save(
                self.folder,
                state.step,
                scalars={"sft": state.scalars()},
                tensors=tensors,
                model=self.playing,
                tokenizer=self.tokenizer,
                keep=self.config.training.keep_checkpoints,
            )
        self.ranks.wait()

    def _save_due(self, state: SFTState, per_epoch: int) -> bool:
        training = self.config.training
        freq = {"no": 0, "steps": training.save_freq, "epoch": per_epoch}[training.save_strategy]
        return freq > 0 and state.step % freq == 0


def training_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """`count` distinct tasks of a split, drawn by the seed.

    Raises:
        ValueError: the split has fewer.
    """
    if count > len(tasks):
        raise ValueError(f"data.demonstrations: expected at most the split's {len(tasks)} tasks, got {count}")
    stride = 0x9E3779B1  # prime: step * i + offset visits distinct tasks unless the split's size is a multiple of it
    offset = derive(seed)
    return [tasks[(offset + stride * number) % len(tasks)] for number in range(count)]
