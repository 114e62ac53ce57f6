"""The specification of every op in plain torch: short, differentiable by autograd, exact in float64, on any device."""

from manus_fast.ops.reference.linear_logprob import linear_logprob
from manus_fast.ops.reference.logprob import logprob

__all__ = ["linear_logprob", "logprob"]
