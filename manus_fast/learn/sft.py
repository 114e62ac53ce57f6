"""Supervised fine-tuning on rows: each trainable token's negative log-likelihood, averaged over the whole mini-batch.

policy = Policy(model)
config = SFTConfig(epochs=10, batch_size=16, learning_rate=1e-3, eval_every=50)
backend = make_backend(policy, BackendConfig(), config.optimizer())
result = train_sft(backend, rows, config, evaluate=lambda: success_on_validation_tasks(policy))
# the policy now has the weights of result.best_step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import PackedRows, micro_batch_rows, pack
from manus_fast.learn.backend import Backend
from manus_fast.learn.minibatch import accumulate
from manus_fast.learn.offline import OfflineConfig, OfflineResult, check_count, train_offline
from manus_fast.learn.policy import ScoreOutput
from manus_fast.modeling.flops import Work


@dataclass
class SFTConfig(OfflineConfig):
    """The `sft` block of a config; an item is a row."""

    block: ClassVar[str] = "sft"

    share_prefixes: bool = False
    """Compute what rows of a mini-batch have in common once; rows of one group (tree, task) then stay together."""


class SFTObjective:
    """Cross-entropy on the trainable tokens of rows, each token of a mini-batch weighing the same.

    Raises:
        ValueError: no trainable rows, fewer than a batch, or a batch size that does not divide into micro-batches.
    """

    def __init__(self, rows: Sequence[Row], config: SFTConfig, ranks: int, gradient_accumulation_steps: int = 1):
        kept = [row for row in rows if row.loss_mask.any()]
        if not kept:
            raise ValueError(f"sft: expected at least one row with a trainable token, got none in {len(rows)} rows")
        self.count, self.dropped = check_count(config, len(kept), "rows"), len(rows) - len(kept)
        self._micro = micro_batch_rows(config.batch_size, ranks, gradient_accumulation_steps, key="sft.batch_size")
        self._max_tokens = config.max_tokens
        self._packed = pack(kept, config.share_prefixes)
        self.groups = self._packed.groups
        self._work: Work | None = None

    def accumulate(self, backend: Backend, index: np.ndarray) -> tuple[PackedRows, torch.Tensor, list[torch.Tensor]]:
        batch = self._packed.select(index)
        self._work = backend.policy.work
        denominator = float(batch.trainable_tokens)

        def loss_of(_: PackedRows, output: ScoreOutput) -> tuple[torch.Tensor, torch.Tensor]:
            loss = -output.log_prob.sum() / denominator
            return loss, loss.detach().reshape(1)

        parts, flags = accumulate(backend, batch, loss_of, max_rows=self._micro, max_tokens=self._max_tokens)
        return batch, parts, flags

    def figures(self, totals: torch.Tensor) -> dict[str, float]:
        return {"loss": float(totals[0]), **(self._work.take() if self._work else {})}


def train_sft(
    backend: Backend,
    rows: Sequence[Row],
    config: SFTConfig,
    *,
    gradient_accumulation_steps: int = 1,
    **options: Any,
) -> OfflineResult:
    """SFT on `rows`; the other arguments are `train_offline`'s.

    Raises:
        ValueError: no trainable rows, or fewer than `batch_size`.
        NonFiniteError: too many steps in a row with a loss or gradient that is not finite.
    """
    objective = SFTObjective(rows, config, backend.world_size, gradient_accumulation_steps)
    return train_offline(backend, objective, config, **options)
