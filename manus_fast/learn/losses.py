"""What a policy-gradient update is made of: `PPOConfig`, and the loss of one micro-batch.

Algorithms are combinations of an advantage, a ratio level, a clip and an aggregation (`learn/presets.py` names some);
the arithmetic is `ops.ppo_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manus_fast.data.packing import PackedRows
from manus_fast.learn.advantages import CRITIC_KINDS, KINDS
from manus_fast.learn.optim import OptimizerConfig
from manus_fast.learn.policy import CRITICS, ScoreOutput
from manus_fast.learn.schedules import KLController, Schedule, schedule
from manus_fast.ops.ppo_loss import PPOLossConfig, loss_denominator, ppo_loss


@dataclass
class PPOConfig:
    """The `ppo` block of a config: everything about a policy-gradient update. `gamma` and `lam` act once a turn."""

    advantage: str = "turn"
    """turn | token | episode (need a critic) | return | grpo | rloo | gigpo (do not)."""
    critic: str | None = None
    """shared | separate: of an advantage that needs a critic (null: shared); the others train none."""
    gamma: float = 0.99
    lam: float = 0.95
    token_gamma: float = 1.0
    token_lam: float = 1.0
    bootstrap_on_truncation: bool = False
    """Count V after the last token as the future of an episode that a limit cut; otherwise that future is 0."""
    whiten: bool | None = None
    """Scale advantages to mean 0 and variance 1 over the collection; null: as the advantage is usually used."""
    group_std: bool = True
    """Group advantages divide by the group's standard deviation (false: Dr. GRPO; WebShop's GiGPO)."""
    group_stat_unit: str = "trajectory"
    """trajectory: an episode counts once in its group; step: once for each turn."""
    singleton: str = "zero"
    """Advantage of an episode alone in its group: zero, or raw (its reward)."""
    step_weight: float = 1.0
    """GiGPO: weight of the step-level advantage."""

    drop_zero_variance: bool = False
    """Leave out groups whose episodes all earned the same: they have no gradient, but count in the denominator."""
    dynamic_sampling: bool = False
    """Play new groups in their place (DAPO)."""
    max_num_gen_batches: int = 10
    """How often an iteration may play, the first time included; then it goes on with what it has."""
    variance_top_p: float | None = None
    """Keep the groups that vary most, up to this share of all deviations (RAGEN: 0.9)."""
    max_empty_steps: int = 5
    """Stop after this many iterations in a row without an episode to learn from."""
    overlong_buffer: float = 0.0
    """Share of rollout.max_traj_tokens over which the penalty for long episodes grows linearly (DAPO: 0.2)."""
    overlong_penalty: float = 1.0
    """The penalty of an episode that fills all its tokens."""

    ratio: str = "token"
    """token | sequence."""
    clip: str = "ppo"
    """ppo | cispo | none."""
    clip_range: float = 0.2
    clip_range_high: float | None = None
    """Upper clip where it differs from `clip_range`."""
    dual_clip: float | None = 3.0
    value_clip: float | None = 0.5
    vf_coef: float = 0.5
    aggregation: str = "token-mean"
    """token-mean | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm."""
    norm_length: int | None = None
    """Tokens that seq-mean-token-sum-norm divides by."""

    ent_coef: float | Schedule = 0.0
    kl_coef: float | Schedule = 0.0
    """0: no reference model is loaded or run."""
    kl: str = "k3"
    """k1 | k2 | k3 | k3+ (value of k3, gradient of k2)."""
    kl_in: str = "loss"
    """loss | reward."""
    kl_target: float | None = None
    """Steer kl_coef so that the KL per token stays near this."""
    kl_horizon: int = 10_000

    epochs: int = 1
    """Passes over a collection."""
    batch_size: int = 32
    """Rows an optimizer step, over all ranks."""
    max_tokens: int | None = None
    """Tokens a micro-batch may hold, besides the row limit."""
    share_prefixes: bool = False
    """Compute what rows of a mini-batch have in common once; rows of one group then stay together."""
    target_kl: float | None = None
    """Leave the rest of an update out once KL(old | policy) (k3, of a mini-batch) exceeds this."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    value_head_scale: float = 1.0
    """Learning rate of the value head as a multiple of the policy's."""
    bypass_old: bool = False
    """Take the sampled log-probabilities as the old policy's, instead of scoring the rows again before the update."""
    max_bad_steps: int = 3
    """Stop after this many optimizer steps in a row with a loss or gradient that is not finite."""

    def __post_init__(self) -> None:
        _one_of("advantage", self.advantage, KINDS)
        _one_of("critic", self.critic, (None, *CRITICS))
        _one_of("kl_in", self.kl_in, ("loss", "reward"))
        _one_of("group_stat_unit", self.group_stat_unit, ("trajectory", "step"))
        _one_of("singleton", self.singleton, ("zero", "raw"))
        for name in ("gamma", "lam", "token_gamma", "token_lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"ppo.{name}: expected a number in [0, 1], got {getattr(self, name)}")
        for name in ("epochs", "batch_size", "max_bad_steps", "kl_horizon", "max_num_gen_batches", "max_empty_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"ppo.{name}: expected an integer >= 1, got {getattr(self, name)}")
        for name in ("vf_coef", "max_grad_norm", "weight_decay", "value_head_scale", "step_weight", "overlong_penalty"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"ppo.{name}: expected a number >= 0, got {getattr(self, name)}")
        if not 0.0 <= self.overlong_buffer <= 1.0:
            raise ValueError(f"ppo.overlong_buffer: expected a share in [0, 1], got {self.overlong_buffer}")
        if self.variance_top_p is not None and not 0.0 < self.variance_top_p <= 1.0:
            raise ValueError(f"ppo.variance_top_p: expected null or a share in (0, 1], got {self.variance_top_p}")
        for name in ("max_tokens", "target_kl", "norm_length"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"ppo.{name}: expected null or a number above 0, got {getattr(self, name)}")
        if self.advantage in CRITIC_KINDS and self.critic == "none":
            raise ValueError(
                f"ppo.critic: expected shared or separate for ppo.advantage {self.advantage!r}, got 'none'"
            )
        self.ent_schedule  # noqa: B018 (raises on a bad schedule)
        self.kl_controller()
        try:
            self.loss_config()
        except ValueError as error:
            raise ValueError(f"ppo.{error}") from None

    @property
    def critic_kind(self) -> str:
        """none | shared | separate."""
        return (self.critic or "shared") if self.advantage in CRITIC_KINDS else "none"

    @property
    def filters_groups(self) -> bool:
        """Whether groups without a difference stay out of the update."""
        return self.drop_zero_variance or self.dynamic_sampling or self.variance_top_p is not None

    @property
    def needs_reference(self) -> bool:
        return not schedule(self.kl_coef, "ppo.kl_coef").always_zero

    @property
    def ent_schedule(self) -> Schedule:
        return schedule(self.ent_coef, "ppo.ent_coef")

    def kl_controller(self) -> KLController:
        return KLController(schedule(self.kl_coef, "ppo.kl_coef"), self.kl_target, self.kl_horizon)

    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm, value_head_scale=self.value_head_scale
        )

    def loss_config(self, ent_coef: float = 0.0, kl_coef: float = 0.0) -> PPOLossConfig:
        """The loss at these coefficients (a KL in the reward is no part of the loss)."""
        return PPOLossConfig(
            clip_range=self.clip_range,
            clip_range_high=self.clip_range_high,
            dual_clip=self.dual_clip if self.clip == "ppo" else None,
            value_clip=self.value_clip,
            vf_coef=self.vf_coef,
            ent_coef=ent_coef,
            kl_coef=kl_coef if self.kl_in == "loss" else 0.0,
            kl=self.kl,
            ratio=self.ratio,
            clip=self.clip,
            aggregation=self.aggregation,
            norm_length=self.norm_length,
        )


def policy_gradient_loss(
    part: PackedRows,
    output: ScoreOutput,
    config: PPOLossConfig,
    *,
    mean: torch.Tensor | float,
    rstd: torch.Tensor | float,
    denominator: torch.Tensor | float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of one micro-batch, already divided by the mini-batch's `denominator`, and its statistics.

    Args:
        part: with old_log_prob and advantage; value and returns where there is a critic, ref_log_prob for a KL term.
        output: of `Policy.score` on `part`.
        mean, rstd: the policy term uses (advantage - mean) * rstd.
        denominator: `denominator_of` the whole mini-batch, over all ranks.

    Returns:
        float32 scalar, and float64 statistics in the order of `ops.ppo_loss.STAT_NAMES`.
    """
    with_value = output.value is not None
    return ppo_loss(
        output.log_prob,
        part.old_log_prob,
        part.advantage,
        part.loss_mask,
        mean=mean,
        rstd=rstd,
        denominator=denominator,
        weights=part.weight,
        values=output.value,
        old_values=part.value if with_value else None,
        returns=part.returns if with_value else None,
        ref_log_prob=part.ref_log_prob if config.kl_coef else None,
        entropy=output.entropy,
        cu_seqlens=part.cu_seqlens,
        config=config,
    )


def denominator_of(batch: PackedRows, config: PPOLossConfig) -> torch.Tensor:
    """What the loss of a mini-batch is divided by: float64 scalar."""
    return loss_denominator(batch.loss_mask, batch.cu_seqlens, config)


def _one_of(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        names = ", ".join("null" if a is None else a for a in allowed)
        raise ValueError(f"ppo.{name}: expected one of {names}, got {value!r}")
