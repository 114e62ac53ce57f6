"""The ops: plain functions on tensors, usable alone. `reference` says what each means, `dispatch` how each runs."""

from manus_fast.ops.linear_logprob import linear_logprob
from manus_fast.ops.logprob import logprob

__all__ = ["linear_logprob", "logprob"]
