"""Attention of one new token per sequence over a cache with one slot per sequence: what decoding spends its time on."""

import torch

from manus_fast.ops import dispatch

MAX_DIM = 256


def kernel_takes(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the compiled kernel, if it may be used, takes such tensors. Otherwise padded attention is faster than
    the reference; see modeling/slot_cache.py."""
    allowed = dispatch.requested() in ("auto", "cpu") and dispatch.missing("slot_attention", "cpu", device) is None
    return allowed and dtype == torch.float32 and dim % 16 == 0 and dim <= MAX_DIM


def slot_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * query · keys) · values over the first `lengths` tokens of each sequence's slot.

    query: float32 `[n, H, G, D]`, G query heads for each of H key heads; other dtypes, and D that is not a multiple of
      16 up to 256, run on the reference.
    keys, values: `[slots, H, M, D]`, the cache, query's dtype.
    slots, lengths: int64 `[n]`, where each sequence lies and how many tokens it sees, its new one included.

    Returns `[n, H, G, D]`. No gradient on the CPU kernel. ValueError for other shapes, dtypes or layouts, a slot
    outside the cache and a length outside 1 … M; inputs must be contiguous.
    """
    _check(query, keys, values, slots, lengths)
    run = dispatch.choose("slot_attention", query.device)
    if query.dtype != torch.float32 or query.shape[3] % 16 or query.shape[3] > MAX_DIM:
        if dispatch.requested() not in ("auto", "reference"):
            raise ValueError(
                f"query: expected float32 and D a multiple of 16 up to {MAX_DIM} on backend "
                f"'{dispatch.requested()}', got {query.dtype} and {query.shape[3]}"
            )
        from manus_fast.ops.reference import slot_attention as run
    return run(query, keys, values, slots, lengths, scale)


def _check(query, keys, values, slots, lengths):
    if query.dim() != 4:
        raise ValueError(f"query: expected [n, H, G, D], got {list(query.shape)}")
    n, heads, _, dim = query.shape
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dim() != 4 or tensor.shape[1] != heads or tensor.shape[3] != dim or tensor.shape != keys.shape:
            raise ValueError(f"{name}: expected [slots, {heads}, M, {dim}], got {list(tensor.shape)}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(f"{name}: expected {query.dtype} on {query.device}, got {tensor.dtype} on {tensor.device}")
    for name, tensor, low, high in (("slots", slots, 0, keys.shape[0] - 1), ("lengths", lengths, 1, keys.shape[2])):
        if tensor.dtype != torch.int64 or tensor.shape != (n,):
            raise ValueError(f"{name}: expected int64 [{n}], got {tensor.dtype} {list(tensor.shape)}")
        if n and not low <= int(tensor.min()) <= int(tensor.max()) <= high:
            raise ValueError(f"{name}: expected {low} … {high}, got {int(tensor.min())} … {int(tensor.max())}")
    for name, tensor in (("query", query), ("keys", keys), ("values", values)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
