"""Generalised advantage estimation on the CPU: allocates, then calls csrc/ops/gae_cpu.cpp."""

import torch

from manus_fast.ops import dispatch


def gae(rewards, values, mask, gamma, lam, *, bootstrap, cu_seqlens, turn_id, token_gamma, token_lam):
    """The arguments of `manus_fast.ops.gae`, checked; float32 CPU tensors."""
    arrays = {"rewards": rewards, "values": values, "mask": mask}
    arrays.update(bootstrap=bootstrap, cu_seqlens=cu_seqlens, turn_id=turn_id)
    discounts = {"gamma": gamma, "lam": lam, "token_gamma": token_gamma, "token_lam": token_lam}
    return launch_extension(dispatch.extension().gae_cpu, arrays, **discounts)


def launch_extension(function, arrays, **others):
    """Allocates the results and calls one of the extension's gae functions with the arrays' addresses and `others`."""
    rewards, cu_seqlens = arrays["rewards"], arrays["cu_seqlens"]
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    stats = torch.empty(3, dtype=torch.float64, device=rewards.device)
    packed = cu_seqlens is not None
    function(
        **{name: pointer(array) for name, array in arrays.items()},
        rows=cu_seqlens.numel() - 1 if packed else rewards.shape[0],
        row_length=0 if packed else rewards.shape[1],
        tokens=rewards.numel(),
        advantages=advantages.data_ptr(),
        returns=returns.data_ptr(),
        stats=stats.data_ptr(),
        **others,
    )
    return advantages, returns, stats


def pointer(tensor: torch.Tensor | None) -> int:
    """The address of a tensor's first element, 0 for None: how the extension takes optional arrays."""
    return 0 if tensor is None else tensor.data_ptr()
