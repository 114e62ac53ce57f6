"""Causal attention of rows laid end to end, with gradients: what training on a CPU spends much of its time on."""

import torch

from manus_fast.ops import dispatch
from manus_fast.ops.slot_attention import MAX_DIM


def kernel_takes(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the compiled kernel, if it may be used, takes such tensors."""
    allowed = dispatch.requested() in ("auto", "cpu") and dispatch.missing("packed_attention", "cpu", device) is None
    return allowed and dtype == torch.float32 and dim % 16 == 0 and dim <= MAX_DIM


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * query · key) · value, each query over the first `seen` keys of its row.

    query: `[M, G * H, D]`, where query heads g of a group of G follow each other and share a key head; float32 with D a
      multiple of 16 up to 256 for the kernel, others run on the reference.
    key, value: `[N, H, D]`, query's dtype. All three have unit stride along D; other strides are free.
    cu_queries, cu_keys: int32 `[R+1]` from 0 to M and N: where the queries and the keys of a row begin and end.
    seen: int64 `[M]`, from 1 to the number of keys of the query's row.

    Returns `[M, G * H, D]`, differentiable in query, key and value. The same inputs give the same bits whatever the
    number of threads. ValueError for other shapes, dtypes or strides, and spans or `seen` out of range.
    """
    _check(query, key, value, cu_queries, cu_keys, seen)
    run = dispatch.choose("packed_attention", query.device)
    if query.dtype != torch.float32 or query.shape[2] % 16 or query.shape[2] > MAX_DIM:
        if dispatch.requested() not in ("auto", "reference"):
            raise ValueError(
                f"query: expected float32 and D a multiple of 16 up to {MAX_DIM} on backend "
                f"'{dispatch.requested()}', got {query.dtype} and {query.shape[2]}"
            )
        from manus_fast.ops.reference import packed_attention as run
    return run(query, key, value, cu_queries, cu_keys, seen, scale)


def _check(query, key, value, cu_queries, cu_keys, seen):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.stride(2) != 1:
            raise ValueError(
                f"{name}: expected [tokens, heads, D] with unit stride along D, got {list(tensor.shape)} and strides "
                f"{tensor.stride()}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(f"{name}: expected {query.dtype} on {query.device}, got {tensor.dtype} on {tensor.device}")
    if key.shape != value.shape or key.shape[2] != query.shape[2] or not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"key, value: expected one shape [N, H, {query.shape[2]}], H a divisor of {query.shape[1]}, got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    for name, cu, total in (("cu_queries", cu_queries, len(query)), ("cu_keys", cu_keys, len(key))):
        if cu.dtype != torch.int32 or cu.dim() != 1 or not len(cu) or cu.shape != cu_queries.shape:
            raise ValueError(f"{name}: expected int32 [R+1], got {cu.dtype} {list(cu.shape)}")
        steps = cu.diff()
        if int(cu[0]) != 0 or int(cu[-1]) != total or (len(steps) and int(steps.min()) < 0):
            raise ValueError(f"{name}: expected an ascent from 0 to {total}, got {cu.tolist()}")
    if seen.dtype != torch.int64 or seen.shape != (len(query),):
        raise ValueError(f"seen: expected int64 [{len(query)}], got {seen.dtype} {list(seen.shape)}")
    most = cu_keys.diff().repeat_interleave(cu_queries.diff())
    if len(seen) and not bool(((seen >= 1) & (seen <= most)).all()):
        raise ValueError("seen: expected from 1 to the number of keys of each query's row, got others")
