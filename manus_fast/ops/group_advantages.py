"""Advantages relative to a group of rollouts of the same task: GRPO, Dr. GRPO, RLOO, and GiGPO's two levels.

Sources: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740; GiGPO, arXiv 2505.10978,
equations 3-8. Nothing here loops over groups in Python or copies to the host.
"""

import torch

from manus_fast.ops import dispatch
from manus_fast.ops.checks import check_tensors, is_finite

KINDS = ("grpo", "dr_grpo", "rloo")
UNITS = ("trajectory", "step")


def group_advantages(
    rewards: torch.Tensor,
    group: torch.Tensor,
    *,
    kind: str = "grpo",
    unit: str = "trajectory",
    trajectory: torch.Tensor | None = None,
    singleton: str = "zero",
    eps: float = 1e-6,
) -> torch.Tensor:
    """Advantage of each entry within its group, float32 `[E]`.

    rewards: float32 `[E]` (float64 runs on the reference); NaN marks an entry that failed or only pads: it enters no
      statistics and its advantage is 0.
    group: int64 `[E]`, equal ids belong together, in any order.
    kind: "grpo" (R - mean) / (std + eps) with Bessel's correction; "dr_grpo" R - mean; "rloo" n / (n - 1) * (R - mean).
    trajectory: int64 `[E]`, which trajectory each entry (a row, a step) is of; None: one entry a trajectory. With unit
      "trajectory" a trajectory counts once in its group's statistics, by its first valid entry; "step": each entry.
    singleton: in a group with one counted entry, "zero" gives 0, "raw" the reward itself, as some trainers do.

    Groups whose rewards are all equal give exactly 0. ValueError for other shapes, types or names.
    """
    if torch.compiler.is_compiling():  # one node of the graph, which takes the way below when it runs
        return _in_graph(rewards.detach(), group, trajectory, kind, unit, singleton, eps)
    check_tensors(rewards=rewards, group=group)
    if trajectory is not None:
        check_tensors(trajectory=trajectory)
    if rewards.dim() != 1 or rewards.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rewards: expected float32 [E], got {rewards.dtype} {list(rewards.shape)}")
    _check_ids(rewards.shape, rewards.device, group=group, **({} if trajectory is None else {"trajectory": trajectory}))
    if not is_finite(eps) or eps < 0:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps}")
    for name, value, allowed in (
        ("kind", kind, KINDS),
        ("unit", unit, UNITS),
        ("singleton", singleton, ("zero", "raw")),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got '{value}'")
    with torch.no_grad():
        rewards, group = rewards.contiguous(), group.contiguous()
        counted = ~torch.isnan(rewards)
        if unit == "trajectory" and trajectory is not None:
            counted = counted & _first_of(trajectory, counted)
        run = dispatch.choose("group_advantages", rewards.device)
        if rewards.dtype == torch.float64:
            if dispatch.requested() not in ("auto", "reference"):
                raise ValueError(f"rewards: expected float32 on backend '{dispatch.requested()}', got float64")
            from manus_fast.ops.reference import group_advantages as run
        return run(rewards, group, kind=kind, counted=counted, singleton=singleton, eps=eps)


@torch.library.custom_op("manus_fast::group_advantages", mutates_args=())
def _in_graph(
    rewards: torch.Tensor,
    group: torch.Tensor,
    trajectory: torch.Tensor | None,
    kind: str,
    unit: str,
    singleton: str,
    eps: float,
) -> torch.Tensor:
    return group_advantages(
        rewards, group, kind=kind, unit=unit, trajectory=trajectory, singleton=singleton, eps=eps
    )  # fmt: skip


@_in_graph.register_fake
def _(rewards, *_):
    return torch.empty_like(rewards, memory_format=torch.contiguous_format)


def step_groups(group: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Ids int64 `[S]`, equal exactly where both group and anchor (a hash of the raw observation), int64 `[S]`, are.

    ValueError for other shapes, types or devices.
    """
    if not torch.compiler.is_compiling():
        check_tensors(group=group, anchor=anchor)
        if group.dim() != 1:
            raise ValueError(f"group: expected int64 [S], got {group.dtype} {list(group.shape)}")
        _check_ids(group.shape, group.device, group=group, anchor=anchor)
    # Sorted by anchor, then stably by group: equal pairs are neighbours.
    order = torch.argsort(anchor, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    starts = torch.ones_like(order)
    starts[1:] = ((group[order][1:] != group[order][:-1]) | (anchor[order][1:] != anchor[order][:-1])).long()
    ids = torch.empty_like(order)
    ids[order] = starts.cumsum(0) - 1
    return ids


def gigpo_advantages(
    episode_rewards: torch.Tensor,
    step_returns: torch.Tensor,
    group: torch.Tensor,
    episode: torch.Tensor,
    anchor: torch.Tensor,
    *,
    step_weight: float = 1.0,
    kind: str = "grpo",
    unit: str = "trajectory",
    singleton: str = "zero",
    eps: float = 1e-6,
) -> torch.Tensor:
    """GiGPO: A = A_episode + step_weight * A_step for each step, float32 `[S]`.

    episode_rewards float32 `[E]` and group int64 `[E]` by episode; step_returns float32 `[S]` (`discounted_returns`,
    after penalties), episode int64 `[S]` (index into the former two) and anchor int64 `[S]` (hash of the raw
    observation before the step) by step. Steps of one task group with one anchor form a step group; alone, A_step is 0.
    kind "grpo" divides by the standard deviation on both levels (ALFWorld), "dr_grpo" does not (WebShop).
    unit: "trajectory": each episode counts once in A_episode; "step": once for each of its steps.
    singleton: A_episode of an episode alone in its group, as in `group_advantages`.

    ValueError for other shapes, types or names, and for an episode that is no index; on CUDA, where a look at the
    indices would wait for the device, they count as right.
    """
    if not torch.compiler.is_compiling():
        _check_steps(episode_rewards, step_returns, group, episode, anchor, step_weight)
    of_step = episode_rewards[episode]
    across = group_advantages(
        of_step, group[episode], kind=kind, unit=unit, trajectory=episode, singleton=singleton, eps=eps
    )
    step_returns = torch.where(torch.isnan(of_step), of_step, step_returns)  # a failed episode's steps fail with it
    within = group_advantages(step_returns, step_groups(group[episode], anchor), kind=kind, unit="step", eps=eps)
    return across + step_weight * within


def discounted_returns(rewards: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float) -> torch.Tensor:
    """R_t = r_t + gamma * R_{t+1} within each episode; rewards float32 `[S]` packed, cu_seqlens int32 `[E + 1]`."""
    from manus_fast.ops.gae import gae

    check_tensors(rewards=rewards, cu_seqlens=cu_seqlens)
    everywhere = torch.ones_like(rewards, dtype=torch.bool)
    return gae(rewards, torch.zeros_like(rewards), everywhere, gamma, 1.0, cu_seqlens=cu_seqlens)[0]


def _check_ids(shape, device, **ids):
    for name, x in ids.items():
        if x.dtype != torch.int64 or x.shape != shape:
            raise ValueError(f"{name}: expected int64 {list(shape)}, got {x.dtype} {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {x.device}")


def _check_steps(episode_rewards, step_returns, group, episode, anchor, step_weight):
    """The arguments of `gigpo_advantages` that indexing and broadcasting would bend into another shape."""
    check_tensors(
        episode_rewards=episode_rewards, step_returns=step_returns, group=group, episode=episode, anchor=anchor
    )
    device = episode_rewards.device
    for name, x in (("episode_rewards", episode_rewards), ("step_returns", step_returns)):
        if x.dim() != 1 or x.dtype not in (torch.float32, torch.float64) or x.dtype != episode_rewards.dtype:
            shape = "[E]" if x is episode_rewards else "[S], as episode_rewards"
            raise ValueError(f"{name}: expected float32 {shape}, got {x.dtype} {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {x.device}")
    _check_ids(episode_rewards.shape, device, group=group)
    _check_ids(step_returns.shape, device, episode=episode, anchor=anchor)
    if not is_finite(step_weight):
        raise ValueError(f"step_weight: expected a finite number, got {step_weight}")
    if device.type == "cpu" and episode.numel():
        low, high = int(episode.min()), int(episode.max())
        if low < 0 or high >= episode_rewards.numel():
            count = episode_rewards.numel()
            raise ValueError(f"episode: expected indices from 0 to {count - 1}, got some from {low} to {high}")


def _first_of(trajectory, valid):
    """True at the first valid entry of each trajectory."""
    order = torch.argsort((~valid).to(torch.int8), stable=True)  # valid entries first
    order = order[torch.argsort(trajectory[order], stable=True)]
    first = torch.ones_like(valid)
    first[1:] = trajectory[order][1:] != trajectory[order][:-1]
    out = torch.empty_like(valid)
    out[order] = first
    return out
