"""CPU `linear_logprob`: matrix products on chunks of rows, reductions on each chunk at once, a written backward.

Rows with target < 0 are dropped before the first product, so a batch costs what its trained tokens cost. At any time
one chunk of logits (64 MiB) is held, plus those that `keep` may hold for the backward. fp16 and bf16 operands are
converted to float32 first (a float32 copy of the weight exists during each pass).
"""

import functools

import torch
from torch.autograd.function import once_differentiable

from manus_fast.ops.cpu.logprob import Rows, chunk_rows, compute_dtype

KEEP_BYTES = 256 << 20


def _without_autocast(function):
    """Under autocast the products would be bf16, and the kernels read them as the float32 that they were made of."""

    @functools.wraps(function)
    def run(*arguments):
        with torch.autocast("cpu", enabled=False):
            return function(*arguments)

    return run


def _logits(hidden_rows, weight, bias, softcap):
    """cap(hidden weightᵀ + bias) `[R, V]` in the dtype of its operands."""
    z = hidden_rows @ weight.T if bias is None else torch.addmm(bias, hidden_rows, weight.T)
    return z if softcap is None else z.div_(softcap).tanh_().mul_(softcap)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(ctx, hidden, weight, bias, target, temperature, entropy, softcap, keep_bytes):
        dtype = compute_dtype(hidden.dtype)
        vocabulary, per_row = weight.shape[0], isinstance(temperature, torch.Tensor)
        wide_weight = weight.to(dtype)
        wide_bias = None if bias is None else bias.to(dtype)
        log_prob, row_entropy = (hidden.new_zeros(hidden.shape[0], dtype=dtype) for _ in range(2))
        chunks, kept = [], []
        for rows in (target >= 0).nonzero()[:, 0].split(chunk_rows(vocabulary, dtype)):
            if not len(rows):
                continue  # what split makes of nothing
            z = _logits(hidden[rows].to(dtype), wide_weight, wide_bias, softcap)
            state = Rows(target[rows], temperature[rows] if per_row else temperature, entropy, dtype)
            state.read(z)
            chunks.append((rows, state))
            if sum(k.nbytes for k in kept) + z.nbytes <= keep_bytes:
                kept.append(z)
            log_prob[rows] = state.log_prob
            if entropy:
                row_entropy[rows] = state.entropy
        ctx.save_for_backward(hidden, weight, bias)
        ctx.softcap, ctx.chunks, ctx.kept = softcap, chunks, kept
        ctx.set_materialize_grads(False)
        return log_prob, row_entropy if entropy else None

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, bias = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dtype = compute_dtype(hidden.dtype)
        if grad_log_prob is None:
            grad_log_prob = hidden.new_zeros(hidden.shape[0], dtype=dtype)
        wide_weight = weight.to(dtype)
        wide_bias = None if bias is None else bias.to(dtype)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = weight.new_zeros(weight.shape, dtype=dtype) if need_weight else None
        grad_bias = weight.new_zeros(weight.shape[0], dtype=dtype) if need_bias else None
        for index, (rows, state) in enumerate(ctx.chunks):
            hidden_rows = hidden[rows].to(dtype)
            kept = index < len(ctx.kept)  # and stays for another pass through the graph
            z = ctx.kept[index] if kept else _logits(hidden_rows, wide_weight, wide_bias, ctx.softcap)
            to = z if not kept and ctx.softcap is None else torch.empty_like(z)
            upstream = (grad_log_prob[rows], None if grad_entropy is None else grad_entropy[rows])
            dz = state.gradient(z, *upstream, to)
            if ctx.softcap is not None:
                dz.mul_(1 - (z / ctx.softcap).square_())
            if need_hidden:
                grad_hidden[rows] = (dz @ wide_weight).to(hidden.dtype)
            if need_weight:
                grad_weight.addmm_(dz.T, hidden_rows)
            if need_bias:
                grad_bias += dz.sum(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if need_weight else None,
            grad_bias.to(bias.dtype) if need_bias else None,
            None,
            None,
            None,
            None,
            None,
        )


def linear_logprob(
    hidden, weight, target, *, temperature=1.0, bias=None, entropy=True, softcap=None, mode="auto", keep_bytes=None
):
    """`manus_fast.ops.linear_logprob` on the CPU; arguments already checked."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach()
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if mode == "recompute" or not needs_gradient:
        keep_bytes = 0
    elif keep_bytes is None:
        keep_bytes = KEEP_BYTES if mode == "auto" else target.numel() * weight.shape[0] * 8
    return _LinearLogprob.apply(hidden, weight, bias, target, temperature, entropy, softcap, keep_bytes)
