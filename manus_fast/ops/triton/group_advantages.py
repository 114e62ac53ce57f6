"""Group-relative advantages in Triton: entries sorted by group; the program of a group's first entry does the work."""

import torch
import triton
import triton.language as tl

from manus_fast.ops.group_advantages import KINDS


@triton.jit
def _group_kernel(
    rewards, order, start, counted, advantages, n, eps, KIND: tl.constexpr, RAW: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    # start[i]: 1 where a group begins. Every program of a run but its first has nothing to do.
    if tl.load(start + i) != 0:
        lanes = tl.arange(0, BLOCK)
        count = tl.zeros((BLOCK,), tl.float64)
        total = tl.zeros((BLOCK,), tl.float64)
        low = tl.full((BLOCK,), float("inf"), tl.float32)
        high = tl.full((BLOCK,), float("-inf"), tl.float32)
        end = i
        more = i < n
        while more:
            at = end + lanes
            # This group goes on until the next start.
            begins = tl.load(start + at, mask=at < n, other=1) != 0
            stop = tl.min(tl.where(begins & (at > i), lanes, BLOCK))
            here = lanes < stop
            entry = tl.load(order + at, mask=here, other=0)
            keep = here & (tl.load(counted + entry, mask=here, other=0) != 0)
            reward = tl.load(rewards + entry, mask=keep, other=0.0)
            count += keep.to(tl.float64)
            total += reward.to(tl.float64)
            low = tl.minimum(low, tl.where(keep, reward, float("inf")))
            high = tl.maximum(high, tl.where(keep, reward, float("-inf")))
            end += stop
            more = stop == BLOCK
        members = tl.sum(count)
        mean = tl.sum(total) / tl.maximum(members, 1.0)
        lowest, highest = tl.min(low), tl.max(high)
        square = tl.zeros((BLOCK,), tl.float64)
        if KIND == 0:
            for first in range(i, end, BLOCK):
                here = first + lanes < end
                entry = tl.load(order + first + lanes, mask=here, other=0)
                keep = here & (tl.load(counted + entry, mask=here, other=0) != 0)
                d = tl.load(rewards + entry, mask=keep, other=0.0).to(tl.float64) - mean
                square += tl.where(keep, d * d, 0.0)
        factor = mean * 0.0 + 1.0
        if KIND == 0:
            factor = 1.0 / (tl.sqrt(tl.sum(square) / tl.maximum(members - 1.0, 1.0)) + eps)
        if KIND == 2:
            factor = members / tl.maximum(members - 1.0, 1.0)
        for first in range(i, end, BLOCK):
            here = first + lanes < end
            entry = tl.load(order + first + lanes, mask=here, other=0)
            reward = tl.load(rewards + entry, mask=here, other=0.0)
            advantage = ((reward.to(tl.float64) - mean) * factor).to(tl.float32)
            # Equal rewards carry no signal, whatever the rounding of their mean.
            advantage = tl.where((reward == lowest) & (reward == highest), 0.0, advantage)
            alone = 0.0
            if RAW:
                alone = reward
            advantage = tl.where(members == 1.0, alone, tl.where(members == 0.0, 0.0, advantage))
            tl.store(advantages + entry, tl.where(reward == reward, advantage, 0.0), mask=here)


def group_advantages(rewards, group, *, kind, counted, singleton, eps):
    """The arguments of the reference; float32."""
    advantages = torch.empty_like(rewards)
    n = rewards.numel()
    if n == 0:
        return advantages
    order = torch.argsort(group, stable=True)
    start = torch.ones(n, dtype=torch.uint8, device=group.device)
    start[1:] = group[order][1:] != group[order][:-1]
    _group_kernel[(n,)](
        rewards, order, start, counted.view(torch.uint8), advantages, n, eps,
        KIND=KINDS.index(kind), RAW=singleton == "raw", BLOCK=128, num_warps=1,
    )  # fmt: skip
    return advantages
