"""Generalised advantage estimation on the CPU: allocates, then calls csrc/ops/gae_cpu.cpp."""

import torch

from manus_fast.ops import dispatch


def gae(rewards, values, mask, gamma, lam, *, bootstrap, cu_seqlens, turn_id, token_gamma, token_lam):
    """The arguments of `manus_fast.ops.gae`, checked; float32 CPU tensors."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    stats = torch.empty(3, dtype=torch.float64)
    rows = rewards.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, rewards.numel())
    dispatch.extension().gae_cpu(
        rewards=rewards.data_ptr(), values=values.data_ptr(), mask=mask.data_ptr(), turn_id=pointer(turn_id),
        bootstrap=pointer(bootstrap), cu_seqlens=pointer(cu_seqlens), rows=rows,
        row_length=rewards.shape[1] if cu_seqlens is None else 0, tokens=rewards.numel(), gamma=gamma, lam=lam,
        token_gamma=token_gamma, token_lam=token_lam, advantages=advantages.data_ptr(), returns=returns.data_ptr(),
        stats=stats.data_ptr(),
    )  # fmt: skip
    return advantages, returns, stats


def pointer(tensor: torch.Tensor | None) -> int:
    """The address of a tensor's first element, 0 for None: how the extension takes optional arrays."""
    return 0 if tensor is None else tensor.data_ptr()


def check_boundaries(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """ValueError unless cu_seqlens rises from 0 to `tokens`: the C++ side follows it without looking."""
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError(f"cu_seqlens: expected a rising sequence from 0 to {tokens}, got {cu_seqlens.tolist()[:8]}…")
