"""Triton log-prob and entropy from logits: one read of the logits forward; one read and one write backward.

Everything is kept relative to the target's logit and in base 2: with y_j = (z_j - z_t)·log2(e)/T and L = log2 Σ 2^y,
    log_prob = -L·ln 2        entropy = (L - Σ 2^y y / Σ 2^y)·ln 2
which loses no digits under a common offset of any size. Each lane keeps its own running maximum, sum and weighted sum
over the K values it sees per step, so the loop over the vocabulary has no communication between threads and no barrier;
lanes meet once per row.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Below every logit that counts; unlike -inf it may be subtracted from itself.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def lane_update(y, top, total, weighted):
    """Takes y `[K, L]` into the running maximum, Σ 2^(y - top) and Σ 2^(y - top)·y of each lane `[L]`."""
    new_top = tl.maximum(top, tl.max(y, axis=0))
    decay = tl.exp2(top - new_top)
    e = tl.exp2(y - new_top[None, :])
    total = total * decay + tl.sum(e, axis=0)
    # The product with e = 0 must be 0 also where y = -inf.
    weighted = weighted * decay + tl.sum(e * tl.maximum(y, LOWEST), axis=0)
    return new_top, total, weighted


@triton.jit
def lane_merge(top, total, weighted):
    """The row's maximum, sum and weighted sum from those of its lanes."""
    row_top = tl.max(top, axis=0)
    decay = tl.exp2(top - row_top)
    return row_top, tl.sum(total * decay, axis=0), tl.sum(weighted * decay, axis=0)


@triton.jit
def _logprob_forward_kernel(
    logits, row_stride, target, temperature, scale,
    log_prob, entropy, z_target_out, log_total_out,
    V, PER_ROW: tl.constexpr, ENTROPY: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target + row)
    if t < 0:
        tl.store(log_prob + row, 0.0)
        tl.store(z_target_out + row, 0.0)
        tl.store(log_total_out + row, 0.0)
        if ENTROPY:
            tl.store(entropy + row, 0.0)
        return
    base = logits + row * row_stride
    z_target = tl.load(base + t, mask=t < V, other=float("nan")).to(tl.float32)
    shift = tl.where(z_target == float("-inf"), 0.0, z_target)
    if PER_ROW:
        scale = LOG2E / tl.load(temperature + row).to(tl.float32)
    inner = tl.arange(0, K)[:, None] * L + tl.arange(0, L)[None, :]
    top = tl.full([L], LOWEST, tl.float32)
    total = tl.zeros([L], tl.float32)
    weighted = tl.zeros([L], tl.float32)
    full = V // (K * L) * (K * L)
    for start in range(0, full, K * L):
        z = tl.load(base + start + inner).to(tl.float32)
        top, total, weighted = lane_update((z - shift) * scale, top, total, weighted)
    if full < V:
        z = tl.load(base + full + inner, mask=full + inner < V, other=float("-inf")).to(tl.float32)
        top, total, weighted = lane_update((z - shift) * scale, top, total, weighted)
    row_top, row_total, row_weighted = lane_merge(top, total, weighted)
    log_total = row_top + tl.log2(row_total)
    tl.store(log_prob + row, ((z_target - shift) * scale - log_total) * LN2)
    tl.store(z_target_out + row, shift)
    tl.store(log_total_out + row, log_total)
    if ENTROPY:
        tl.store(entropy + row, (log_total - row_weighted / row_total) * LN2)


@triton.jit
def gradient_of_logits(y, log_total, is_target, g, h, row_entropy):
    """d/dz of g·log_prob + h·entropy, before the factor 1/T; y, log_total in base 2 relative to the target's logit."""
    log_p = tl.maximum(y - log_total, LOWEST)
    p = tl.exp2(log_p)
    return tl.where(is_target, g, 0.0) - p * (g + h * (log_p * LN2 + row_entropy))


@triton.jit
def _logprob_backward_kernel(
    logits, row_stride, target, temperature, inverse,
    grad_log_prob, grad_entropy, entropy, z_target, log_total, out, out_stride,
    V, blocks, PER_ROW: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    t = tl.load(target + row)
    if t < 0:
        tl.store(out + row * out_stride + columns, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)
        return
    z = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    g = tl.load(grad_log_prob + row).to(tl.float32)
    h = 0.0
    row_entropy = 0.0
    if ENTROPY:
        h = tl.load(grad_entropy + row).to(tl.float32)
        row_entropy = tl.load(entropy + row)
    if PER_ROW:
        inverse = 1.0 / tl.load(temperature + row).to(tl.float32)
    y = (z - tl.load(z_target + row)) * (inverse * LOG2E)
    gradient = gradient_of_logits(y, tl.load(log_total + row), columns == t, g, h, row_entropy) * inverse
    tl.store(out + row * out_stride + columns, gradient.to(out.dtype.element_ty), mask=inside)


def lanes(vocabulary: int) -> dict[str, int]:
    """Shape of a forward program: K values a step in each of L lanes, fitted to short rows."""
    if vocabulary <= 4096:
        return {"K": 2, "L": max(32, triton.next_power_of_2(triton.cdiv(vocabulary, 2))), "num_warps": 4}
    return {"K": 8, "L": 1024, "num_warps": 4}


def temperature_arguments(temperature, fallback: torch.Tensor) -> tuple[torch.Tensor, float, bool]:
    """Kernel arguments for a temperature: pointer (`fallback` when it is a number), the number, and whether per row."""
    if isinstance(temperature, torch.Tensor):
        return temperature.detach().contiguous(), 1.0, True
    return fallback, float(temperature), False


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, temperature, entropy, inplace_backward):
        n, vocabulary = logits.shape
        log_prob, row_entropy, z_target, log_total = torch.empty(4, n, dtype=torch.float32, device=logits.device)
        target = target.contiguous()
        pointer, number, per_row = temperature_arguments(temperature, log_prob)
        if n:
            _logprob_forward_kernel[(n,)](
                logits, logits.stride(0), target, pointer, LOG2E.value / number,
                log_prob, row_entropy, z_target, log_total,
                vocabulary, PER_ROW=per_row, ENTROPY=entropy, **lanes(vocabulary),
            )  # fmt: skip
        ctx.save_for_backward(logits, target, row_entropy, z_target, log_total)
        ctx.temperature, ctx.inplace = (pointer, number, per_row), inplace_backward
        ctx.set_materialize_grads(False)
        return log_prob, row_entropy.clone() if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        logits, target, entropy, z_target, log_total = ctx.saved_tensors
        pointer, number, per_row = ctx.temperature
        n, vocabulary = logits.shape
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(log_total)
        use_entropy = grad_entropy is not None
        out = logits if ctx.inplace else torch.empty_like(logits)
        block = min(1024, triton.next_power_of_2(vocabulary))
        blocks = triton.cdiv(vocabulary, block)
        if n:
            _logprob_backward_kernel[(n * blocks,)](
                logits, logits.stride(0), target, pointer, 1.0 / number,
                grad_log_prob.contiguous(), grad_entropy.contiguous() if use_entropy else entropy,
                entropy, z_target, log_total, out, out.stride(0),
                vocabulary, blocks, PER_ROW=per_row, ENTROPY=use_entropy, BLOCK=block, num_warps=1,
            )  # fmt: skip
        if ctx.inplace:
            # The kernel wrote behind autograd's back: whoever saved the logits must hear of it.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None


def logprob(logits, target, *, temperature=1.0, entropy=True, inplace_backward=False):
    """`manus_fast.ops.logprob` in Triton; arguments already checked."""
    return _Logprob.apply(logits, target, temperature, entropy, inplace_backward)
