"""Specification of group-relative advantages: one Python loop over the groups, plain torch."""

import torch


def group_advantages(rewards, group, *, kind, counted, singleton, eps):
    """See `manus_fast.ops.group_advantages`; counted bool `[E]` says which entries enter their group's statistics."""
    advantages = torch.zeros_like(rewards)
    valid = ~torch.isnan(rewards)
    for name in torch.unique(group).tolist():
        member = (group == name) & valid
        kept = rewards[member & counted].double()
        n = kept.numel()
        if n == 0:
            continue
        if n == 1:
            advantages[member] = rewards[member] if singleton == "raw" else 0.0
            continue
        centred = rewards[member].double() - kept.mean()
        if kind == "grpo":
            centred = centred / (kept.std() + eps)
        elif kind == "rloo":
            centred = centred * n / (n - 1)
        if bool((kept == kept[0]).all()):
            # The rounding of the mean is no signal, nor is 0 / 0 where eps is 0.
            centred = torch.where(rewards[member] == kept[0], 0.0, centred)
        advantages[member] = centred.to(rewards.dtype)
    return advantages
