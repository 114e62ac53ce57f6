"""Causal attention of rows laid end to end, row by row."""

import torch


def packed_attention(query, key, value, cu_queries, cu_keys, seen, scale):
    """The arguments of `manus_fast.ops.packed_attention`, checked."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    rows = []
    for q, k, v, s in zip(
        query.split(cu_queries.diff().tolist()),
        key.split(cu_keys.diff().tolist()),
        value.split(cu_keys.diff().tolist()),
        seen.split(cu_queries.diff().tolist()),
        strict=True,
    ):
        hidden = torch.arange(len(k), device=k.device) >= s[:, None]
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(hidden, float("-inf"))
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(rows) if rows else query * 0.0
