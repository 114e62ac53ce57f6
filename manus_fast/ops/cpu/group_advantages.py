"""Group-relative advantages on the CPU: sorts by group, then calls csrc/ops/group_advantages_cpu.cpp."""

import torch

from manus_fast.ops import dispatch
from manus_fast.ops.group_advantages import KINDS


def group_advantages(rewards, group, *, kind, counted, singleton, eps):
    """The arguments of the reference; float32 CPU tensors."""
    return launch_extension(dispatch.extension().group_advantages_cpu, rewards, group, kind, counted, singleton, eps)


def launch_extension(function, rewards, group, kind, counted, singleton, eps, **stream):
    """Sorts, allocates and calls one of the extension's group_advantages functions."""
    advantages = torch.empty_like(rewards)
    order = torch.argsort(group, stable=True)
    function(
        rewards=rewards.data_ptr(), group=group.data_ptr(), counted=counted.data_ptr(), order=order.data_ptr(),
        n=rewards.numel(), kind=KINDS.index(kind), raw_singleton=singleton == "raw", eps=eps,
        advantages=advantages.data_ptr(), **stream,
    )  # fmt: skip
    return advantages
