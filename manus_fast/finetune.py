"""Training on fixed data as a run: config → model → loop with checkpoints and figures → a model folder.

config = Config.load("configs/sft_household.yaml", ["model.path=runs/tiny"])
FineTune(config).run()

`OfflineRun` is what every such run does; `FineTune` is SFT, and preference.py adds DPO and the reward model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from manus_fast.agent.trajectory import Row
from manus_fast.checkpoint import load, save, save_model
from manus_fast.config import save_config, to_dict
from manus_fast.data.demonstrations import demonstrate
from manus_fast.data.load import load_conversations
from manus_fast.data.react import demonstration_rows, keep_trainable, message_rows
from manus_fast.data.schema import Conversation
from manus_fast.envs.base import Environment, Task
from manus_fast.evaluate import Report, evaluate, make_panel
from manus_fast.learn.backend import make_backend, playing_model
from manus_fast.learn.minibatch import steps_per_epoch
from manus_fast.learn.offline import Objective, OfflineConfig, OfflineResult, OfflineState, train_offline
from manus_fast.learn.policy import Policy
from manus_fast.learn.sft import SFTObjective
from manus_fast.player import Player
from manus_fast.process import prepare_process
from manus_fast.progress import Progress
from manus_fast.ranks import connect
from manus_fast.rollout.engine import Engine
from manus_fast.rollout.seeds import derive
from manus_fast.run_config import Config
from manus_fast.run_folder import RunFolder, open_run
from manus_fast.tracking import Tracking
from manus_fast.versions import write_versions

_LOG = logging.getLogger(__name__)


class OfflineRun:
    """A run on fixed data: folder, backend, resume, figures, checkpoints. In one process, or on every rank that a
    launcher started.

    Args:
        config: its model, backend and training blocks are used.
        block: the algorithm's own block (`config.sft`, …).
        policy: what is trained: a module with `score` and `save_pretrained`.
        tokenizer: saved beside the model.
        opened: where the run is written.

    Raises:
        ValueError: whatever in the config cannot be served, before anything is trained.
    """

    validation_name = "validation_success_rate"
    """What `validate` measures, on the line that a person sees."""
    validates = True
    """Whether there is anything to validate on."""

    def __init__(self, config: Config, block: OfflineConfig, policy: Any, tokenizer: Any, opened: RunFolder):
        self.config, self.block, self.ranks = config, block, connect()
        self.opened, self.folder = opened, opened.path
        self.policy, self.tokenizer = policy, tokenizer
        self.backend = make_backend(policy, config.backend, block.optimizer(), config.model.dtype, self.ranks)
        self.state = OfflineState()
        self.checkpoint = None if opened.newest is None else load(opened.newest, verify=False)
        if self.checkpoint is not None:
            scalars = self.checkpoint.part(block.block)
            self.backend.load(self.checkpoint.tensors("optimizer"))
            self.state = OfflineState.of(scalars, self.checkpoint.tensors("best") or None)
        self.tracking: Tracking | None = None
        """Of rank 0."""

    def train(self, objective: Objective) -> OfflineResult:
        """Trains to the end; afterwards the policy has the weights that are kept."""
        self._open()
        with self.tracking or nullcontext():
            return self._train(objective)

    def _train(self, objective: Objective) -> OfflineResult:
        block, training = self.block, self.config.training
        per_epoch = steps_per_epoch(objective.count, block.batch_size)
        total, silent = block.epochs * per_epoch, not self.ranks.first
        with Progress(block.block, total, silent=silent, max_seconds=block.time_limit) as progress:

            def on_step(state: OfflineState, stats: dict[str, float]) -> None:
                checked = f"{block.block}/validation" in stats
                if self.tracking is not None and (checked or state.step % training.logging_steps == 0):
                    self.tracking.log(state.step, stats)
                names = ("loss", "accuracy")
                shown = {name: stats[f"{block.block}/{name}"] for name in names if f"{block.block}/{name}" in stats}
                if state.history:
                    shown[self.validation_name] = state.history[-1][1]
                progress.update(state.step, spent=state.seconds, **shown)
                freq = {"no": 0, "steps": training.save_freq, "epoch": per_epoch}[training.save_strategy]
                if freq and state.step and state.step % freq == 0:
                    self.save()

            result = train_offline(
                self.backend,
                objective,
                block,
                evaluate=self.validate if self.validates else None,
                on_step=on_step,
                seed=training.seed,
                state=self.state,
                on_end=self.save if training.save_strategy != "no" else None,
                dump_folder=self.folder / "skipped",
            )
        whole = self.whole(self.config.model.exports_adapter)
        if self.ranks.first:
            save_model(self.folder / "model", whole, self.tokenizer)
        self.ranks.wait()
        return result

    def _open(self) -> None:
        """Begins the run's records: only now, so that a run without data to train on leaves none."""
        if not self.ranks.first:
            return
        self.tracking = Tracking(
            self.folder,
            resume_step=None if self.checkpoint is None else self.state.step,
            wandb_project="manus_fast" if self.config.training.use_wandb else None,
            config=to_dict(self.config),
        )
        save_config(self.config, self.folder / "config.json")
        write_versions(self.folder)

    def validate(self) -> float:
        """The score that decides which weights are kept; larger is better."""
        raise NotImplementedError

    def save(self) -> None:
        """Writes a checkpoint from which a run goes on exactly."""
        whole = self.whole(adapter=True)
        tensors = {"optimizer": self.backend.tensors(), "best": self.state.best or {}, **self.extra_tensors()}
        if self.ranks.first:
            save(
                self.folder,
                self.state.step,
                scalars={self.block.block: self.state.scalars()},
                tensors=tensors,
                model=whole,
                tokenizer=self.tokenizer,
                keep=self.config.training.keep_checkpoints,
            )
        self.ranks.wait()

    def whole(self, adapter: bool = False) -> Any:
        """What is saved as the model, up to date: the adapter alone where that is asked for and there is one. All
        ranks have to call it."""
        return self.policy

    def extra_tensors(self) -> dict[str, dict[str, Any]]:
        """Further groups of tensors for a checkpoint."""
        return {}


@dataclass
class FineTuned:
    """How a run that is validated by play ended."""

    result: OfflineResult
    report: Report
    """The validation panel, played with the weights that were kept."""


class PlayedRun(OfflineRun):
    """A run on fixed data whose policy is validated by playing a panel of the config's environment.

    Args:
        config: its agent, environment and evaluation blocks are used too.
        model, tokenizer: where they are loaded already; None opens `config.model.path`.
        environment: where it exists already; None makes the one that the config names.
        engine: what an earlier run of this process sampled with (see `Player`); None opens one.
    """

    def __init__(
        self,
        config: Config,
        block: OfflineConfig,
        model: Any = None,
        tokenizer: Any = None,
        environment: Environment | None = None,
        engine: Engine | None = None,
    ):
        prepare_process()
        ranks = connect()
        opened = open_run(config.training.output_dir, config.training.resume, ranks)
        if model is None:
            model, tokenizer = config.model.open()
        self.playing = playing_model(model, config.backend, config.model.dtype, ranks)
        self.player = Player(config, self.playing, tokenizer, environment, ranks, engine)
        self.panel = make_panel(self.player.environment, config.evaluation.split, config.evaluation.tasks)
        trained = config.model.adapted(model, config.training.seed)
        policy = Policy(trained, "none", config.model.gradient_checkpointing, config.model.compile)
        super().__init__(config, block, policy, tokenizer, opened)
        self._version = self.state.step

    def finish(self, objective: Objective) -> FineTuned:
        """Trains on `objective`, then plays the panel; the model is in `output_dir`/model."""
        result = self.train(objective)
        report = self.evaluate()
        if self.ranks.first:
            report.save(self.folder / "eval.json")
        return FineTuned(result, report)

    def whole(self, adapter: bool = False) -> Any:
        return self.policy.saved_as(self.playing, adapter)

    def validate(self) -> float:
        return self.evaluate().summary.success.rate

    def evaluate(self) -> Report:
        """Plays the validation panel with the policy as it is."""
        self._version += 1
        self.player.load(self.policy.weights_for(self.player.engine), self._version)
        temperature = self.config.evaluation.temperature
        report = evaluate(self.panel, lambda tasks: self.player.play(tasks, temperature), str(self.folder))
        report.settings = {"temperature": temperature, "step": self.state.step}
        return report


class FineTune(PlayedRun):
    """One SFT run: the config's model, agent, environment, data, sft, evaluation and training blocks are used."""

    def __init__(
        self,
        config: Config,
        model: Any = None,
        tokenizer: Any = None,
        environment: Environment | None = None,
        engine: Engine | None = None,
    ):
        super().__init__(config, config.sft, model, tokenizer, environment, engine)
        # A named dataset takes the expert's place.
        split = self.player.environment.tasks(config.environment.split)
        count = config.data.demonstrations if config.data.name is None else 0
        self.tasks = training_tasks(split, count, config.training.seed)

    def run(self, rows: Sequence[Row] | None = None) -> FineTuned:
        """Trains on `rows`, or on demonstrations of the environment's expert; the model is in `output_dir`/model."""
        config = self.config
        with self.opened:
            if rows is None:
                rows = self.demonstrations() if config.data.name is None else self.conversations(config.data.name)
            accumulation = config.training.gradient_accumulation_steps
            return self.finish(SFTObjective(rows, config.sft, self.backend.world_size, accumulation))

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
        if not rows:
            found = f"{name!r}{reasons(dropped)}"
            raise ValueError(f"data.name: expected at least one conversation to train on, got none in {found}")
        warn_of_skipped(dropped)
        return rows

    def _rows(self, item: Conversation, number: int) -> list[Row]:
        """Rows of one conversation, with the agent's system message where it brings none."""
        system = {"role": "system", "content": self.player.system_prompt}
        own = item.messages[0]["role"] == "system"
        return message_rows(self.player.context, item.messages if own else [system, *item.messages], number)


def warn_of_skipped(dropped: Counter[str]) -> None:
    """Logs how many rows of a dataset were skipped, and why."""
    if dropped:
        _LOG.warning("data.name: skipped %s", _counted(dropped))


def reasons(dropped: Counter[str]) -> str:
    """How a sentence that refuses a dataset goes on where all its rows were skipped; nothing where it has none."""
    return f" (skipped: {_counted(dropped)})" if dropped else ""


def _counted(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in dropped.items())


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
