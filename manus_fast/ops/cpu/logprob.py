"""CPU log-prob and entropy from logits in bounded chunks of rows, with a written backward.

The formulas, for z = logits / T, p = softmax(z), upstream gradients g (log-prob) and h (entropy), target t:
    log_prob = z_t - lse(z)        entropy = lse(z) - Σ p z
    d/dlogits_j = [ g·(1{j = t} - p_j) - h·p_j·(log p_j + entropy) ] / T
"""

import torch
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20
# Stands for a log-probability of -inf: its exp is exactly 0, and its product with 0 and any gradient is 0, not NaN.
IMPOSSIBLE = -1e4


def chunk_rows(vocabulary: int, dtype: torch.dtype) -> int:
    """How many rows of `vocabulary` numbers fit a chunk, at least one."""
    return max(1, CHUNK_BYTES // (vocabulary * dtype.itemsize))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_statistics_(z: torch.Tensor, target: torch.Tensor, entropy: bool):
    """Log-prob `[R]`, entropy `[R]` or None, maximum `[R]` and log-sum-exp over it `[R]` of z `[R, V]`, overwritten.

    The maximum and the rest stay apart, for under a large common offset their sum would lose the digits of the rest.
    """
    top = z.amax(1)
    z.sub_(torch.where(top == -torch.inf, 0.0, top)[:, None])
    z_target = z.gather(1, target[:, None])[:, 0]
    if not entropy:
        log_total = z.exp_().sum(1).log_()
        return z_target - log_total, None, top, log_total
    z.clamp_(min=IMPOSSIBLE)
    e = z.exp()
    total = e.sum(1)
    log_total = total.log()
    return z_target - log_total, log_total - e.mul_(z).sum(1) / total, top, log_total


def row_gradient_(z, target, top, log_total, entropy, grad_log_prob, grad_entropy):
    """Turns z `[R, V]` into the gradient with respect to z, in place. `grad_entropy` None means zero."""
    z.sub_(top[:, None]).sub_(log_total[:, None])
    if grad_entropy is None:
        z.exp_().mul_(-grad_log_prob[:, None])
    else:
        z.clamp_(min=IMPOSSIBLE)
        p = z.exp()
        # -p (g + h (log p + entropy))
        z.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_prob[:, None])
        z.mul_(p)
    return z.scatter_add_(1, target[:, None], grad_log_prob[:, None])


def scale_rows_(z: torch.Tensor, temperature, rows) -> torch.Tensor:
    """Divides z `[R, V]` by the temperature, a number or a tensor of which `rows` are these rows'."""
    if isinstance(temperature, torch.Tensor):
        return z.div_(temperature[rows].to(z.dtype)[:, None])
    return z if temperature == 1.0 else z.div_(temperature)


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, temperature, entropy, inplace_backward):
        dtype = compute_dtype(logits.dtype)
        outputs = torch.zeros(4, logits.shape[0], dtype=dtype)
        rows_at_once = chunk_rows(logits.shape[1], dtype)
        valid = (target >= 0).nonzero()[:, 0]
        for rows in valid.split(rows_at_once):
            z = scale_rows_(logits[rows].to(dtype), temperature, rows)
            log_prob, row_entropy, top, log_total = row_statistics_(z, target[rows], entropy)
            outputs[0, rows], outputs[2, rows], outputs[3, rows] = log_prob, top, log_total
            if entropy:
                outputs[1, rows] = row_entropy
        ctx.save_for_backward(logits, target, *outputs[1:].unbind())
        ctx.temperature, ctx.inplace, ctx.rows_at_once = temperature, inplace_backward, rows_at_once
        ctx.set_materialize_grads(False)
        return outputs[0].clone(), outputs[1].clone() if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        logits, target, entropy, top, log_total = ctx.saved_tensors
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(top)
        gradient = logits if ctx.inplace else torch.empty_like(logits)
        for rows in torch.arange(logits.shape[0]).split(ctx.rows_at_once):
            valid = target[rows] >= 0
            rows_valid = rows[valid]
            z = scale_rows_(logits[rows_valid].to(top.dtype), ctx.temperature, rows_valid)
            row_gradient_(
                z,
                target[rows_valid],
                top[rows_valid],
                log_total[rows_valid],
                entropy[rows_valid],
                grad_log_prob[rows_valid],
                None if grad_entropy is None else grad_entropy[rows_valid],
            )
            gradient[rows_valid] = scale_rows_(z, ctx.temperature, rows_valid).to(gradient.dtype)
            gradient[rows[~valid]] = 0
        return gradient, None, None, None, None


def logprob(logits, target, *, temperature=1.0, entropy=True, inplace_backward=False):
    """`manus_fast.ops.logprob` on the CPU; arguments already checked. One chunk of float32 rows is held at a time."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach()
    return _Logprob.apply(logits, target, temperature, entropy, inplace_backward)
