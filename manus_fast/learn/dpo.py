"""Direct preference optimisation (Rafailov et al., NeurIPS 2023) on pairs of replies or of whole episodes.

policy = Policy(model)
config = DPOConfig(loss="sigmoid", beta=0.1, learning_rate=5e-6)
backend = make_backend(policy, BackendConfig(), config.optimizer())
result = train_dpo(backend, pairs, config, evaluate=lambda: success_on_validation_tasks(policy))

The log-probability of a side is the sum over its trainable tokens: the prompt and every observation are context. The
reference is the policy as it is before the first step, scored once; no second model is held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import PackedRows, micro_batch_rows
from manus_fast.data.preferences import RowPair
from manus_fast.learn.backend import Backend
from manus_fast.learn.minibatch import accumulate
from manus_fast.learn.offline import Callback, OfflineConfig, OfflineResult, OfflineState, check_count, train_offline
from manus_fast.learn.pairs import PackedPairs, by_side
from manus_fast.learn.policy import Policy, Reference, ScoreOutput, Summing
from manus_fast.learn.schedules import Schedule

LOSSES = ("sigmoid", "ipo", "length_normalised")
COMPARES = ("all", "first_difference")


@dataclass
class DPOConfig(OfflineConfig):
    """The `dpo` block of a config; an item is a pair."""

    block: ClassVar[str] = "dpo"

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float | Schedule = 1e-6
    check_start: bool = True
    loss: str = "sigmoid"
    """sigmoid | ipo | length_normalised."""
    beta: float = 0.1
    """Strength of the tie to the reference: the larger, the closer the policy stays."""
    compare: str = "all"
    """What of the sides is compared. all: every reply; first_difference: the first reply in which they differ, after
    the same conversation. What comes later then counts for `sft_coef` alone, and on the rejected side not at all."""
    label_smoothing: float = 0.0
    """Share of labels taken to be wrong (Mitchell, "A note on DPO with noisy preferences"); not for ipo."""
    reference_free: bool = False
    """Leave the reference out, as if it gave every side the same log-probability."""
    sft_coef: float = 0.0
    """Weight of the chosen side's mean negative log-likelihood, which keeps its probability from falling with the
    rejected one's (Pang et al., "Iterative Reasoning Preference Optimization", 2024)."""
    max_length: int | None = None
    """Tokens that a row may have; pairs with a longer one are left out and counted. Null: any."""
    rounds: int | None = None
    """Let the policy play for its pairs, anew in each of so many rounds; null: one pass over the pairs of data.name."""
    tasks: int = 400
    """Training tasks that a round plays, none of them twice in a run."""
    members: int = 4
    """Episodes of each task."""
    per_task: int = 2
    """Most pairs of a task: a success and a failure each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"dpo.rounds: expected null or an integer >= 1, got {self.rounds}")
        for name, least in (("tasks", 1), ("members", 2), ("per_task", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"dpo.{name}: expected an integer >= {least}, got {getattr(self, name)}")
        if self.loss not in LOSSES:
            raise ValueError(f"dpo.loss: expected one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.compare not in COMPARES:
            raise ValueError(f"dpo.compare: expected one of {', '.join(COMPARES)}, got {self.compare!r}")
        if not self.beta > 0:
            raise ValueError(f"dpo.beta: expected a number above 0, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"dpo.label_smoothing: expected a number in [0, 0.5), got {self.label_smoothing}")
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError(f"dpo.label_smoothing: expected 0 with dpo.loss ipo, got {self.label_smoothing}")
        if not self.sft_coef >= 0:
            raise ValueError(f"dpo.sft_coef: expected a number >= 0, got {self.sft_coef}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"dpo.max_length: expected null or an integer >= 2, got {self.max_length}")


def preference_loss(
    log_prob: torch.Tensor, ref_log_prob: torch.Tensor, lengths: torch.Tensor, config: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair, and the implicit rewards of its sides.

    With d = log π − log π_ref of a side and h = d(chosen) − d(rejected):

    - sigmoid: −(1−ε)·log σ(βh) − ε·log σ(−βh); DPO's equation 7, conservative DPO with ε > 0.
    - ipo: (h − 1/(2β))²; Azar et al., "A General Theoretical Paradigm…", 2023, equation 17.
    - length_normalised: as sigmoid, with each d divided by its number of tokens (Lambert et al., "Tülu 3", 2024).

    Args:
        log_prob, ref_log_prob: float32 [P, 2], sums over the trainable tokens of the chosen and the rejected side.
        lengths: float32 [P, 2], trainable tokens.

    Returns:
        float32 [P] and float32 [P, 2], the latter β·d, detached.
    """
    difference = log_prob - ref_log_prob
    if config.loss == "length_normalised":
        difference = difference / lengths
    margin = difference[:, 0] - difference[:, 1]
    if config.loss == "ipo":
        losses = (margin - 1 / (2 * config.beta)).square()
    else:
        smoothing, scaled = config.label_smoothing, config.beta * margin
        losses = -(1 - smoothing) * F.logsigmoid(scaled)
        if smoothing:
            losses = losses - smoothing * F.logsigmoid(-scaled)
    return losses, config.beta * difference.detach()


def first_difference(pair: RowPair, whole: bool) -> tuple[RowPair, list[np.ndarray]] | None:
    """A pair cut for `compare: first_difference`, and which tokens of its rows are compared, float32 [T] for each row.

    The rejected side ends with the first reply in which the sides differ; the chosen one too, unless `whole`.
    None: the sides first differ in something else than a reply, so that what they chose in is not the same.
    """
    for number, (a, b) in enumerate(zip(pair.chosen, pair.rejected, strict=False)):
        shorter = min(len(a), len(b))
        differing = np.flatnonzero(a.token_ids[:shorter] != b.token_ids[:shorter])
        if not len(differing):
            if len(a) == len(b):
                continue
            return None
        turn, other = (int(row.turn_id[differing[0]]) for row in (a, b))
        if turn < 0 or turn != other or not (a.loss_mask[differing[0]] and b.loss_mask[differing[0]]):
            return None
        ends = [int(np.flatnonzero(row.turn_id == turn)[-1]) + 1 for row in (a, b)]
        rejected = _cut(b, ends[1])
        chosen = list(pair.chosen) if whole else [_cut(a, ends[0])]
        compared = [
            np.where(row.loss_mask & (row.turn_id == turn) & (not whole or at == number), 1.0, 0.0).astype(np.float32)
            for at, row in [*enumerate(chosen), (number, rejected)]
        ]
        return dataclasses.replace(pair, chosen=chosen, rejected=[rejected]), compared
    return None


def _cut(row: Row, end: int) -> Row:
    arrays = {name: value[:end] for name, value in vars(row).items() if isinstance(value, np.ndarray)}
    return dataclasses.replace(row, **arrays)


class DPOObjective:
    """Mean preference loss over pairs, whatever the micro-batches and the packing.

    Args:
        policy: what is trained; without `reference` and without adapters it has to be as it was before the first step.
        ranks: of the run.
        reference: `reference` of an earlier part of this run; None: the log-probabilities are computed now.
        summing: what the ranks share their part of that work through, the backend; None: this process does it all.

    Raises:
        ValueError: no pairs or fewer than a batch, a batch size that does not divide, or a `reference` of other pairs.
    """

    def __init__(
        self,
        policy: Policy,
        pairs: Sequence[RowPair],
        config: DPOConfig,
        ranks: int,
        gradient_accumulation_steps: int = 1,
        reference: dict[str, torch.Tensor] | None = None,
        summing: Summing | None = None,
    ):
        self._config = config
        given, weights = len(pairs), None
        if config.compare == "first_difference":
            found = [cut for pair in pairs if (cut := first_difference(pair, config.sft_coef > 0)) is not None]
            pairs, weights = [pair for pair, _ in found], [row for _, rows in found for row in rows]
        self._pairs = PackedPairs(pairs, "dpo")
        if weights is not None:
            self._pairs.packed.weight = torch.from_numpy(np.concatenate(weights))
        self.count, self.dropped = check_count(config, self._pairs.count, "pairs"), given - len(pairs)
        self.groups = None
        self._micro = micro_batch_rows(config.batch_size, ranks, gradient_accumulation_steps, key="dpo.batch_size")
        packed = self._pairs.packed
        if config.reference_free:
            packed.ref_log_prob = torch.zeros(packed.tokens)
        elif reference is None:
            limits = {"max_rows": 2 * self._micro, "max_tokens": config.max_tokens}
            packed.ref_log_prob = reference_log_prob(policy, packed, **limits, ranks=summing)
        else:
            if not torch.equal(reference["token_ids"], packed.token_ids):
                raise ValueError(
                    f"dpo: expected the pairs that the checkpoint's run began with "
                    f"({len(reference['token_ids'])} tokens), got others ({packed.tokens} tokens)"
                )
            packed.ref_log_prob = reference["log_prob"]
        self.reference = {"log_prob": packed.ref_log_prob, "token_ids": packed.token_ids}
        """float32 and int64 [N]: for a checkpoint."""

    def accumulate(self, backend: Backend, index: np.ndarray) -> tuple[PackedRows, torch.Tensor, list[torch.Tensor]]:
        config = self._config
        batch, packs = self._pairs.select(index, self._micro, config.max_tokens)
        denominator = float(len(index))

        def loss_of(part: PackedRows, output: ScoreOutput) -> tuple[torch.Tensor, torch.Tensor]:
            counted = part.loss_mask.float()
            compared = counted if part.weight is None else part.weight
            log_prob = by_side(part, output.log_prob.float() * compared)
            lengths = by_side(part, compared)
            losses, rewards = preference_loss(log_prob, by_side(part, part.ref_log_prob * compared), lengths, config)
            likelihood = (log_prob / lengths).detach()
            loss = losses.sum() / denominator
            if config.sft_coef:
                whole = by_side(part, output.log_prob.float())[:, 0] / by_side(part, counted)[:, 0]
                loss = loss - config.sft_coef * whole.sum() / denominator
            margin = rewards[:, 0] - rewards[:, 1]
            figures = [losses.detach(), margin, (margin > 0).float(), rewards[:, 0], rewards[:, 1], *likelihood.T]
            return loss, torch.stack([loss.detach(), *(x.sum() / denominator for x in figures)])

        parts, flags = accumulate(backend, batch, loss_of, packs=packs)
        return batch, parts, flags

    def figures(self, totals: torch.Tensor) -> dict[str, float]:
        return dict(zip(_FIGURES, totals.tolist(), strict=True))


_FIGURES = (
    "loss",
    "preference_loss",
    "margin",
    "accuracy",
    "chosen_reward",
    "rejected_reward",
    "chosen_log_prob",
    "rejected_log_prob",
)
"""Means over the pairs of a step: rewards and their margin are implicit ones (β·d), log-probs are per token, accuracy
is the share of pairs with a margin above 0."""


def reference_log_prob(
    policy: Policy,
    packed: PackedRows,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    ranks: Summing | None = None,
) -> torch.Tensor:
    """float32 [N]: log-probabilities under the policy with its adapters off, or as it is where it has none. With
    `ranks` each of them scores its part, and all have all."""
    limits = {"max_rows": max_rows, "max_tokens": max_tokens, "ranks": ranks}
    if hasattr(policy.model, "disable_adapter"):
        return Reference(policy).log_prob(packed, **limits)
    return policy.score_all(packed, **limits).log_prob


def train_dpo(
    backend: Backend,
    pairs: Sequence[RowPair],
    config: DPOConfig,
    *,
    evaluate: Callable[[], float] | None = None,
    on_step: Callback | None = None,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    state: OfflineState | None = None,
    dump_folder: Path | None = None,
) -> OfflineResult:
    """DPO on `pairs`, from the policy as it is; the other arguments are `train_offline`'s."""
    objective = DPOObjective(
        backend.policy, pairs, config, backend.world_size, gradient_accumulation_steps, summing=backend
    )
    return train_offline(
        backend, objective, config, evaluate=evaluate, on_step=on_step, seed=seed, state=state, dump_folder=dump_folder
    )
