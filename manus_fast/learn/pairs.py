"""Pairs of a chosen and a rejected side, packed once; both sides of a pair always share a micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import PackedRows, micro_batches, pack
from manus_fast.data.preferences import RowPair


class PackedPairs:
    """P pairs. In `packed` the field `episode` of a row is 2 · pair, plus 1 on the rejected side.

    Args:
        pairs: each side with one row or more.
        block: name of the config block, for messages.

    Raises:
        ValueError: no pairs, or a side without a trainable token.
    """

    def __init__(self, pairs: Sequence[RowPair], block: str):
        if not pairs:
            raise ValueError(f"{block}: expected at least one preference pair, got none")
        rows: list[Row] = []
        starts = [0]
        for number, pair in enumerate(pairs):
            for side, kept in enumerate((pair.chosen, pair.rejected)):
                if not any(row.loss_mask.any() for row in kept):
                    word = ("chosen", "rejected")[side]
                    raise ValueError(f"pairs[{number}].{word}: expected a trainable token, got none")
                rows += [dataclasses.replace(row, episode=2 * number + side) for row in kept]
            starts.append(len(rows))
        self.packed = pack(rows)
        self.starts = np.asarray(starts, np.int64)
        """int64 [P+1]: rows of pair p are [starts[p], starts[p+1])."""
        self.lengths = np.add.reduceat(self.packed.lengths, self.starts[:-1])
        """int64 [P]: tokens of each pair."""

    @property
    def count(self) -> int:
        return len(self.lengths)

    def select(
        self, index: np.ndarray, max_pairs: int | None = None, max_tokens: int | None = None
    ) -> tuple[PackedRows, list[np.ndarray]]:
        """The rows of the pairs `index`, and which of those rows make up each micro-batch of at most so many pairs."""
        counts = self.starts[index + 1] - self.starts[index]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = np.concatenate([np.arange(self.starts[p], self.starts[p + 1]) for p in index])
        parts = micro_batches(self.lengths[index], max_rows=max_pairs, max_tokens=max_tokens)
        packs = [np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in part]) for part in parts]
        return self.packed.select(rows), packs


def by_side(part: PackedRows, values: torch.Tensor) -> torch.Tensor:
    """Sums of per-token values over each side of each pair in a micro-batch: [N] → [P, 2], chosen first."""
    return row_sums_by_side(part, values.new_zeros(part.rows).index_add(0, part.row, values))


def row_sums_by_side(part: PackedRows, values: torch.Tensor) -> torch.Tensor:
    """Sums of per-row values over each side of each pair in a micro-batch: [R] → [P, 2], chosen first."""
    pairs, local = torch.unique(part.episode // 2, return_inverse=True)
    return values.new_zeros(2 * len(pairs)).index_add(0, 2 * local + part.episode % 2, values).view(-1, 2)
