"""Rows as a tree: where rows begin alike, their common beginning is one path, and each of its tokens one node.

Episodes of one search tree, of one group, or merely with one system message share a prefix. Under causal attention what
a model computes at a token depends on the tokens before it alone, so a shared one needs to be computed once:

    packed = pack(rows, share_prefixes=True)
    tree = PrefixTree.of(packed)             # U <= N tokens; tree.place[t] is where token t of the rows is computed

`Policy.score` does so by itself for a batch that was packed this way. Losses, advantages and statistics stay on the
rows' N tokens: results are spread to them, and their gradients sum up on the way back, as if each row had been computed
on its own. The idea is that of "Tree Training: Accelerating Agentic LLMs Training via Shared Prefix Reuse"
(arXiv:2511.00413, 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from manus_fast.agent.trajectory import Row

if TYPE_CHECKING:
    from manus_fast.data.packing import PackedRows


def prefix_nodes(rows: Sequence[Row]) -> np.ndarray:
    """int64 [N]: the node of every token of the rows laid end to end. Two tokens have one node where all tokens up to
    and including them are equal. Numbers are in depth-first order, so that they are so in any selection of rows too."""
    ids = [np.asarray(row.token_ids) for row in rows]
    # As big-endian bytes, sequences of non-negative integers sort like the sequences themselves.
    order = sorted(range(len(rows)), key=lambda r: ids[r].astype(">i4").tobytes())
    nodes: list[np.ndarray] = [np.zeros(0, np.int64)] * len(rows)
    count, before = 0, -1
    for r in order:
        shared = 0 if before < 0 else common_length(ids[before], ids[r])
        fresh = len(ids[r]) - shared
        kept = nodes[before][:shared] if shared else np.zeros(0, np.int64)
        nodes[r] = np.concatenate([kept, np.arange(count, count + fresh)])
        count, before = count + fresh, r
    return np.concatenate(nodes) if nodes else np.zeros(0, np.int64)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning of two arrays."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def tree_micro_batches(
    node: np.ndarray, lengths: np.ndarray, *, max_rows: int | None = None, max_tokens: int | None = None
) -> list[np.ndarray]:
    """Cuts rows into packs in depth-first order, so that those with a common beginning stay together.

    Args:
        node: int64 [N] of `prefix_nodes`.
        lengths: int64 [R] tokens per row.
        max_rows: rows a pack may hold.
        max_tokens: tokens a pack may hold, a shared one counted once; a longer row gets a pack of its own.

    Returns:
        Row indices per pack, int64; every row exactly once.

    Raises:
        ValueError: a limit below 1.
    """
    for name, limit in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}: expected None or an integer >= 1, got {limit}")
    ends = np.cumsum(lengths)
    packs: list[list[int]] = []
    room = 0
    for r in np.argsort(node[ends - 1], kind="stable"):  # the order of last nodes is that of the rows
        own = node[ends[r] - lengths[r] : ends[r]]
        fresh = len(own)
        if packs:
            last = packs[-1][-1]
            fresh -= common_length(node[ends[last] - lengths[last] : ends[last]], own)
        fits = max_tokens is None or fresh <= room
        if not packs or not fits or len(packs[-1]) == max_rows:
            packs.append([])
            fresh, room = len(own), max_tokens or 0
        packs[-1].append(int(r))
        room -= fresh
    return [np.asarray(pack, np.int64) for pack in packs]


@dataclass
class PrefixTree:
    """The tree of a batch: U tokens in depth-first order, in K unbranched segments, each after its parent's."""

    token_ids: torch.Tensor
    """int64 [U]."""
    position_ids: torch.Tensor
    """int64 [U]: depth, from 0 at a row's first token."""
    place: torch.Tensor
    """int64 [N]: where each token of the rows is."""
    ends: torch.Tensor
    """int64 [R]: where each row's last token is."""
    trained: torch.Tensor
    """int64 [T]: tokens that some row trains on, ascending."""
    before: torch.Tensor
    """int64 [T]: the token before each of them, which predicts it."""
    again: torch.Tensor
    """int64 [M]: for every trainable token of the rows, which of the T it is."""
    segments: list[int]
    """Tokens of each segment."""
    paths: list[np.ndarray]
    """int64 [P_k], on the host: from the root to each segment's end, the tokens that its last one sees."""
    pairs: int
    """(Token, visible token) pairs, what attention has to compute."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, packed: PackedRows) -> PrefixTree:
        """The tree of a batch that was packed with `share_prefixes`, on its device.

        Raises:
            ValueError: it was not.
        """
        if packed.node is None:
            raise ValueError("packed: expected rows packed with share_prefixes=True, got rows without nodes")
        lengths = packed.lengths
        starts = np.concatenate([[0], np.cumsum(lengths)])
        depth = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        _, first, place = np.unique(packed.node, return_index=True, return_inverse=True)
        depth = depth[first]
        parent = np.where(depth > 0, place[np.maximum(first - 1, 0)], -1)
        branches = np.bincount(parent[parent >= 0], minlength=len(first))
        # In depth-first order an only child follows its parent; elsewhere a segment begins.
        begins = np.flatnonzero((parent < 0) | (branches[parent] > 1))
        owner = np.searchsorted(begins, np.arange(len(first)), side="right") - 1
        bounds = np.append(begins, len(first))
        paths: list[np.ndarray] = []
        for k, start in enumerate(begins):
            own = np.arange(start, bounds[k + 1])
            paths.append(own if parent[start] < 0 else np.concatenate([paths[owner[parent[start]]], own]))
        used, again = np.unique(place[np.flatnonzero(packed.host_mask())], return_inverse=True)
        send = packed.send
        return cls(
            token_ids=packed.token_ids[send(first)],
            position_ids=send(depth),
            place=send(place),
            ends=send(place[starts[1:] - 1]),
            trained=send(used),
            before=send(parent[used]),
            again=send(again),
            segments=np.diff(bounds).tolist(),
            paths=paths,
            pairs=int((depth + 1).sum()),
        )
