"""The specification of every op in plain torch: short, differentiable by autograd, exact in float64, on any device."""

from manus_fast.ops.reference.gae import gae
from manus_fast.ops.reference.group_advantages import group_advantages
from manus_fast.ops.reference.linear_logprob import linear_logprob
from manus_fast.ops.reference.logprob import logprob
from manus_fast.ops.reference.packed_attention import packed_attention
from manus_fast.ops.reference.ppo_loss import ppo_loss
from manus_fast.ops.reference.slot_attention import slot_attention

__all__ = ["gae", "group_advantages", "linear_logprob", "logprob", "packed_attention", "ppo_loss", "slot_attention"]
