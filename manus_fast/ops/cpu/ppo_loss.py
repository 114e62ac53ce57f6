"""The policy-gradient loss on the CPU: csrc/ops/ppo_loss_cpu.cpp under autograd."""

import torch

from manus_fast.ops import dispatch
from manus_fast.ops.cpu.gae import pointer
from manus_fast.ops.ppo_loss import CLIPS, KLS, STAT_NAMES, WrittenGradient


def ppo_loss(log_prob, old_log_prob, advantages, mask, *, values, entropy, **others):
    """The arguments of `manus_fast.ops.ppo_loss`, checked; float32 CPU tensors."""

    def launch():
        arrays = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages, "mask": mask}
        arrays.update(values=values, entropy=entropy)
        return launch_extension(dispatch.extension().ppo_loss_cpu, arrays, **others)

    return WrittenGradient.apply(launch, _scale, log_prob, values, entropy)


def launch_extension(function, arrays, *, mean, rstd, denominator, config, extra=None, **more):
    """Allocates the results and calls one of the extension's ppo_loss functions: loss, stats, gradients.

    arrays, more: the per-token tensors by name, None for absent ones; extra: other keywords of the function.
    """
    log_prob = arrays["log_prob"]
    device = log_prob.device
    loss = torch.empty((), dtype=torch.float32, device=device)
    stats = torch.empty(len(STAT_NAMES), dtype=torch.float64, device=device)
    gradients = {name: None if arrays[name] is None else torch.empty_like(arrays[name]) for name in GRADIENTS}
    # A tensor is read by the kernel, where it lies; it must live until the call returns.
    alive, scalars = [], {}
    for name, given in (("mean", mean), ("rstd", rstd), ("denominator", denominator)):
        tensor = isinstance(given, torch.Tensor)
        if tensor:
            alive.append(given.to(device=device, dtype=torch.float64))
        scalars[f"{name}_pointer"] = alive[-1].data_ptr() if tensor else 0
        scalars[f"{name}_value"] = 0.0 if tensor else float(given)
    function(
        **{name: pointer(array) for name, array in (*arrays.items(), *more.items())},
        **{f"grad_{name}": pointer(gradient) for name, gradient in gradients.items()},
        **scalars,
        **(extra or {}),
        n=log_prob.numel(), clip_low=1 - config.clip_range, clip_high=1 + config.high,
        dual_clip=config.dual_clip or 0.0, value_clip=config.value_clip or 0.0, vf_coef=config.vf_coef,
        kl_coef=config.kl_coef, ent_coef=config.ent_coef, clip=CLIPS.index(config.clip),
        kl=KLS.index(config.kl), loss=loss.data_ptr(), stats=stats.data_ptr(),
        entries=len(STAT_NAMES),
    )  # fmt: skip
    return loss, stats, list(gradients.values())


GRADIENTS = ("log_prob", "values", "entropy")


def _scale(gradients, upstream):
    if upstream.item() == 1.0:
        return gradients
    return [gradient * upstream for gradient in gradients]
