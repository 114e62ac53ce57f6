"""Attention over a tree of tokens: each token sees its ancestors and itself, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from manus_fast.modeling.attention import varlen_causal


class TreePlan:
    """The plan for tokens in depth-first order, cut into unbranched segments (data/prefixes.py).

    The queries of a segment go against the keys of the path from the root to its end, where they are the last ones:
    causal attention aligned at the end. Keys of a shared segment are gathered once for every segment below it; nothing
    of size [tokens, tokens] is made.

    Args:
        segments: tokens of each segment, in order.
        paths: int64 [P] of each segment: the tokens from the root to its end, its own ones last.
        device: where the model runs.
    """

    def __init__(self, segments: Sequence[int], paths: Sequence[np.ndarray], device: torch.device):
        self._segments = list(segments)
        self._lengths = [len(path) for path in paths]
        for k, (own, seen) in enumerate(zip(self._segments, self._lengths, strict=True)):
            if not 0 < own <= seen:
                raise ValueError(f"paths[{k}]: expected at least the segment's {own} tokens, got {seen}")
        self._keys = torch.from_numpy(np.concatenate(paths)).to(device)
        self._masks: list[torch.Tensor | None] | None = None
        self._spans: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        if sum(self._segments) != query.shape[2]:
            raise ValueError(
                f"segments: expected some that cover {query.shape[2]} tokens, got {sum(self._segments)} tokens"
            )
        # Indexing, not index_select: its gradient sums in a fixed order on a GPU, too.
        key, value = key[:, :, self._keys], value[:, :, self._keys]
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            if self._spans is None:
                self._spans = (_offsets(self._segments, query.device), _offsets(self._lengths, query.device))
            return varlen_causal(query, key, value, *self._spans, max(self._segments), max(self._lengths), scale)
        if self._masks is None:
            pairs = zip(self._segments, self._lengths, strict=True)
            self._masks = [None if own == seen else _aligned(own, seen, query.device) for own, seen in pairs]
        parts = zip(
            query.split(self._segments, dim=2),
            key.split(self._lengths, dim=2),
            value.split(self._lengths, dim=2),
            self._masks,
            strict=True,
        )
        outputs = [
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            for q, k, v, mask in parts
        ]
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _aligned(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """bool [queries, keys], causal, the last query over the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _offsets(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
