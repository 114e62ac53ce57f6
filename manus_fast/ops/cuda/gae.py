"""Generalised advantage estimation on the GPU: csrc/ops/gae.cu."""

import torch

from manus_fast.ops import dispatch
from manus_fast.ops.cpu.gae import launch_extension


def gae(rewards, values, mask, gamma, lam, *, bootstrap, cu_seqlens, turn_id, token_gamma, token_lam):
    """The arguments of `manus_fast.ops.gae`, checked; float32 CUDA tensors. cu_seqlens is trusted: no host copy."""
    extension = dispatch.extension()
    arrays = {"rewards": rewards, "values": values, "mask": mask}
    arrays.update(bootstrap=bootstrap, cu_seqlens=cu_seqlens, turn_id=turn_id)
    size = extension.gae_workspace(rewards.numel(), turn_id is not None)
    workspace = torch.empty(size, dtype=torch.uint8, device=rewards.device)
    with torch.cuda.device(rewards.device):
        return launch_extension(
            extension.gae_cuda, arrays, gamma=gamma, lam=lam, token_gamma=token_gamma, token_lam=token_lam,
            workspace=workspace.data_ptr(), stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
