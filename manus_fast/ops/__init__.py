"""The ops: plain functions on tensors, usable alone. `reference` says what each means, `dispatch` how each runs."""

from manus_fast.ops.gae import gae, merge_stats, normalizer
from manus_fast.ops.group_advantages import discounted_returns, gigpo_advantages, group_advantages, step_groups
from manus_fast.ops.linear_logprob import linear_logprob
from manus_fast.ops.logprob import logprob
from manus_fast.ops.packed_attention import packed_attention
from manus_fast.ops.ppo_loss import PPOLossConfig, loss_denominator, loss_metrics, merge_loss_stats, ppo_loss
from manus_fast.ops.slot_attention import slot_attention

__all__ = [
    "PPOLossConfig", "discounted_returns", "gae", "gigpo_advantages", "group_advantages", "linear_logprob", "logprob",
    "loss_denominator", "loss_metrics", "merge_loss_stats", "merge_stats", "normalizer", "packed_attention",
    "ppo_loss", "slot_attention", "step_groups",
]  # fmt: skip
