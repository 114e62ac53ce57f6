"""Training on a fixed set of items (rows, pairs): the loop that SFT, DPO and the reward model share.

    result = train_offline(backend, objective, config, evaluate=…)

An objective says what an item is and what a mini-batch of items costs; epochs, order, schedules, bad steps, validation,
early stop and what a checkpoint needs are here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from manus_fast.data.packing import PackedRows
from manus_fast.learn.backend import Backend
from manus_fast.learn.guard import FiniteGuard
from manus_fast.learn.minibatch import mini_batches, steps_per_epoch
from manus_fast.learn.optim import OptimizerConfig
from manus_fast.learn.schedules import Schedule, schedule


@dataclass
class OfflineConfig:
    """Keys that the blocks `sft`, `dpo` and `reward_model` share."""

    block: ClassVar[str] = ""
    """Name of the block, for messages and figures."""

    epochs: int = 3
    batch_size: int = 16
    """Items (rows for SFT, pairs for DPO and the reward model) an optimizer step, over all ranks."""
    learning_rate: float | Schedule = 1e-4
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    eval_every: int = 100
    """Optimizer steps between validation checks."""
    check_start: bool = False
    """Check before the first step too: where all that follows is worse than the start, the start is what is kept."""
    patience: int | None = 3
    """Stop after this many checks in a row without a rise; null: never."""
    stop_at: float | None = None
    """Stop once a check reaches this score; null: never. Imitation that ends early leaves what follows more entropy."""
    time_limit: float | None = None
    """Seconds of steps and checks after which to stop, with a last check; null: none."""
    max_tokens: int | None = None
    """Tokens a micro-batch may hold, besides the limit on its items."""
    max_bad_steps: int = 3
    """Stop after this many optimizer steps in a row with a loss or gradient that is not finite."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "eval_every", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.block}.{name}: expected an integer >= 1, got {getattr(self, name)}")
        for name in ("patience", "time_limit", "max_tokens"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{self.block}.{name}: expected null or a number above 0, got {getattr(self, name)}")
        for name in ("weight_decay", "max_grad_norm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{self.block}.{name}: expected a number >= 0, got {getattr(self, name)}")
        if self.stop_at is not None and math.isnan(self.stop_at):
            raise ValueError(f"{self.block}.stop_at: expected null or a number, got {self.stop_at}")
        schedule(self.learning_rate, f"{self.block}.learning_rate")

    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)


@dataclass
class OfflineState:
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
    def of(cls, scalars: dict[str, Any], best: dict[str, torch.Tensor] | None) -> OfflineState:
        history = [(int(step), float(score)) for step, score in scalars["history"]]
        return cls(**{**scalars, "history": history}, best=best)


@dataclass
class OfflineResult:
    """How training ended."""

    steps: int
    stopped: str
    """epochs | patience | score | time."""
    best_step: int
    """Step whose weights the policy has now: the best check's, or the last step's where nothing was checked."""
    best_score: float | None
    history: list[tuple[int, float]]
    items: int
    dropped: int
    """Items without a trainable token, which were left out."""


def check_count(config: OfflineConfig, count: int, unit: str) -> int:
    """`count`, the items that there are, named by `unit`. Raises ValueError where they do not fill one mini-batch."""
    if config.batch_size > count:
        raise ValueError(
            f"{config.block}.batch_size: expected at most the {count} {unit} there are, got {config.batch_size}"
        )
    return count


class Objective(Protocol):
    """What is learnt from, and how."""

    count: int
    """Items, those left out not counted."""
    dropped: int
    groups: np.ndarray | None
    """int64 [count]: items of one group stay in one mini-batch where they can; None: each goes alone."""

    def accumulate(self, backend: Backend, index: np.ndarray) -> tuple[PackedRows, torch.Tensor, list[torch.Tensor]]:
        """Adds up the gradient of the mean loss over the items `index`, a mini-batch: this rank's micro-batches of it.

        Returns:
            The rows, statistics [this rank's micro-batches, …] that are summed over micro-batches and ranks, and the
            flags of `FiniteGuard`.
        """
        ...

    def figures(self, totals: torch.Tensor) -> dict[str, float]:
        """Named figures of a step from the summed statistics; "loss" is among them."""
        ...


Callback = Callable[[OfflineState, dict[str, float]], None]


def train_offline(
    backend: Backend,
    objective: Objective,
    config: OfflineConfig,
    *,
    evaluate: Callable[[], float] | None = None,
    on_step: Callback | None = None,
    on_end: Callable[[], None] | None = None,
    seed: int = 0,
    state: OfflineState | None = None,
    dump_folder: Path | None = None,
) -> OfflineResult:
    """Trains until the epochs, the patience or the time are used up or `stop_at` is reached, then takes back the
    weights of the best check.

    Args:
        backend: optimises its policy.
        evaluate: validation score of the policy as it is, larger is better, called every `config.eval_every` steps and
            after the last one, be it the epochs' or the time's; with `config.check_start` before the first one too.
        on_step: called after every step (and its check) with the state and {"<block>/loss": …, …}; after a check before
            the first one with its score alone.
        on_end: called once training is over, before the weights of the best check are taken back: what is saved then
            can be gone on from, with an optimizer's state that belongs to the weights.
        seed: of the order of items.
        state: continue from here (weights and optimizer are the backend's to restore).
        dump_folder: where batches of skipped steps are saved.

    Raises:
        NonFiniteError: too many steps in a row with a loss or gradient that is not finite.
    """
    block, count = config.block, objective.count
    state = state or OfflineState()
    guard = FiniteGuard(config.max_bad_steps, dump_folder)
    if state.guard:
        guard.load_state_dict(state.guard)
    per_epoch = steps_per_epoch(count, config.batch_size)
    total = config.epochs * per_epoch
    rate = schedule(config.learning_rate, f"{block}.learning_rate")
    stopped = "epochs"

    def check() -> float:
        started = time.perf_counter()
        score = _check(state, float(evaluate()), backend)
        state.seconds += _mean(backend, time.perf_counter() - started)
        return score

    if config.check_start and evaluate is not None and state.step == 0:
        stats = {f"{block}/validation": check()}
        if on_step is not None:
            on_step(state, stats)
    while state.step < total:
        if config.patience is not None and state.checks_without_rise >= config.patience:
            stopped = "patience"
            break
        if config.stop_at is not None and state.best_score is not None and state.best_score >= config.stop_at:
            stopped = "score"
            break
        if config.time_limit is not None and state.seconds >= config.time_limit:
            stopped = "time"
            break
        started = time.perf_counter()
        epoch, at = divmod(state.step, per_epoch)
        index = mini_batches(count, config.batch_size, seed, epoch, groups=objective.groups)[at]
        stats = _step(backend, objective, index, block, guard, rate.at(state.step / total), state.step)
        state.step += 1
        state.guard = guard.state_dict()
        state.seconds += _mean(backend, time.perf_counter() - started)
        stats |= {f"{block}/epoch": state.step / per_epoch, f"{block}/seconds": state.seconds}
        last = state.step == total or (config.time_limit is not None and state.seconds >= config.time_limit)
        if evaluate is not None and (last or state.step % config.eval_every == 0):
            stats[f"{block}/validation"] = check()
        if on_step is not None:
            on_step(state, stats)
    if on_end is not None:
        on_end()
    if state.best is not None and state.best_step != state.step:
        backend.load_weights(state.best)
    return OfflineResult(
        steps=state.step,
        stopped=stopped,
        best_step=state.best_step if state.best_score is not None else state.step,
        best_score=state.best_score,
        history=list(state.history),
        items=count,
        dropped=objective.dropped,
    )


def _step(
    backend: Backend,
    objective: Objective,
    index: np.ndarray,
    block: str,
    guard: FiniteGuard,
    learning_rate: float,
    step: int,
) -> dict[str, float]:
    batch, parts, flags = objective.accumulate(backend, index)
    norm = backend.gradient_norm()
    if not guard.check(flags, norm, backend, batch, step=step):
        return {f"{block}/skipped_steps": float(guard.skipped)}
    backend.step(learning_rate, norm)
    figures = objective.figures(backend.sum(parts.sum(0)))
    return {
        **{f"{block}/{name}": value for name, value in figures.items()},
        f"{block}/grad_norm": float(norm),
        f"{block}/learning_rate": learning_rate,
        f"{block}/tokens": float(batch.tokens),
        f"{block}/skipped_steps": float(guard.skipped),
    }


def _mean(backend: Backend, x: float) -> float:
    """The mean over ranks, the same number on each: clocks differ, and all have to stop at the same step."""
    return float(backend.sum(torch.tensor(x, dtype=torch.float64, device=backend.policy.device))) / backend.world_size


def _check(state: OfflineState, score: float, backend: Backend) -> float:
    """Records a validation score; keeps the weights when it is the best so far, or as good as the start's. A check of
    which nothing came, as where every episode failed, has nan: it is no rise, and whatever comes after it is one."""
    state.history.append((state.step, score))
    best = state.best_score
    if not math.isnan(score) and (best is None or score > best or (score == best and state.best_step == 0)):
        state.best_score, state.best_step, state.checks_without_rise = score, state.step, 0
        state.best = {name: w.detach().to("cpu", copy=True) for name, w in backend.named_masters()}
    else:
        state.checks_without_rise += 1
    return score
