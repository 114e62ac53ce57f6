"""Checks that several ops make of their arguments: each raises ValueError with the argument, the expected, the got."""

import math
from numbers import Real

import torch


def check_tensors(**arguments) -> None:
    """ValueError unless every argument is a tensor: the kernels take addresses, and that of None is 0."""
    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")


def is_finite(x) -> bool:
    """True for a finite number that is no tensor."""
    return isinstance(x, Real) and math.isfinite(x)


def check_scalar(name: str, x: torch.Tensor | float) -> None:
    """ValueError unless x is a number or a tensor of one element."""
    if not isinstance(x, Real) and not (isinstance(x, torch.Tensor) and x.numel() == 1):
        got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name}: expected a number or a scalar tensor, got {got}")


def check_boundaries(cu_seqlens: torch.Tensor, tokens: int, device: torch.device) -> None:
    """ValueError unless cu_seqlens is int32 `[R + 1]`, contiguous, on `device`, and rises from 0 to `tokens`.

    The kernels follow it without looking. On CUDA, where a look at its values would wait for the device, they count as
    right.
    """
    check_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens: expected int32 [R + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected a tensor on {device}, got one on {cu_seqlens.device}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens: expected a contiguous tensor, got strides {cu_seqlens.stride()}")
    if device.type != "cpu":
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError(f"cu_seqlens: expected a rising sequence from 0 to {tokens}, got {cu_seqlens.tolist()[:8]}…")
