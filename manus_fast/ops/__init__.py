"""The ops: plain functions on tensors, usable alone. `dispatch` chooses how each runs, `reference` says what each means."""

from manus_fast.ops.linear_logprob import linear_logprob
from manus_fast.ops.logprob import logprob

__all__ = ["linear_logprob", "logprob"]
