"""Log-probability of a target and entropy from logits: the specification."""

import torch


def logprob(logits, target, *, temperature=1.0, entropy=True, inplace_backward=False):
    """Of logits `[N, V]` and target int64 `[N]`: log-prob `[N]` of the target, and entropy `[N]` or None.

    Both belong to softmax(logits / temperature), in float32 (float64 for float64 logits); temperature is a number or
    `[N]`. A row with target < 0 is ignored: exact zeros out, zero gradient. `inplace_backward` is a permission that
    the specification does not use.
    """
    del inplace_backward
    compute = torch.float64 if logits.dtype == torch.float64 else torch.float32
    valid = target >= 0
    scaled = logits.to(compute)
    if isinstance(temperature, torch.Tensor):
        scaled = scaled / temperature.to(compute)[:, None]
    else:
        scaled = scaled / temperature
    # Ignored rows are replaced before the softmax, so that whatever they hold (NaN, all -inf) reaches no gradient.
    scaled = torch.where(valid[:, None], scaled, torch.zeros((), dtype=compute, device=scaled.device))
    log_p = torch.log_softmax(scaled, dim=-1)
    log_prob = torch.where(valid, log_p.gather(1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    if not entropy:
        return log_prob, None
    # A logit of -inf has p = 0 and adds 0 to the entropy: the product 0 * -inf is never formed.
    possible = log_p != -torch.inf  # NaN stays NaN
    safe = torch.where(possible, log_p, 0.0)
    row_entropy = -(torch.where(possible, safe.exp(), 0.0) * safe).sum(-1)
    return log_prob, torch.where(valid, row_entropy, 0.0)
