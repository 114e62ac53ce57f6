"""Supervised fine-tuning on rows: each trainable token's negative log-likelihood, averaged over the whole mini-batch.

policy = Policy(model)
config = SFTConfig(epochs=10, batch_size=16, learning_rate=1e-3, eval_every=50)
backend = make_backend(policy, BackendConfig(), config.optimizer())
result = train_sft(backend, rows, config, evaluate=lambda: success_on_validation_tasks(policy))
# the policy now has the weights of result.best_step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import PackedRows, micro_batch_rows, pack
from manus_fast.learn.backend import Backend
from manus_fast.learn.guard import FiniteGuard
from manus_fast.learn.minibatch import accumulate, mini_batches, steps_per_epoch
from manus_fast.learn.optim import OptimizerConfig
from manus_fast.learn.policy import ScoreOutput
from manus_fast.learn.schedules import Schedule, schedule


@dataclass
class SFTConfig:
    """The `sft` block of a config."""

    epochs: int = 3
    batch_size: int = 16
    """Rows an optimizer step, over all ranks."""
    learning_rate: float | Schedule = 1e-4
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    eval_every: int = 100
    """Optimizer steps between validation checks."""
    patience: int | None = 3
    """Stop after this many checks in a row without a rise; null: never."""
    time_limit: float | None = None
    """Seconds of training (validation not counted) after which to stop; null: none."""
    max_tokens: int | None = None
    """Tokens a micro-batch may hold, besides the row limit."""
    share_prefixes: bool = False
    """Compute what rows of a mini-batch have in common once; rows of one group (tree, task) then stay together."""
    max_bad_steps: int = 3
    """Stop after this many optimizer steps in a row with a loss or gradient that is not finite."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "eval_every", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"sft.{name}: expected an integer >= 1, got {getattr(self, name)}")
        for name in ("patience", "time_limit", "max_tokens"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"sft.{name}: expected null or a number above 0, got {getattr(self, name)}")
        for name in ("weight_decay", "max_grad_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"sft.{name}: expected a number >= 0, got {getattr(self, name)}")
        schedule(self.learning_rate, "sft.learning_rate")

    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)


@dataclass
class SFTState:
    """Where a run stands: what a checkpoint needs besides the backend's tensors. `best` is tensors, the rest JSON."""

    step: int = 0
    seconds: float = 0.0
    """Spent training, without validation."""
    best_score: float | None = None
    best_step: int = 0
    checks_without_rise: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)
    """(step, score) of every check."""
    guard: dict[str, int] = field(default_factory=dict)
    best: dict[str, torch.Tensor] | None = None
    """float32 weights of the best check, on the CPU."""

    def scalars(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "best"}

    @classmethod
    def of(cls, scalars: dict[str, Any], best: dict[str, torch.Tensor] | None) -> SFTState:
        history = [(int(step), float(score)) for step, score in scalars["history"]]
        return cls(**{**scalars, "history": history}, best=best)


@dataclass
class SFTResult:
    steps: int
    stopped: str
    """epochs | patience | time."""
    best_step: int
    """Step whose weights the policy has now: the best check's, or the last step's where nothing was checked."""
    best_score: float | None
    history: list[tuple[int, float]]
    rows: int
    dropped: int
    """Rows without a trainable token, which were left out."""


def check_rows(rows: Sequence[Row], config: SFTConfig) -> list[Row]:
    """The rows with a trainable token. Raises ValueError where there are none, or fewer than `batch_size`."""
    kept = [row for row in rows if row.loss_mask.any()]
    if not kept:
        raise ValueError(f"sft: expected at least one row with a trainable token, got none in {len(rows)} rows")
    if config.batch_size > len(kept):
        raise ValueError(f"sft.batch_size: expected at most the {len(kept)} rows there are, got {config.batch_size}")
    return kept


def train_sft(
    backend: Backend,
    rows: Sequence[Row],
    config: SFTConfig,
    *,
    evaluate: Callable[[], float] | None = None,
    on_step: Callable[[SFTState, dict[str, float]], None] | None = None,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    state: SFTState | None = None,
    dump_folder: Path | None = None,
) -> SFTResult:
    """Trains until the epochs, the patience or the time are used up, then takes the best check's weights back.

    Args:
        backend: optimises its policy.
        rows: training rows; each trainable token weighs the same.
        evaluate: validation score of the policy as it is, larger is better, called every `config.eval_every` steps.
        on_step: called after every step (and its check) with the state and {"sft/loss": …, …}: logging, checkpoints.
        seed: of the order of rows.
        state: continue from here (weights and optimizer are the backend's to restore).
        dump_folder: where batches of skipped steps are saved.

    Raises:
        ValueError: no trainable rows, or fewer than `batch_size`.
        NonFiniteError: too many steps in a row with a loss or gradient that is not finite.
    """
    kept = check_rows(rows, config)
    micro_rows = micro_batch_rows(
        config.batch_size, backend.world_size, gradient_accumulation_steps, key="sft.batch_size"
    )
    packed = pack(kept, config.share_prefixes)
    state = state or SFTState()
    guard = FiniteGuard(config.max_bad_steps, dump_folder)
    if state.guard:
        guard.load_state_dict(state.guard)
    per_epoch = steps_per_epoch(len(kept), config.batch_size)
    total = config.epochs * per_epoch
    rate = schedule(config.learning_rate, "sft.learning_rate")
    stopped = "epochs"
    while state.step < total:
        if config.patience is not None and state.checks_without_rise >= config.patience:
            stopped = "patience"
            break
        if config.time_limit is not None and state.seconds >= config.time_limit:
            stopped = "time"
            break
        started = time.perf_counter()
        epoch, at = divmod(state.step, per_epoch)
        index = mini_batches(len(kept), config.batch_size, seed, epoch, groups=packed.groups)[at]
        stats = _step(backend, packed, index, config, guard, micro_rows, rate.at(state.step / total), state.step)
        state.step += 1
        state.guard = guard.state_dict()
        state.seconds += _mean(backend, time.perf_counter() - started)
        stats |= {"sft/epoch": state.step / per_epoch, "sft/seconds": state.seconds}
        if evaluate is not None and (state.step % config.eval_every == 0 or state.step == total):
            stats["sft/validation"] = _check(state, float(evaluate()), backend)
        if on_step is not None:
            on_step(state, stats)
    if state.best is not None and state.best_step != state.step:
        backend.load_weights(state.best)
    return SFTResult(
        steps=state.step,
        stopped=stopped,
        best_step=state.best_step if state.best_score is not None else state.step,
        best_score=state.best_score,
        history=list(state.history),
        rows=len(kept),
        dropped=len(rows) - len(kept),
    )


def _step(
    backend: Backend,
    packed: PackedRows,
    index: np.ndarray,
    config: SFTConfig,
    guard: FiniteGuard,
    micro_rows: int,
    learning_rate: float,
    step: int,
) -> dict[str, float]:
    batch = packed.select(index)
    denominator = torch.tensor(float(batch.trainable_tokens), device=backend.policy.device)

    def loss_of(_: PackedRows, output: ScoreOutput) -> tuple[torch.Tensor, torch.Tensor]:
        loss = -output.log_prob.sum() / denominator
        return loss, loss.detach()

    losses, flags = accumulate(backend, batch, loss_of, max_rows=micro_rows, max_tokens=config.max_tokens)
    norm = backend.gradient_norm()
    if not guard.check(flags, norm, backend, batch, step=step):
        return {"sft/skipped_steps": float(guard.skipped)}
    backend.step(learning_rate, norm)
    return {
        "sft/loss": float(backend.sum(losses.sum())),
        "sft/grad_norm": float(norm),
        "sft/learning_rate": learning_rate,
        "sft/tokens": float(batch.tokens),
        "sft/skipped_steps": float(guard.skipped),
        **{f"sft/{name}": value for name, value in backend.policy.work.take().items()},
    }


def _mean(backend: Backend, x: float) -> float:
    """The mean over ranks, the same number on each: clocks differ, and all have to stop at the same step."""
    return float(backend.sum(torch.tensor(x, dtype=torch.float64, device=backend.policy.device))) / backend.world_size


def _check(state: SFTState, score: float, backend: Backend) -> float:
    """Records a validation score; keeps the weights when it is the best so far."""
    state.history.append((state.step, score))
    if state.best_score is None or score > state.best_score:
        state.best_score, state.best_step, state.checks_without_rise = score, state.step, 0
        state.best = {name: w.detach().to("cpu", copy=True) for name, w in backend.named_masters()}
    else:
        state.checks_without_rise += 1
    return score
