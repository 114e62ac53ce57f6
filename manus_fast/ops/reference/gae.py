"""Specification of generalised advantage estimation over masked rows, in plain torch (float32 or float64)."""

import torch


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
    *,
    bootstrap: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    turn_id: torch.Tensor | None = None,
    token_gamma: float = 1.0,
    token_lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `manus_fast.ops.gae`; this raises besides on a non-zero reward where the mask is False."""
    if bool(((rewards != 0) & ~mask).any()):
        raise ValueError("rewards: expected 0 wherever mask is False, got a non-zero reward on a masked token")
    shape = rewards.shape
    if cu_seqlens is not None:
        take, present = _padded_index(cu_seqlens, rewards.device)
        rewards, values, mask = rewards[take], values[take], mask[take] & present
        turn_id = None if turn_id is None else turn_id[take]
    rows = rewards.shape[0]
    boot = values.new_zeros(rows) if bootstrap is None else bootstrap.to(values.dtype)
    if turn_id is None:
        advantages = _token_level(rewards, values, mask, gamma, lam, boot)
    else:
        advantages = _turn_level(rewards, values, mask, turn_id, gamma, lam, token_gamma, token_lam, boot)
    returns = torch.where(mask, advantages + values, 0.0)
    if cu_seqlens is not None:
        advantages, returns, mask = advantages[present], returns[present], mask[present]
    return advantages.reshape(shape), returns.reshape(shape), masked_stats(advantages, mask)


def masked_stats(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Count, mean and sum of squared deviations of x over mask, float64 `[3]`; zeros when nothing is selected."""
    kept = x[mask].double()
    if kept.numel() == 0:
        return torch.zeros(3, dtype=torch.float64, device=x.device)
    mean = kept.mean()
    return torch.stack([torch.full_like(mean, kept.numel()), mean, ((kept - mean) ** 2).sum()])


def _padded_index(cu_seqlens: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices `[R, T]` into a packed axis (rows padded with their own start or 0), and which of them are real."""
    start, end = cu_seqlens[:-1].long().to(device), cu_seqlens[1:].long().to(device)
    length = int((end - start).max()) if start.numel() else 0
    offset = torch.arange(length, device=device)
    present = offset < (end - start)[:, None]
    return torch.where(present, start[:, None] + offset, 0), present


def _token_level(rewards, values, mask, gamma, lam, bootstrap):
    """Masked positions carry the next value and advantage over unchanged: no decay, no delta."""
    advantages = torch.zeros_like(values)
    next_value, next_advantage = bootstrap, torch.zeros_like(bootstrap)
    for t in range(values.shape[1] - 1, -1, -1):
        m = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(m, values[:, t], next_value)
        next_advantage = torch.where(m, advantage, next_advantage)
        advantages[:, t] = torch.where(m, advantage, 0.0)
    return advantages


def _turn_level(rewards, values, mask, turn_id, gamma, lam, token_gamma, token_lam, bootstrap):
    """GAE over turns (value of a turn: at its last token), then over the tokens of each turn.

    A turn's last token has no next token: what follows the turn, gamma·V(next turn) + gamma·lam·A(next turn), counts
    as part of its reward. Rewards of earlier tokens of the turn belong to the turn's reward too.
    """
    advantages = torch.zeros_like(values)
    zero = torch.zeros_like(bootstrap)
    turn_value, turn_advantage = bootstrap, zero  # of the turn after the current one, complete
    current_value, current_advantage = bootstrap, zero  # of the turn being walked, rewards seen so far
    next_value, next_advantage = zero, zero  # inside the turn
    seen = torch.zeros_like(mask[:, 0]) if mask.shape[1] else None
    next_turn = torch.zeros_like(turn_id[:, 0]) if mask.shape[1] else None
    for t in range(values.shape[1] - 1, -1, -1):
        m, r, v = mask[:, t], rewards[:, t], values[:, t]
        last = m & (~seen | (turn_id[:, t] != next_turn))
        turn_value = torch.where(last, current_value, turn_value)
        turn_advantage = torch.where(last, current_advantage, turn_advantage)
        at_end = r + gamma * turn_value - v + gamma * lam * turn_advantage
        inside = r + token_gamma * next_value - v + token_gamma * token_lam * next_advantage
        advantage = torch.where(last, at_end, inside)
        current_value = torch.where(last, v, current_value)
        current_advantage = torch.where(last, at_end, torch.where(m, current_advantage + r, current_advantage))
        next_value = torch.where(m, v, next_value)
        next_advantage = torch.where(m, advantage, next_advantage)
        seen = seen | m
        next_turn = torch.where(m, turn_id[:, t], next_turn)
        advantages[:, t] = torch.where(m, advantage, 0.0)
    return advantages
