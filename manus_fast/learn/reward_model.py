"""Training a reward model on preference pairs: Bradley–Terry on both heads, and calibration by known outcomes.

For a pair with scores r(chosen), r(rejected) the loss is −log σ(r(chosen) − r(rejected)) (Bradley & Terry, 1952; as a
reward model's loss: Ouyang et al., 2022, equation 1). The outcome head scores the last token of a whole episode. The
step head's score of a side is its mean over every place where a conversation may stand: after each reply, and before
each reply but the side's first, which both sides share. Where a pair says what its sides came to, cross-entropy of
both heads with that (Cobbe et al., 2021) makes σ(score) a probability of success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from manus_fast.data.packing import PackedRows, micro_batch_rows
from manus_fast.data.preferences import RowPair
from manus_fast.learn.backend import Backend
from manus_fast.learn.minibatch import accumulate
from manus_fast.learn.offline import OfflineConfig, check_count
from manus_fast.learn.pairs import PackedPairs
from manus_fast.learn.schedules import Schedule
from manus_fast.rewards.model import RewardModel


@dataclass
class RewardModelConfig(OfflineConfig):
    """The `reward_model` block of a config: how one is trained (an item is a pair), and which one is used."""

    block: ClassVar[str] = "reward_model"

    epochs: int = 2
    batch_size: int = 32
    learning_rate: float | Schedule = 1e-5
    step_coef: float = 1.0
    """Weight of the step head's losses; 0 leaves that head untrained."""
    outcome_coef: float = 1.0
    """Weight of the cross-entropy with known outcomes, beside Bradley–Terry's loss."""
    held_out: float = 0.1
    """Share of the prompts whose pairs validate: their accuracy decides which weights are kept. 0: none."""
    max_length: int | None = None
    """Tokens that a row may have; pairs with a longer one are left out and counted. Null: any."""
    path: str | None = None
    """Folder of a trained reward model, for `rewards.reward_model` and `search.judge`."""
    pays: str = "probability"
    """What `rewards.reward_model` is: probability, σ of the outcome head, or logit, its score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("step_coef", "outcome_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"reward_model.{name}: expected a number >= 0, got {getattr(self, name)}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"reward_model.held_out: expected a number in [0, 1), got {self.held_out}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"reward_model.max_length: expected null or an integer >= 2, got {self.max_length}")
        if self.pays not in ("probability", "logit"):
            raise ValueError(f"reward_model.pays: expected probability or logit, got {self.pays!r}")


@dataclass
class Places:
    """Where the heads look at the rows of a few pairs. `side` is 2 · pair, plus 1 on the rejected side."""

    outcome: torch.Tensor
    """int64 [2P]: the last trainable token of each side, in the order of sides."""
    step: torch.Tensor
    """int64 [M]."""
    side: torch.Tensor
    """int64 [M]: of each entry of `step`."""


def places(part: PackedRows, pairs: int) -> Places:
    """The places of a micro-batch whose rows are in the order of sides (`PackedPairs.select`), on its device."""
    mask, turn = part.loss_mask.cpu().numpy(), part.turn_id.cpu().numpy()
    row = part.row.cpu().numpy()
    _, pair = np.unique(part.episode.cpu().numpy() // 2, return_inverse=True)
    side = (2 * pair + part.episode.cpu().numpy() % 2)[row]
    at = np.flatnonzero(mask)
    # A reply begins where the token before is off the mask, of another turn or of another row.
    begins = ~mask[at - 1] | (turn[at - 1] != turn[at]) | (row[at - 1] != row[at])
    starts = at[begins]
    ends = at[np.append(begins[1:], True)]
    last = np.zeros(2 * pairs, np.int64)
    np.maximum.at(last, side[at], at)
    first = np.full(2 * pairs, len(mask), np.int64)
    np.minimum.at(first, side[starts], starts)
    later = starts[first[side[starts]] != starts] - 1
    step = np.concatenate([ends, later])
    return Places(*(torch.from_numpy(x).to(part.device) for x in (last, step, side[step])))


def bradley_terry(scores: torch.Tensor) -> torch.Tensor:
    """−log σ(chosen − rejected): [P, 2] → [P]."""
    return -F.logsigmoid(scores[:, 0] - scores[:, 1])


class RewardObjective:
    """Mean loss over pairs, whatever the micro-batches and the packing.

    Args:
        model: what is trained; `heads` of it is set.
        pairs: step-level ones train the step head alone, for their sides are no whole episodes.

    Raises:
        ValueError: no pairs or fewer than a batch, a batch size that does not divide, or nothing that trains a head.
    """

    def __init__(
        self,
        model: RewardModel,
        pairs: Sequence[RowPair],
        config: RewardModelConfig,
        ranks: int,
        gradient_accumulation_steps: int = 1,
    ):
        self._model, self._config = model, config
        self._pairs = PackedPairs(pairs, "reward_model")
        self.count, self.dropped, self.groups = check_count(config, len(pairs), "pairs"), 0, None
        self._micro = micro_batch_rows(
            config.batch_size, ranks, gradient_accumulation_steps, key="reward_model.batch_size"
        )
        self._whole = torch.tensor([pair.level == "trajectory" for pair in pairs])
        known = [pair.outcome is not None for pair in pairs]
        self._known = torch.tensor(known)
        self._outcome = torch.tensor([pair.outcome or (0.0, 0.0) for pair in pairs], dtype=torch.float32)
        model.heads = (*(("outcome",) if self._whole.any() else ()), *(("step",) if config.step_coef else ()))
        if not model.heads:
            raise ValueError("reward_model.step_coef: expected a number above 0 with pairs of single steps, got 0")

    def accumulate(self, backend: Backend, index: np.ndarray) -> tuple[PackedRows, torch.Tensor, list[torch.Tensor]]:
        batch, packs = self._pairs.select(index, self._micro, self._config.max_tokens)
        denominator = float(len(index))

        def loss_of(part: PackedRows, measured: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            losses, figures = measured
            loss = losses.sum() / denominator
            return loss, torch.cat([loss.detach()[None], figures / denominator])

        parts, flags = accumulate(backend, batch, loss_of, packs=packs, score=self._measure)
        return batch, parts, flags

    def figures(self, totals: torch.Tensor) -> dict[str, float]:
        """Means over the pairs of a step; accuracies and margins over those pairs that have them."""
        loss, whole, accuracy, margin, step_accuracy, step_margin = totals.tolist()
        found = {"loss": loss, "step_accuracy": step_accuracy, "step_margin": step_margin}
        return found | ({"accuracy": accuracy / whole, "margin": margin / whole} if whole else {})

    def _measure(self, part: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [P] of a micro-batch's pairs, and [5] sums: whole pairs, and of both heads accuracy and margin."""
        config = self._config
        numbers = torch.unique(part.episode // 2).cpu()
        outcomes, steps = head_scores(self._model, part, len(numbers))
        whole, known, label = (x[numbers].to(part.device) for x in (self._whole, self._known, self._outcome))
        weight = whole.float()
        losses = weight * bradley_terry(outcomes) + config.step_coef * bradley_terry(steps.mean)
        if config.outcome_coef:
            entropy = F.binary_cross_entropy_with_logits(outcomes, label, reduction="none").mean(1)
            step_entropy = steps.cross_entropy(label).mean(1)
            calibration = weight * entropy + config.step_coef * step_entropy
            losses = losses + config.outcome_coef * known.float() * calibration
        sums = [weight.sum()]
        for scores, weights in ((outcomes.detach(), weight), (steps.mean.detach(), torch.ones_like(weight))):
            gap = scores[:, 0] - scores[:, 1]
            sums += [((gap > 0).float() * weights).sum(), (gap * weights).sum()]
        return losses, torch.stack(sums)


@dataclass
class StepScores:
    """The step head over the places of P pairs."""

    score: torch.Tensor
    """[M]."""
    side: torch.Tensor
    """int64 [M]."""
    pairs: int

    def _per_side(self, values: torch.Tensor) -> torch.Tensor:
        sums = values.new_zeros(2 * self.pairs).index_add(0, self.side, values)
        return (sums / torch.bincount(self.side, minlength=2 * self.pairs)).view(-1, 2)

    @property
    def mean(self) -> torch.Tensor:
        """[P, 2]: of each side."""
        return self._per_side(self.score)

    def cross_entropy(self, label: torch.Tensor) -> torch.Tensor:
        """[P, 2]: of each side's places with what the side came to."""
        target = label.flatten()[self.side]
        return self._per_side(F.binary_cross_entropy_with_logits(self.score, target, reduction="none"))


def head_scores(model: RewardModel, part: PackedRows, pairs: int) -> tuple[torch.Tensor, StepScores]:
    """The outcome head of each side, [P, 2] with the chosen one first, and the step head of its places."""
    found = places(part, pairs)
    where = torch.cat([found.outcome, found.step])
    logits = model.logits(part.token_ids, part.position_ids, part.cu_seqlens, part.max_length, where)
    outcome = logits[: 2 * pairs, 0].view(-1, 2)
    return outcome, StepScores(logits[2 * pairs :, 1], found.side, pairs)


@torch.no_grad()
def accuracy(model: RewardModel, pairs: Sequence[RowPair], max_pairs: int = 64) -> dict[str, float]:
    """Share of pairs whose chosen side scores higher, by head: outcome over whole episodes, step over all pairs."""
    packed = PackedPairs(pairs, "reward_model")
    right = {"outcome": 0, "step": 0}
    batch, packs = packed.select(np.arange(packed.count), max_pairs)
    whole = torch.tensor([pair.level == "trajectory" for pair in pairs])
    for rows in packs:
        part = batch.select(rows).to(model.device)
        numbers = torch.unique(part.episode // 2).cpu()
        outcomes, steps = head_scores(model, part, len(numbers))
        right["outcome"] += int(((outcomes[:, 0] > outcomes[:, 1]).cpu() & whole[numbers]).sum())
        right["step"] += int((steps.mean[:, 0] > steps.mean[:, 1]).sum())
    counts = {"outcome": int(whole.sum()), "step": len(pairs)}
    return {name: right[name] / counts[name] for name in model.heads if counts[name]}


def held_out(pairs: Sequence[RowPair], share: float) -> tuple[list[RowPair], list[RowPair]]:
    """(for training, for validation): pairs of one prompt go to one side, so that no task is in both.

    The last prompts, in the order in which they first come, are held out.
    """
    prompts: dict[bytes, list[RowPair]] = {}
    for pair in pairs:
        row = pair.chosen[0]
        start = int(np.flatnonzero(row.loss_mask)[0])
        prompts.setdefault(row.token_ids[:start].tobytes(), []).append(pair)
    groups = list(prompts.values())
    cut = len(groups) - int(share * len(groups))
    train, rest = ([pair for group in part for pair in group] for part in (groups[:cut], groups[cut:]))
    return train, rest
