"""What every trainer does with a mini-batch: order it, cut it into micro-batches, add up their gradients.

With several ranks each of them is given the whole mini-batch, cuts it alike and works through its own micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from manus_fast.data.packing import PackedRows, own_packs
from manus_fast.learn.backend import Backend
from manus_fast.learn.guard import FiniteGuard
from manus_fast.learn.policy import ScoreOutput


def mini_batches(rows: int, size: int, *seed: int, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """All of `rows` row numbers in an order fixed by `seed`, cut into mini-batches as near to `size` rows as equal
    shares allow, so that no step is made of a few left-over rows.

    Args:
        groups: int64 [rows]: rows of one group stay together, and cuts move to the nearest end of a group, save where
            that would leave a mini-batch empty.
    """
    rng = np.random.default_rng(list(seed))
    count = steps_per_epoch(rows, size)
    if groups is None:
        return np.array_split(rng.permutation(rows), count)
    _, member = np.unique(groups, return_inverse=True)
    place = rng.permutation(member.max() + 1)[member]
    order = np.lexsort((rng.permutation(rows), place))
    ends = np.flatnonzero(np.diff(place[order])) + 1
    cuts = [0]
    for number in range(1, count):
        even = round(number * rows / count)
        near = int(ends[np.abs(ends - even).argmin()]) if len(ends) else even
        latest = rows - (count - number)  # leaves a row for each mini-batch to come
        cuts.append(near if cuts[-1] < near <= latest else min(max(even, cuts[-1] + 1), latest))
    return [order[a:b] for a, b in zip(cuts, [*cuts[1:], rows], strict=True)]


def steps_per_epoch(rows: int, size: int) -> int:
    """Mini-batches in a pass over `rows` rows, at least one."""
    return max(1, (2 * rows + size) // (2 * size))


def accumulate(
    backend: Backend,
    batch: PackedRows,
    loss_of: Callable[[PackedRows, Any], tuple[torch.Tensor, torch.Tensor]],
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    packs: Sequence[np.ndarray] | None = None,
    score: Callable[[PackedRows], Any] | None = None,
    entropy: bool = False,
    value: bool = False,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Scores `batch` in micro-batches and adds their gradients up.

    Args:
        batch: a mini-batch, on any device, the same on every rank.
        loss_of: from a micro-batch and its scores to its loss, divided by the mini-batch's denominator, and a tensor
            of statistics.
        max_rows, max_tokens: limits of a micro-batch.
        packs: row numbers of each micro-batch, where rows belong together; None: by the limits alone.
        score: what `loss_of` gets for a micro-batch; None: the policy's `score` with the options below.

    Returns:
        The statistics stacked, [this rank's micro-batches, …], and `FiniteGuard.flags` of each of them.
    """
    stats, flags = [], []
    if packs is None:
        packs = batch.micro_batches(max_rows=max_rows, max_tokens=max_tokens, multiple=backend.world_size)
    if score is None:

        def score(part: PackedRows) -> ScoreOutput:
            return backend.policy.score(part, entropy=entropy, value=value, temperature=temperature)

    own = own_packs(packs, backend.rank, backend.world_size)
    for number, (rows, counts) in enumerate(own):
        with contextlib.nullcontext() if number == len(own) - 1 else backend.no_sync():
            part = batch.select(rows).to(backend.policy.device)
            output = score(part)
            loss, measured = loss_of(part, output)
            if not counts:
                loss, measured = loss * 0.0, measured * 0.0
            backend.backward(loss)
        stats.append(measured)
        flags.append(FiniteGuard.flags(output if isinstance(output, ScoreOutput) else None, loss))
    return torch.stack(stats), flags
