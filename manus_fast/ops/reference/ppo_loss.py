"""Specification of the policy-gradient loss and its statistics, in plain torch: autograd gives the gradient."""

import torch

RATIO_BOUNDS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0)


def ppo_loss(
    log_prob,
    old_log_prob,
    advantages,
    mask,
    *,
    mean,
    rstd,
    denominator,
    weights,
    scale,
    sequence_log_ratio,
    values,
    old_values,
    returns,
    ref_log_prob,
    entropy,
    config,
):
    """See `manus_fast.ops.ppo_loss`, whose checked arguments these are.

    scale: per-token weight of the aggregation, or None; sequence_log_ratio: the row's log ratio at each token, or None.
    """
    compute = log_prob.dtype
    counted = mask & torch.isfinite(log_prob) & torch.isfinite(old_log_prob)

    def keep(x):
        return torch.where(counted, x.to(compute), torch.zeros((), dtype=compute, device=x.device))

    denominator = torch.as_tensor(denominator, dtype=compute, device=log_prob.device)
    inverse = torch.where(denominator > 0, 1 / denominator, 0.0)
    share = keep(torch.ones_like(log_prob) if scale is None else scale) * inverse
    log_prob, old_log_prob = keep(log_prob), keep(old_log_prob)
    advantage = keep((advantages - mean) * rstd)
    weight = keep(torch.ones_like(log_prob) if weights is None else weights)

    token_log_ratio = (log_prob - old_log_prob).clamp(-20, 20)
    log_ratio = token_log_ratio
    if sequence_log_ratio is not None:
        log_ratio = (keep(sequence_log_ratio) + log_prob - log_prob.detach()).clamp(-20, 20)
    policy, clips = _policy_term(log_prob, log_ratio, advantage, config)
    policy = weight * policy
    total = policy
    value_loss, value_clipped = torch.zeros_like(policy), torch.zeros_like(counted)
    if values is not None:
        returns, values = keep(returns), keep(values)
        value_loss = 0.5 * (values - returns) ** 2
        if config.value_clip:
            old_values = keep(old_values)
            near = torch.minimum(torch.maximum(values, old_values - config.value_clip), old_values + config.value_clip)
            clipped = 0.5 * (near - returns) ** 2
            value_clipped = clipped > value_loss
            value_loss = torch.maximum(value_loss, clipped)
        total = total + config.vf_coef * value_loss
    kl = torch.zeros_like(policy)
    if ref_log_prob is not None:
        kl = _kl_term(log_prob, keep(ref_log_prob), config.kl)
        total = total + config.kl_coef * kl
    if entropy is not None:
        entropy = keep(entropy)
        total = total - config.ent_coef * entropy
    loss = (share * total).sum()

    with torch.no_grad():
        zero = torch.zeros_like(policy)
        ratio = keep(log_ratio.exp())
        returns = zero if values is None else returns
        error = zero if values is None else returns - values
        entropy = zero if entropy is None else entropy
        columns = [
            counted, mask & ~counted, share * policy, share * value_loss, share * kl, share * entropy,
            clips[0] & counted, clips[1] & counted, clips[2] & counted, value_clipped & counted,
            -token_log_ratio, token_log_ratio.exp() - 1 - token_log_ratio, kl, entropy, ratio, weight, advantage,
            returns, returns.double() ** 2, error, error.double() ** 2,
            *[ratio > bound for bound in RATIO_BOUNDS],
        ]  # fmt: skip
        sums = torch.stack([column.double().sum() for column in columns])
        if log_ratio.numel():
            largest = torch.stack([ratio.double().max(), log_ratio.abs().double().max()])
        else:
            largest = sums.new_zeros(2)
        stats = torch.cat([sums, largest])
    return loss, stats


def _policy_term(log_prob, log_ratio, advantage, config):
    """Per-token policy loss, and where it was clipped: below, above, by the dual clip."""
    ratio = log_ratio.exp()
    low, high = 1 - config.clip_range, 1 + config.high
    never = torch.zeros_like(ratio, dtype=torch.bool)
    if config.clip == "none":
        return -advantage * ratio, (never, never, never)
    if config.clip == "cispo":
        # The clipped ratio is a constant weight, so that a clipped token still has a gradient.
        policy = -advantage * ratio.clamp(low, high).detach() * log_prob
        return policy, (ratio < low, ratio > high, never)
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(low, high)
    policy = torch.maximum(plain, clipped)
    below, above, dual = (clipped > plain) & (ratio < low), (clipped > plain) & (ratio > high), never
    if config.dual_clip:
        limit = -advantage * config.dual_clip
        dual = (advantage < 0) & (policy > limit)
        policy = torch.where(dual, limit, policy)
    return policy, (below, above, dual)


def _kl_term(log_prob, ref_log_prob, kind):
    """Per-token estimate of KL(policy | reference). Source: http://joschu.net/blog/kl-approx.html (k1, k2, k3)."""
    if kind == "k1":
        return log_prob - ref_log_prob
    k2 = 0.5 * (log_prob - ref_log_prob) ** 2
    if kind == "k2":
        return k2
    d = (ref_log_prob - log_prob).clamp(-20, 20)
    k3 = (d.exp() - d - 1).clamp(-10, 10)
    return k3 if kind == "k3" else k3.detach() + (k2 - k2.detach())
