"""Log-probability and entropy straight from hidden states and the output matrix: the specification."""

import torch

from manus_fast.ops.reference.logprob import logprob


def linear_logprob(
    hidden, weight, target, *, temperature=1.0, bias=None, entropy=True, softcap=None, mode="auto", keep_bytes=None
):
    """`logprob` of logits = cap(hidden weightᵀ + bias), with cap(z) = softcap·tanh(z / softcap) or the identity.

    hidden `[N, H]`, weight `[V, H]`, bias `[V]` or None, target int64 `[N]`. The whole `[N, V]` matrix is held, in
    float32 (float64 for float64 input); `mode` and `keep_bytes` say how much memory others may use and change nothing
    here.
    """
    del mode, keep_bytes
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    # What an ignored row holds (NaN) would reach the weight's gradient: 0 times NaN is NaN.
    hidden = torch.where((target >= 0)[:, None], hidden, 0.0)
    logits = hidden.to(compute) @ weight.to(compute).T
    if bias is not None:
        logits = logits + bias.to(compute)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logprob(logits, target, temperature=temperature, entropy=entropy)
