"""Training on preferences as a run: DPO of a policy, and a reward model.

config = Config.load("configs/dpo_household.yaml", ["model.path=runs/sft/model", "data.name=preferences.jsonl"])
PreferenceTune(config).run()
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from manus_fast.agent.context import Context
from manus_fast.data.preferences import Preference, RowPair, load_preferences, preference_rows
from manus_fast.envs.base import Environment
from manus_fast.finetune import FineTuned, PlayedRun, warn_of_skipped
from manus_fast.learn.dpo import DPOObjective
from manus_fast.run_config import Config

_LOG = logging.getLogger(__name__)


class PreferenceTune(PlayedRun):
    """One DPO run: the config's model, agent, environment, data, dpo, evaluation and training blocks are used.

    The reference is the model that the run starts from; its log-probabilities are computed once and go into every
    checkpoint.
    """

    def __init__(
        self, config: Config, model: Any = None, tokenizer: Any = None, environment: Environment | None = None
    ):
        super().__init__(config, config.dpo, model, tokenizer, environment)
        self._objective: DPOObjective | None = None

    def run(self, preferences: Iterable[Preference] | None = None) -> FineTuned:
        """Trains on `preferences`, or on those that `data.name` names; the model is in `output_dir`/model."""
        config, block = self.config, self.config.dpo
        pairs = read_pairs(config, preferences, self.player.context, self.player.system_prompt, block.max_length)
        cached = None if self.checkpoint is None else self.checkpoint.tensors("reference")
        self._objective = DPOObjective(
            self.policy,
            pairs,
            block,
            self.backend.world_size,
            config.training.gradient_accumulation_steps,
            cached,
        )
        return self.finish(self._objective)

    def extra_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {} if self._objective is None else {"reference": self._objective.reference}


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
    warn_of_skipped(dropped)
    if not pairs:
        raise ValueError(f"data.name: expected at least one preference pair to train on, got none in {name!r}")
    return pairs
