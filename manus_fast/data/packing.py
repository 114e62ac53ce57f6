"""Rows laid end to end: how training batches are stored, cut into mini-batches and spread over micro-batches.

No token is spent on padding. A `PackedRows` is a table of rows over one token axis; `select` takes rows out of it in
any order, so one collection is packed once and every mini-batch and micro-batch is a gather from it.

    batch = pack(rows)                                          # N tokens, R rows
    for index in micro_batches(batch.lengths, max_rows=8, max_tokens=16384):
        part = batch.select(index).to("cuda")
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from manus_fast.agent.trajectory import Row
from manus_fast.data.prefixes import prefix_nodes, tree_micro_batches


@dataclass
class PackedRows:
    """R rows, N tokens. Entry t of a token array describes token t, predicted from position t-1; entries at row starts
    are 0 / False. Fields that default to None are filled in as a collection is scored."""

    token_ids: torch.Tensor
    """int64 [N]."""
    position_ids: torch.Tensor
    """int64 [N], from 0 in each row."""
    loss_mask: torch.Tensor
    """bool [N]."""
    turn_id: torch.Tensor
    """int32 [N], -1 off turns."""
    rollout_log_prob: torch.Tensor
    """float32 [N]: what the engine reported when it sampled the token."""
    reward: torch.Tensor
    """float32 [N]."""
    row: torch.Tensor
    """int64 [N]: the row of this batch that a token belongs to."""
    cu_seqlens: torch.Tensor
    """int32 [R+1]: row r is [cu_seqlens[r], cu_seqlens[r+1])."""
    episode: torch.Tensor
    """int64 [R]: index of the row's episode in the collection."""
    terminated: torch.Tensor
    """bool [R]: False when a limit cut the row."""
    trainable: torch.Tensor
    """int64 [M]: positions where `loss_mask` is True, found on the host so that a device is never waited for."""
    lengths: np.ndarray
    """int64 [R], on the host."""
    node: np.ndarray | None = None
    """int64 [N], on the host: the node of each token in the tree of common beginnings (data/prefixes.py); None where
    each row is computed on its own."""
    groups: np.ndarray | None = None
    """int64 [R], on the host: rows of one group are likely to begin alike; None where it does not matter."""
    old_log_prob: torch.Tensor | None = None
    """float32 [N]: under the policy as it was when the update began."""
    ref_log_prob: torch.Tensor | None = None
    """float32 [N]: under the reference policy."""
    value: torch.Tensor | None = None
    """float32 [N]: V before the token, at the old weights."""
    last_value: torch.Tensor | None = None
    """float32 [R]: V after the row's last token, at the old weights."""
    advantage: torch.Tensor | None = None
    """float32 [N]."""
    returns: torch.Tensor | None = None
    """float32 [N]: target of the value head."""
    weight: torch.Tensor | None = None
    """float32 [N]: importance weight of the policy term; None means 1."""

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def trainable_tokens(self) -> int:
        return len(self.trainable)

    @property
    def max_length(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def to(self, device: torch.device | str) -> PackedRows:
        """The same batch on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: v.to(device, non_blocking=True) for k, v in moved.items() if isinstance(v, torch.Tensor)}
        other = replace(self, **tensors)
        other._mask = self._mask
        return other

    def select(self, index: Sequence[int] | np.ndarray) -> PackedRows:
        """The batch made of the rows `index`, in that order.

        Raises:
            ValueError: an index outside [0, R).
        """
        index = np.asarray(index, np.int64)
        if len(index) and (index.min() < 0 or index.max() >= self.rows):
            raise ValueError(f"index: expected rows in [0, {self.rows}), got {int(index.min())}..{int(index.max())}")
        starts = np.concatenate([[0], np.cumsum(self.lengths)])[:-1]
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        source = np.repeat(starts[index], lengths) + within
        tokens, picked = self.send(source), self.send(index)
        changed: dict[str, object] = {}
        for name in _TOKEN_FIELDS:
            value = getattr(self, name)
            changed[name] = None if value is None else value[tokens]
        for name in _ROW_FIELDS:
            value = getattr(self, name)
            changed[name] = None if value is None else value[picked]
        mask = self.host_mask()[source]
        changed["row"] = self.send(np.repeat(np.arange(len(index)), lengths))
        changed["cu_seqlens"] = self.send(offsets.astype(np.int32))
        changed["trainable"] = self.send(np.flatnonzero(mask))
        changed["node"] = None if self.node is None else self.node[source]
        changed["groups"] = None if self.groups is None else self.groups[index]
        selected = replace(self, lengths=lengths, **changed)
        selected._mask = mask
        return selected

    def micro_batches(
        self, *, max_rows: int | None = None, max_tokens: int | None = None, multiple: int = 1
    ) -> list[np.ndarray]:
        """Row numbers of each micro-batch within the limits: `micro_batches`, or for rows that share beginnings
        `tree_micro_batches`."""
        if self.node is None:
            return micro_batches(self.lengths, max_rows=max_rows, max_tokens=max_tokens, multiple=multiple)
        return tree_micro_batches(self.node, self.lengths, max_rows=max_rows, max_tokens=max_tokens)

    def send(self, array: np.ndarray) -> torch.Tensor:
        """The array on this batch's device. Through pinned memory: a copy from elsewhere waits for queued kernels."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    _mask = None

    def host_mask(self) -> np.ndarray:
        """`loss_mask` on the host: bool [N]."""
        if self._mask is None:
            self._mask = self.loss_mask.cpu().numpy()
        return self._mask


_TOKEN_FIELDS = (
    "token_ids",
    "position_ids",
    "loss_mask",
    "turn_id",
    "rollout_log_prob",
    "reward",
    "old_log_prob",
    "ref_log_prob",
    "value",
    "advantage",
    "returns",
    "weight",
)
_ROW_FIELDS = ("episode", "terminated", "last_value")


def pack(rows: Sequence[Row], share_prefixes: bool = False) -> PackedRows:
    """Lays rows end to end, in order, on the CPU.

    Args:
        share_prefixes: have common beginnings of rows computed once, and rows of a group kept in one mini-batch.

    Raises:
        ValueError: no rows, a row without tokens, arrays of unequal length, or a trainable first token (nothing
            predicts it).
    """
    if not rows:
        raise ValueError("rows: expected at least one row to pack, got none")
    for number, row in enumerate(rows):
        length = len(row.token_ids)
        if length == 0:
            raise ValueError(f"rows[{number}]: expected at least one token, got none")
        for name in ("loss_mask", "turn_id", "log_prob", "reward"):
            if len(getattr(row, name)) != length:
                raise ValueError(f"rows[{number}].{name}: expected length {length}, got {len(getattr(row, name))}")
        if row.loss_mask[0]:
            raise ValueError(
                f"rows[{number}].loss_mask: expected False at position 0, which nothing predicts, got True"
            )
    lengths = np.asarray([len(row.token_ids) for row in rows], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"rows: expected fewer than 2^31 tokens in a batch, got {offsets[-1]}")

    def joined(name: str, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(row, name) for row in rows]).astype(dtype))

    mask = joined("loss_mask", np.bool_)
    number = np.repeat(np.arange(len(rows)), lengths)
    return PackedRows(
        token_ids=joined("token_ids", np.int64),
        position_ids=torch.from_numpy(np.arange(offsets[-1]) - offsets[number]),
        loss_mask=mask,
        turn_id=joined("turn_id", np.int32),
        rollout_log_prob=joined("log_prob", np.float32),
        reward=joined("reward", np.float32),
        row=torch.from_numpy(number),
        cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
        episode=torch.tensor([row.episode for row in rows], dtype=torch.int64),
        terminated=torch.tensor([row.terminated for row in rows], dtype=torch.bool),
        trainable=torch.from_numpy(np.flatnonzero(mask.numpy())),
        lengths=lengths,
        node=prefix_nodes(rows) if share_prefixes else None,
        groups=_groups(rows) if share_prefixes else None,
    )


def _groups(rows: Sequence[Row]) -> np.ndarray:
    return np.asarray([-1 - r if row.group is None else row.group for r, row in enumerate(rows)], np.int64)


def micro_batch_rows(batch_size: int, ranks: int, gradient_accumulation_steps: int, key: str = "ppo.batch_size") -> int:
    """Rows of one micro-batch on one rank: batch_size / (ranks × gradient_accumulation_steps).

    Raises:
        ValueError: it does not divide.
    """
    parts = ranks * gradient_accumulation_steps
    if batch_size % parts:
        raise ValueError(
            f"{key}: expected a multiple of ranks × gradient_accumulation_steps = {ranks} × "
            f"{gradient_accumulation_steps} = {parts}, got {batch_size}"
        )
    return batch_size // parts


def micro_batches(
    lengths: np.ndarray | Sequence[int],
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    multiple: int = 1,
) -> list[np.ndarray]:
    """Spreads rows over as few packs as the limits allow, with token counts as even as a greedy order makes them.

    Longest rows go first, each to the lightest pack that has room (Graham, "Bounds on multiprocessing timing
    anomalies", 1969); ties go to the first pack, so the result depends on `lengths` alone.

    Args:
        lengths: [R] tokens per row.
        max_rows: rows a pack may hold.
        max_tokens: tokens a pack may hold; a single row longer than that gets a pack of its own.
        multiple: the number of packs is one of this number (of ranks, which then have equally many), where there are
            rows enough.

    Returns:
        Row indices per pack, int64, ascending inside each pack; every row exactly once.
    """
    lengths = np.asarray(lengths, np.int64)
    for name, limit in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}: expected None or an integer >= 1, got {limit}")
    if len(lengths) == 0:
        return []
    room = len(lengths) if max_rows is None else max_rows
    order = np.argsort(-lengths, kind="stable")
    count = -(-len(lengths) // room)
    if max_tokens is not None:
        count = max(count, min(len(lengths), -(-int(lengths.sum()) // max_tokens)))
    while True:
        count = min(len(lengths), -(-count // multiple) * multiple)
        packs = _spread(lengths, order, count, room)
        if max_tokens is None or count == len(lengths):
            break
        if all(len(pack) == 1 or lengths[pack].sum() <= max_tokens for pack in packs):
            break
        count += 1
    return [np.sort(np.asarray(pack, np.int64)) for pack in packs if len(pack)]


def own_packs(packs: Sequence[np.ndarray], rank: int, ranks: int) -> list[tuple[np.ndarray, bool]]:
    """The packs that a rank works on, equally many on every rank: work that all ranks do together must not hang.

    Returns:
        (rows, counts): counts is False for a pack that only fills up the number, whose result is not to be used.
    """
    turns = -(-len(packs) // ranks)
    return [
        (packs[number], True) if number < len(packs) else (packs[0], False)
        for number in range(rank, turns * ranks, ranks)
    ]


def _spread(lengths: np.ndarray, order: np.ndarray, count: int, room: int) -> list[list[int]]:
    packs: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for row in order:
        load, number = heapq.heappop(heap)
        packs[number].append(int(row))
        if len(packs[number]) < room:
            heapq.heappush(heap, (load + int(lengths[row]), number))
    return packs
