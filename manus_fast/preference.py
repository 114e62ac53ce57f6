"""Training on preferences as a run: DPO of a policy, and a reward model.

config = Config.load("configs/dpo_household.yaml", ["model.path=runs/sft/model", "data.name=preferences.jsonl"])
PreferenceTune(config).run()
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.data.preferences import Preference, RowPair, fingerprint, load_preferences, preference_rows
from manus_fast.envs.base import Environment
from manus_fast.files import write_text
from manus_fast.finetune import FineTuned, OfflineRun, PlayedRun, reasons, warn_of_skipped
from manus_fast.learn.dpo import DPOObjective
from manus_fast.learn.offline import OfflineResult
from manus_fast.learn.reward_model import RewardObjective, accuracy, held_out
from manus_fast.modeling.load import end_ids
from manus_fast.player import Play
from manus_fast.process import prepare_process
from manus_fast.ranks import connect
from manus_fast.rewards.model import RewardModel
from manus_fast.rollout.engine import Engine
from manus_fast.run_config import Config
from manus_fast.run_folder import open_run

_LOG = logging.getLogger(__name__)


class PreferenceTune(PlayedRun):
    """One DPO run: the config's model, agent, environment, data, dpo, evaluation and training blocks are used.

    The reference is the model that the run starts from; its log-probabilities are computed once and go into every
    checkpoint.
    """

    def __init__(
        self,
        config: Config,
        model: Any = None,
        tokenizer: Any = None,
        environment: Environment | None = None,
        engine: Engine | None = None,
    ):
        super().__init__(config, config.dpo, model, tokenizer, environment, engine)
        self._objective: DPOObjective | None = None

    def run(self, preferences: Iterable[Preference] | None = None) -> FineTuned:
        """Trains on `preferences`, or on those that `data.name` names; the model is in `output_dir`/model."""
        config, block = self.config, self.config.dpo
        steps, player = config.training.gradient_accumulation_steps, self.player
        with self.opened:
            pairs = read_pairs(config, preferences, player.context, player.system_prompt, block.max_length)
            cached = None if self.checkpoint is None else self.checkpoint.tensors("reference")
            self._objective = DPOObjective(
                self.policy, pairs, block, self.backend.world_size, steps, cached, self.backend
            )
            return self.finish(self._objective)

    def extra_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {} if self._objective is None else {"reference": self._objective.reference}


@dataclass
class RewardTuned:
    """How a run that trains a reward model ended."""

    result: OfflineResult
    accuracy: dict[str, float]
    """Head → share of the held-out pairs whose chosen side scores higher, with the weights that were kept; empty
    where nothing was held out."""
    held_out: int
    """Pairs."""


class RewardTune(OfflineRun):
    """One run that trains a reward model: the config's model, agent, environment (for its instructions), data,
    reward_model and training blocks are used. It begins from the decoder of `model.path`.

    Args:
        config: see run_config.py.
        model, tokenizer: where they are loaded already; None opens `config.model.path`. The model is copied.

    Raises:
        ValueError: whatever in the config cannot be served, before anything is trained.
    """

    validation_name = "held_out_accuracy_rate"

    def __init__(self, config: Config, model: Any = None, tokenizer: Any = None):
        prepare_process()
        if config.backend.kind == "fsdp":
            raise ValueError("backend.kind: expected single or ddp for a reward model, got 'fsdp'")
        if config.model.lora is not None:
            raise ValueError("model.lora: expected null for a reward model, which is trained whole, got adapters")
        opened = open_run(config.training.output_dir, config.training.resume, connect())
        if model is None:
            model, tokenizer = config.model.open()
        self.context = Context(ChatFormat(tokenizer, end_ids(model)), config.agent.context, config.agent.window)
        self._held: list[RowPair] = []
        judge = RewardModel.of(model, fingerprint(tokenizer))
        super().__init__(config, config.reward_model, judge, tokenizer, opened)

    def run(self, preferences: Iterable[Preference] | None = None) -> RewardTuned:
        """Trains on `preferences`, or on those that `data.name` names; the model is in `output_dir`/model.

        Raises:
            ValueError: no dataset, nothing in it to train on, or fewer pairs than a batch.
        """
        with self.opened:
            return self._fit(preferences)

    def _fit(self, preferences: Iterable[Preference] | None) -> RewardTuned:
        config, block = self.config, self.config.reward_model
        system = Play(config).system_prompt
        pairs = read_pairs(config, preferences, self.context, system, block.max_length)
        kept, self._held = held_out(pairs, block.held_out)
        self.validates = bool(self._held)
        steps = config.training.gradient_accumulation_steps
        result = self.train(RewardObjective(self.policy, kept, block, self.backend.world_size, steps))
        found = self._accuracy()
        if self.ranks.first:
            record = {"accuracy": found, "pairs": len(kept), "held_out": len(self._held)}
            write_text(self.folder / "accuracy.json", json.dumps(record) + "\n")
        return RewardTuned(result, found, len(self._held))

    def validate(self) -> float:
        """Accuracy of the outcome head on the held-out pairs, or the step head's where no pair is an episode's."""
        found = self._accuracy()
        return found["outcome"] if "outcome" in found else found["step"]

    def _accuracy(self) -> dict[str, float]:
        return accuracy(self.policy, self._held) if self._held else {}


def read_pairs(
    config: Config,
    preferences: Iterable[Preference] | None,
    context: Context,
    system: str,
    max_length: int | None,
) -> Sequence[RowPair]:
    """The pairs to train on as rows; skipped ones are logged with their reasons.

    Raises:
        ValueError: no dataset is named, or nothing in it can be trained on.
    """
    dropped: Counter[str] = Counter()
    name = config.data.name
    if preferences is None:
        if name is None:
            raise ValueError("data.name: expected a preferences.jsonl to train on, got none (set it or --dataset_name)")
        preferences = load_preferences(name, dropped)
    items = list(preferences)
    pairs = preference_rows(items, context, system, max_length=max_length, dropped=dropped)
    if not pairs:
        place = ("the preferences given" if name is None else repr(name)) + reasons(dropped)
        raise ValueError(f"data.name: expected at least one preference pair to train on, got none in {place}")
    warn_of_skipped(dropped)
    return pairs
