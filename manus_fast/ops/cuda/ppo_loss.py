"""The policy-gradient loss on the GPU: csrc/ops/ppo_loss.cu under autograd."""

import torch

from manus_fast.ops import dispatch
from manus_fast.ops.cpu.ppo_loss import launch_extension
from manus_fast.ops.ppo_loss import WrittenGradient


def ppo_loss(log_prob, old_log_prob, advantages, mask, *, values, entropy, **others):
    """The arguments of `manus_fast.ops.ppo_loss`, checked; float32 CUDA tensors."""
    extension = dispatch.extension()
    arrays = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages, "mask": mask}
    arrays.update(values=values, entropy=entropy)

    def launch():
        workspace = torch.empty(extension.ppo_loss_workspace(), dtype=torch.uint8, device=log_prob.device)
        with torch.cuda.device(log_prob.device):
            extra = {"workspace": workspace.data_ptr(), "stream": torch.cuda.current_stream().cuda_stream}
            return launch_extension(extension.ppo_loss_cuda, arrays, extra=extra, **others)

    return WrittenGradient.apply(launch, _scale, log_prob, values, entropy)


def _scale(gradients, upstream):
    """In place, and without a pass over memory when upstream is 1: the kernel looks at it on the device."""
    factor = upstream.float().contiguous()
    with torch.cuda.device(factor.device):
        dispatch.extension().scale_gradients_cuda(
            [gradient.data_ptr() for gradient in gradients],
            gradients[0].numel(),
            factor.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
    return gradients
