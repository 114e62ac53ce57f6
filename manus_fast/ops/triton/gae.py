"""Generalised advantage estimation in Triton: a program a row, suffix scans of affine maps over blocks of the row.

What a token's right neighbours add to it, x, changes from token to token by an affine map (csrc/ops/gae.cu has the
algebra). Each position scans the maps of the positions right of it, so their rewards and values are loaded one further.
"""

import torch
import triton
import triton.language as tl

# The next turn in the mask, as a scan: what a token outside the mask holds, and what the end of a row holds.
_TRANSPARENT = tl.constexpr(-2147483648)
_NO_TURN = tl.constexpr(-2147483647)


@triton.jit
def _reached(factor, x):
    """factor * x, 0 where the factor is: there a row or turn ends, and NaN or infinity stays beyond."""
    return tl.where(factor == 0.0, 0.0, factor * x)


@triton.jit
def _after(right_m, right_b, left_m, left_b):
    return left_m * right_m, _reached(left_m, right_b) + left_b


@triton.jit
def _after_turns(rp, rq, rs, ru, rw, p, q, s, u, w):
    # Of (x, y): x -> p x + q y + s, y -> u y + w; x inside the turn, y what a turn that ends here is followed by.
    return p * rp, p * rq + q * ru, _reached(p, rs) + _reached(q, rw) + s, u * ru, _reached(u, rw) + w


@triton.jit
def _over(right, left):
    return tl.where(left != _TRANSPARENT, left, right)


@triton.jit
def _next_turn(mask_ptr, turn_ptr, at, end, carry):
    """Turn of the first token in the mask at `at` or right of it; carry: the same at the right end of the block."""
    mask = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
    turn = tl.load(turn_ptr + at, mask=mask, other=0)
    found = tl.associative_scan(tl.where(mask, turn, _TRANSPARENT), 0, _over, reverse=True)
    return tl.where(found != _TRANSPARENT, found, carry)


@triton.jit
def _gae_kernel(
    rewards, values, masks, turns, bootstrap, cu_seqlens, advantages, returns, partials, length,
    gamma, decay, rest, token_decay, token_rest,
    PACKED: tl.constexpr, BOOTSTRAP: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, end = row * length, (row + 1) * length
    if PACKED:
        start, end = tl.load(cu_seqlens + row).to(tl.int64), tl.load(cu_seqlens + row + 1).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x_carry, y_carry = gamma * 0.0, gamma * 0.0
    if BOOTSTRAP:
        y_carry = gamma * tl.load(bootstrap + row)
    if not TURNS:
        x_carry = y_carry
    next_carry, next_carry_2 = tl.full((), _NO_TURN, tl.int32), tl.full((), _NO_TURN, tl.int32)
    count = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    square = tl.zeros((BLOCK,), tl.float64)
    blocks = tl.cdiv(end - start, BLOCK)
    for j in range(0, blocks):
        at = start + (blocks - 1 - j) * BLOCK + lanes
        here = at < end
        mask = tl.load(masks + at, mask=here, other=0) != 0
        r, v = tl.load(rewards + at, mask=mask, other=0.0), tl.load(values + at, mask=mask, other=0.0)
        right_mask = tl.load(masks + at + 1, mask=at + 1 < end, other=0) != 0
        right_r = tl.load(rewards + at + 1, mask=right_mask, other=0.0)
        right_v = tl.load(values + at + 1, mask=right_mask, other=0.0)
        if TURNS:
            turn = tl.load(turns + at, mask=mask, other=0)
            right_turn = tl.load(turns + at + 1, mask=right_mask, other=0)
            following = _next_turn(masks, turns, at + 1, end, next_carry)
            following_2 = _next_turn(masks, turns, at + 2, end, next_carry_2)
            last = mask & (turn != following)
            right_last = right_mask & (right_turn != following_2)
            inside = token_decay * right_r + token_rest * right_v
            p = tl.where(right_mask, tl.where(right_last, 0.0, token_decay), 1.0)
            q = tl.where(right_last, token_decay, 0.0)
            s = tl.where(right_mask, inside, 0.0)
            u = tl.where(right_last, decay, 1.0)
            w = tl.where(right_last, decay * right_r + rest * right_v, tl.where(right_mask, decay * right_r, 0.0))
            p, q, s, u, w = tl.associative_scan((p, q, s, u, w), 0, _after_turns, reverse=True)
            x = _reached(p, x_carry) + _reached(q, y_carry) + s
            y = _reached(u, y_carry) + w
            added = tl.where(last, y, x)
            next_carry = tl.sum(tl.where(lanes == 0, following, 0))
            next_carry_2 = tl.sum(tl.where(lanes == 0, following_2, 0))
            y_carry = tl.sum(tl.where(lanes == 0, y, 0.0))
        else:
            m = tl.where(right_mask, decay, 1.0)
            b = tl.where(right_mask, decay * right_r + rest * right_v, 0.0)
            m, b = tl.associative_scan((m, b), 0, _after, reverse=True)
            x = _reached(m, x_carry) + b
            added = x
        x_carry = tl.sum(tl.where(lanes == 0, x, 0.0))
        a = tl.where(mask, r - v + added, 0.0)
        tl.store(advantages + at, a, mask=here)
        tl.store(returns + at, tl.where(mask, r + added, 0.0), mask=here)
        wide = a.to(tl.float64)
        count += mask.to(tl.float64)
        total += wide
        square += wide * wide
    tl.store(partials + row * 3, tl.sum(count))
    tl.store(partials + row * 3 + 1, tl.sum(total))
    tl.store(partials + row * 3 + 2, tl.sum(square))


@triton.jit
def _stats_kernel(partials, stats, rows, BLOCK: tl.constexpr):
    """Adds the rows' partials in a fixed order; one program."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    square = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, rows, BLOCK):
        row = first + lanes
        count += tl.load(partials + row * 3, mask=row < rows, other=0.0)
        total += tl.load(partials + row * 3 + 1, mask=row < rows, other=0.0)
        square += tl.load(partials + row * 3 + 2, mask=row < rows, other=0.0)
    n, s = tl.sum(count), tl.sum(total)
    mean = s / tl.maximum(n, 1.0)
    tl.store(stats, n)
    tl.store(stats + 1, mean)
    m2 = tl.sum(square) - s * mean
    tl.store(stats + 2, tl.where(m2 < 0.0, 0.0, m2))  # NaN stays NaN


def gae(rewards, values, mask, gamma, lam, *, bootstrap, cu_seqlens, turn_id, token_gamma, token_lam):
    """The arguments of `manus_fast.ops.gae`, checked; float32."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    packed = cu_seqlens is not None
    rows = cu_seqlens.numel() - 1 if packed else rewards.shape[0]
    length = rewards.numel() // max(rows, 1)
    partials = torch.empty(rows, 3, dtype=torch.float64, device=rewards.device)
    stats = torch.empty(3, dtype=torch.float64, device=rewards.device)
    if rows:
        block = min(2048, max(64, triton.next_power_of_2(length)))
        _gae_kernel[(rows,)](
            rewards, values, mask.view(torch.uint8), turn_id, bootstrap, cu_seqlens, advantages, returns, partials,
            length, gamma, gamma * lam, gamma * (1 - lam), token_gamma * token_lam, token_gamma * (1 - token_lam),
            PACKED=packed, BOOTSTRAP=bootstrap is not None, TURNS=turn_id is not None, BLOCK=block,
        )  # fmt: skip
    _stats_kernel[(1,)](partials, stats, rows, BLOCK=1024)
    return advantages, returns, stats
