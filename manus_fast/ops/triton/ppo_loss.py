"""The policy-gradient loss in Triton: loss, gradient and statistics in one pass, then the partials are added."""

import torch
import triton
import triton.language as tl

from manus_fast.ops.ppo_loss import CLIPS, KLS, MAXIMA, STAT_NAMES, WrittenGradient

_STATS = len(STAT_NAMES)


@triton.jit
def _exp_remainder(x, exp_x):
    """e^x - x - 1, by its series near 0, where the difference would cancel."""
    series = x * x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120))))
    return tl.where(tl.abs(x) < 0.125, series, exp_x - x - 1.0)


_NAN = tl.constexpr(tl.PropagateNan.ALL)  # NaN among the two stays NaN


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low, propagate_nan=_NAN), high, propagate_nan=_NAN)


@triton.jit
def _ppo_loss_kernel(
    log_probs, old_log_probs, advantages, masks, weights, scales, sequence, values, old_values, returns, refs,
    entropies, means, rstds, denominators, grad_log_probs, grad_values, grad_entropies, partials, n,
    clip_low, clip_high, dual_clip, value_clip, vf_coef, kl_coef, ent_coef,
    CLIP: tl.constexpr, KL: tl.constexpr, WEIGHT: tl.constexpr, SCALE: tl.constexpr, SEQUENCE: tl.constexpr,
    VALUE: tl.constexpr, VALUE_CLIP: tl.constexpr, DUAL: tl.constexpr, REF: tl.constexpr, ENTROPY: tl.constexpr,
    STATS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    mean, rstd = tl.load(means).to(tl.float32), tl.load(rstds).to(tl.float32)
    denominator = tl.load(denominators)
    inverse = tl.where(denominator > 0, 1.0 / tl.where(denominator > 0, denominator, 1.0), 0.0).to(tl.float32)
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    mask = tl.load(masks + at, mask=here, other=0) != 0
    lp = tl.load(log_probs + at, mask=mask, other=0.0)
    old = tl.load(old_log_probs + at, mask=mask, other=0.0)
    # Not finite: infinite or NaN, of which x - x is NaN.
    counted = mask & (lp - lp == 0.0) & (old - old == 0.0)
    lp, old = tl.where(counted, lp, 0.0), tl.where(counted, old, 0.0)
    one = tl.where(counted, 1.0, 0.0)
    advantage = tl.where(counted, (tl.load(advantages + at, mask=counted, other=0.0) - mean) * rstd, 0.0)
    weight, scale = one, one
    if WEIGHT:
        weight = tl.load(weights + at, mask=counted, other=0.0)
    if SCALE:
        scale = tl.load(scales + at, mask=counted, other=0.0)
    share = scale * inverse
    free = lp - old
    token_log_ratio = _clamp(free, -20.0, 20.0)
    token_ratio = tl.exp(token_log_ratio)
    log_ratio, ratio = token_log_ratio, token_ratio
    if SEQUENCE:
        free = tl.load(sequence + at, mask=counted, other=0.0)
        log_ratio = _clamp(free, -20.0, 20.0)
        ratio = tl.exp(log_ratio)
    bounded = _clamp(ratio, clip_low, clip_high)
    zero = one * 0.0
    below, above, dual, value_cut = mask & False, mask & False, mask & False, mask & False
    if CLIP == 1:
        slope = -advantage * bounded
        policy = slope * lp
        below, above = ratio < clip_low, ratio > clip_high
    else:
        policy = -advantage * ratio
        slope = tl.where(tl.abs(free) <= 20.0, policy, 0.0)
        if CLIP == 0:
            clipped = -advantage * bounded
            cut = clipped > policy
            below, above = cut & (ratio < clip_low), cut & (ratio > clip_high)
            policy, slope = tl.where(cut, clipped, policy), tl.where(cut, 0.0, slope)
            if DUAL:
                limit = -advantage * dual_clip
                dual = (advantage < 0.0) & (policy > limit)
                policy, slope = tl.where(dual, limit, policy), tl.where(dual, 0.0, slope)
    policy = policy * weight
    gradient = slope * weight
    value_loss, returned, error, kl, entropy = zero, zero, zero, zero, zero
    if VALUE:
        value = tl.load(values + at, mask=counted, other=0.0)
        returned = tl.load(returns + at, mask=counted, other=0.0)
        error = value - returned
        value_loss, value_slope = 0.5 * error * error, error
        if VALUE_CLIP:
            old_value = tl.load(old_values + at, mask=counted, other=0.0)
            near = _clamp(value, old_value - value_clip, old_value + value_clip)
            clipped = 0.5 * (near - returned) * (near - returned)
            value_cut = clipped > value_loss
            value_loss = tl.maximum(value_loss, clipped, propagate_nan=_NAN)
            value_slope = tl.where(value_cut, 0.0, value_slope)
        tl.store(grad_values + at, share * vf_coef * value_slope, mask=here)
    if REF:
        d = tl.load(refs + at, mask=counted, other=0.0) - lp
        if KL == 0:
            kl, kl_slope = -d, one
        elif KL == 1:
            kl, kl_slope = 0.5 * d * d, -d
        else:
            bounded_d = _clamp(d, -20.0, 20.0)
            exp_d = tl.exp(bounded_d)
            k3 = _exp_remainder(bounded_d, exp_d)
            kl = tl.minimum(k3, 10.0, propagate_nan=_NAN)
            if KL == 2:
                kl_slope = tl.where((tl.abs(d) > 20.0) | (k3 > 10.0), 0.0, 1.0 - exp_d)
            else:
                kl_slope = -d
                kl += 0.0 * d  # infinite d: its gradient is no number either
        gradient += kl_coef * kl_slope
    if ENTROPY:
        entropy = tl.load(entropies + at, mask=counted, other=0.0)
        tl.store(grad_entropies + at, -ent_coef * share, mask=here)
    tl.store(grad_log_probs + at, share * gradient, mask=here)
    ratio = tl.where(counted, ratio, 0.0)

    # In the order of STAT_NAMES.
    out = partials + pid.to(tl.int64) * STATS
    tl.store(out + 0, tl.sum(one.to(tl.float64)))
    tl.store(out + 1, tl.sum((mask & (counted == 0)).to(tl.float64)))
    tl.store(out + 2, tl.sum(share * policy).to(tl.float64))
    tl.store(out + 3, tl.sum(share * value_loss).to(tl.float64))
    tl.store(out + 4, tl.sum(share * kl).to(tl.float64))
    tl.store(out + 5, tl.sum(share * entropy).to(tl.float64))
    tl.store(out + 6, tl.sum((below & counted).to(tl.float32)).to(tl.float64))
    tl.store(out + 7, tl.sum((above & counted).to(tl.float32)).to(tl.float64))
    tl.store(out + 8, tl.sum((dual & counted).to(tl.float32)).to(tl.float64))
    tl.store(out + 9, tl.sum((value_cut & counted).to(tl.float32)).to(tl.float64))
    tl.store(out + 10, -tl.sum(token_log_ratio).to(tl.float64))
    tl.store(out + 11, tl.sum(_exp_remainder(token_log_ratio, token_ratio)).to(tl.float64))
    tl.store(out + 12, tl.sum(kl).to(tl.float64))
    tl.store(out + 13, tl.sum(entropy).to(tl.float64))
    tl.store(out + 14, tl.sum(ratio).to(tl.float64))
    tl.store(out + 15, tl.sum(weight).to(tl.float64))
    tl.store(out + 16, tl.sum(advantage).to(tl.float64))
    wide_return, wide_error = returned.to(tl.float64), error.to(tl.float64)
    tl.store(out + 17, tl.sum(wide_return))
    tl.store(out + 18, tl.sum(wide_return * wide_return))
    tl.store(out + 19, -tl.sum(wide_error))
    tl.store(out + 20, tl.sum(wide_error * wide_error))
    # The bounds of manus_fast.ops.reference.ppo_loss.RATIO_BOUNDS.
    tl.store(out + 21, tl.sum((ratio > 1.02).to(tl.float32)).to(tl.float64))
    tl.store(out + 22, tl.sum((ratio > 1.05).to(tl.float32)).to(tl.float64))
    tl.store(out + 23, tl.sum((ratio > 1.1).to(tl.float32)).to(tl.float64))
    tl.store(out + 24, tl.sum((ratio > 1.2).to(tl.float32)).to(tl.float64))
    tl.store(out + 25, tl.sum((ratio > 1.5).to(tl.float32)).to(tl.float64))
    tl.store(out + 26, tl.sum((ratio > 2.0).to(tl.float32)).to(tl.float64))
    tl.store(out + 27, tl.sum((ratio > 5.0).to(tl.float32)).to(tl.float64))
    tl.store(out + 28, tl.max(ratio).to(tl.float64))
    tl.store(out + 29, tl.max(tl.where(counted, tl.abs(log_ratio), 0.0)).to(tl.float64))


@triton.jit
def _add_kernel(partials, stats, programs, STATS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Program k adds (or takes the largest of) entry k of every partial, in a fixed order."""
    k = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, programs, BLOCK):
        row = first + lanes
        x = tl.load(partials + row.to(tl.int64) * STATS + k, mask=row < programs, other=0.0)
        total = tl.where(k < SUMS, total + x, tl.maximum(total, x))
    tl.store(stats + k, tl.where(k < SUMS, tl.sum(total), tl.max(total)))


def ppo_loss(
    log_prob, old_log_prob, advantages, mask, *, mean, rstd, denominator, weights, scale, sequence_log_ratio, values,
    old_values, returns, ref_log_prob, entropy, config,
):  # fmt: skip
    """The arguments of `manus_fast.ops.ppo_loss`, checked; float32."""

    def launch():
        n, device = log_prob.numel(), log_prob.device
        block = 1024
        programs = triton.cdiv(n, block)
        partials = torch.empty(programs, _STATS, dtype=torch.float64, device=device)
        stats = torch.zeros(_STATS, dtype=torch.float64, device=device)
        scalars = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in (mean, rstd, denominator)]
        gradients = [None if x is None else torch.empty_like(x) for x in (log_prob, values, entropy)]
        clips_values = values is not None and config.value_clip is not None
        if n:
            _ppo_loss_kernel[(programs,)](
                log_prob, old_log_prob, advantages, mask.view(torch.uint8), weights, scale, sequence_log_ratio, values,
                old_values, returns, ref_log_prob, entropy, *scalars, *gradients, partials, n,
                1 - config.clip_range, 1 + config.high, config.dual_clip or 0.0, config.value_clip or 0.0,
                config.vf_coef, config.kl_coef, config.ent_coef,
                CLIP=CLIPS.index(config.clip), KL=KLS.index(config.kl), WEIGHT=weights is not None,
                SCALE=scale is not None, SEQUENCE=sequence_log_ratio is not None, VALUE=values is not None,
                VALUE_CLIP=clips_values, DUAL=config.dual_clip is not None, REF=ref_log_prob is not None,
                ENTROPY=entropy is not None, STATS=_STATS, BLOCK=block,
            )  # fmt: skip
            _add_kernel[(_STATS,)](partials, stats, programs, STATS=_STATS, SUMS=_STATS - MAXIMA, BLOCK=256)
        _, _, policy, value, kl, bonus = stats[:6]
        loss = (policy + config.vf_coef * value + config.kl_coef * kl - config.ent_coef * bonus).float()
        return loss, stats, gradients

    return WrittenGradient.apply(launch, _scale, log_prob, values, entropy)


def _scale(gradients, upstream):
    return [gradient * upstream for gradient in gradients]
