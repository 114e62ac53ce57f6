"""One policy-gradient update: from a collection of rows to new weights and a dictionary of statistics.

    policy = Policy(model, critic=config.critic_kind)
    backend = make_backend(policy, BackendConfig(), config.optimizer(), dtype="bfloat16")
    update = PolicyGradientUpdate(policy, backend, config, temperature=1.0, gradient_accumulation_steps=4, seed=1)
    for iteration in range(n):
        trajectories = …                                    # from the rollout
        stats = update.run(
            build_rows(trajectories), Episodes.of(trajectories),
            iteration=iteration, progress=iteration / n, learning_rate=1e-6,
        )
        # {"policy/loss": …, "policy/clip_fraction": …, "critic/explained_variance": …, "update/grad_norm": …, …}

The order of rows in a mini-batch, the size of micro-batches, how they are packed and the number of ranks do not change
the gradient, up to rounding: every rank has the whole collection, and every loss is divided by a count over the whole
mini-batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import PackedRows, micro_batch_rows, pack
from manus_fast.learn.advantages import GROUP_KINDS, Advantages, Episodes, estimate
from manus_fast.learn.backend import Backend
from manus_fast.learn.correction import check_mode, importance_weights
from manus_fast.learn.guard import FiniteGuard
from manus_fast.learn.losses import PPOConfig, denominator_of, policy_gradient_loss
from manus_fast.learn.minibatch import accumulate, mini_batches
from manus_fast.learn.policy import Policy, Reference, ScoreOutput
from manus_fast.ops.gae import normalizer
from manus_fast.ops.ppo_loss import loss_metrics, merge_loss_stats

# Where each statistic of ops.loss_metrics is logged; those about the critic only where there is one.
_POLICY = {
    "policy_loss": "policy/loss",
    "clip_fraction": "policy/clip_fraction",
    "clip_low_fraction": "policy/clip_low_fraction",
    "clip_high_fraction": "policy/clip_high_fraction",
    "dual_clip_fraction": "policy/dual_clip_fraction",
    "approx_kl_k1": "policy/approx_kl_k1",
    "approx_kl_k3": "policy/approx_kl_k3",
    "ratio_mean": "policy/ratio_mean",
    "ratio_max": "policy/ratio_max",
    "ratio_p95_bound": "policy/ratio_p95_bound",
    "weight_mean": "policy/weight_mean",
    "dropped": "policy/dropped_tokens",
}
_CRITIC = {
    "value_loss": "critic/loss",
    "value_clip_fraction": "critic/clip_fraction",
    "explained_variance": "critic/explained_variance",
    "return_mean": "critic/return_mean",
}


def check_batch_size(batch_size: int, collected: int) -> None:
    """Raises ValueError when a mini-batch asks for more rows than a collection can hold."""
    if batch_size > collected:
        raise ValueError(f"ppo.batch_size: expected at most the {collected} rows that are collected, got {batch_size}")


def check_group_size(config: PPOConfig, group_size: int) -> None:
    """Raises ValueError where every episode would be alone in its group, and so have no advantage, or be filtered."""
    if group_size >= 2:
        return
    why = ""
    if config.filters_groups:
        name = next(n for n in ("dynamic_sampling", "drop_zero_variance", "variance_top_p") if getattr(config, n))
        why = f"with ppo.{name}"
    elif config.advantage in GROUP_KINDS and config.singleton == "zero":
        why = f"for ppo.advantage {config.advantage!r}"
    if why:
        raise ValueError(f"training.group_size: expected an integer >= 2 {why}, got {group_size}")


class PolicyGradientUpdate:
    """See the module's docstring.

    Args:
        policy: with the critic that `config.critic_kind` names.
        backend: optimises `policy`.
        config: the `ppo` block.
        temperature: of sampling, so that both sides describe the same distribution.
        gradient_accumulation_steps: micro-batches a mini-batch.
        seed: of the order of rows.
        correction: how tokens are weighted that another policy than the present one sampled (`learn/correction.py`).
        reference: the policy to measure KL from; None: the policy as it is now. Unused where kl_coef is 0.
        dump_folder: where batches of skipped steps are saved; None keeps none.

    Raises:
        ValueError: batch_size does not divide, or the policy has no critic where the advantage needs one.
    """

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        config: PPOConfig,
        *,
        temperature: float = 1.0,
        gradient_accumulation_steps: int = 1,
        seed: int = 0,
        correction: str = "token_truncate",
        reference: Reference | None = None,
        dump_folder: Path | None = None,
    ):
        self.policy, self.backend, self.config = policy, backend, config
        self.temperature, self.seed = temperature, seed
        if policy.critic_kind != config.critic_kind:
            raise ValueError(
                f"policy: expected critic {config.critic_kind!r} for ppo.advantage {config.advantage!r}, "
                f"got {policy.critic_kind!r}"
            )
        if not temperature > 0:
            raise ValueError(f"rollout.temperature: expected a number above 0 to train on, got {temperature}")
        check_mode(correction)
        self.correction = correction
        self.micro_rows = micro_batch_rows(config.batch_size, backend.world_size, gradient_accumulation_steps)
        self.reference = None
        if config.needs_reference:
            self.reference = reference or Reference(policy)
        self.kl = config.kl_controller()
        self.guard = FiniteGuard(config.max_bad_steps, dump_folder)
        self.steps = 0

    def run(
        self,
        rows: Sequence[Row],
        episodes: Episodes | None = None,
        *,
        iteration: int,
        progress: float,
        learning_rate: float,
        planned: int = 0,
    ) -> dict[str, float]:
        """Updates the weights on one collection.

        Args:
            rows: of all valid episodes of all ranks, rows of an episode together; those without a trainable token are
                left out.
            episodes: the collection's episodes; the group advantages need them.
            iteration: makes the order of rows differ from one collection to the next.
            progress: share of training done, in [0, 1], for schedules.
            learning_rate: of every step of this update.
            planned: rows that a collection was meant to have: one that falls short is updated on all the same.

        Raises:
            ValueError: `batch_size` is larger than the collection (episodes that failed still count as collected).
            NonFiniteError: too many steps in a row with a loss or gradient that is not finite.
        """
        kept = [row for row in rows if row.loss_mask.any()]
        check_batch_size(
            self.config.batch_size, max(planned, len(kept), 0 if episodes is None else len(episodes.reward))
        )
        stats: dict[str, float] = {"update/rows": len(kept), "update/rows_without_targets": len(rows) - len(kept)}
        if not kept:
            return stats
        began = time.perf_counter()
        packed = pack(kept, self.config.share_prefixes).to(self.policy.device)
        kl_coef, ent_coef = self.kl.at(progress), self.config.ent_schedule.at(progress)
        stats |= self._score(packed)
        episodes, seen = self._reference_terms(packed, episodes, kl_coef)
        # Both end with a number that the device has to tell, so that this is no queue's time.
        stats |= {**seen, "update/score_seconds": time.perf_counter() - began}
        advantages = estimate(packed, self.config, episodes)
        packed.advantage, packed.returns = advantages.advantage, advantages.returns
        stats |= self._optimise(packed, advantages, iteration, ent_coef, kl_coef, learning_rate)
        if "policy/ref_kl" in stats:
            self.kl.update(stats["policy/ref_kl"], len(torch.unique(packed.episode)))
        stats |= {
            "advantage/mean": float(advantages.stats[1]),
            "advantage/std": float((advantages.stats[2] / (advantages.stats[0] - 1).clamp(min=1)).sqrt()),
            "update/tokens": packed.tokens,
            "update/trainable_tokens": packed.trainable_tokens,
            "update/learning_rate": learning_rate,
            "update/ent_coef": ent_coef,
            "update/kl_coef": kl_coef,
            **{f"update/{name}": value for name, value in self.policy.work.take().items()},
        }
        return stats

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible counters and the KL controller's state; weights and optimizer are the backend's."""
        return {"steps": self.steps, "kl": self.kl.state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.kl.load_state_dict(state["kl"])
        self.guard.load_state_dict(state["guard"])

    def _score(self, packed: PackedRows) -> dict[str, float]:
        """Fills in the old policy's log-probabilities and values; compares them with what the engine reported, unless
        that is what is taken for them."""
        critic, bypass = self.policy.has_critic, self.config.bypass_old
        if not bypass or critic:
            scored = self.policy.score_all(
                packed,
                log_prob=not bypass,
                entropy=not bypass,
                value=critic,
                temperature=self.temperature,
                max_rows=self.micro_rows,
                max_tokens=self.config.max_tokens,
                ranks=self.backend,
            )
            packed.value, packed.last_value = scored.value, scored.last_value
        if bypass:
            packed.old_log_prob = packed.rollout_log_prob
            return {}
        packed.old_log_prob = scored.log_prob
        packed.weight, stats = importance_weights(packed, self.correction)
        return {"policy/entropy": float(scored.entropy[packed.trainable].mean()), **stats}

    def _reference_terms(
        self, packed: PackedRows, episodes: Episodes | None, kl_coef: float
    ) -> tuple[Episodes | None, dict[str, float]]:
        """Measures the KL from the reference and, where it belongs there, takes it off the rewards."""
        if self.reference is None:
            return episodes, {}
        packed.ref_log_prob = self.reference.log_prob(
            packed,
            temperature=self.temperature,
            max_rows=self.micro_rows,
            max_tokens=self.config.max_tokens,
            ranks=self.backend,
        )
        # A token whose sampled log-probability is lost is in no loss, so it costs its episode nothing either.
        known = packed.loss_mask & torch.isfinite(packed.old_log_prob)
        difference = packed.old_log_prob - packed.ref_log_prob
        if self.config.kl_in == "reward":
            # The estimator of the reward is k1, whose sum over a row is the log-ratio of the row.
            cost = kl_coef * torch.where(known, difference, 0.0)
            packed.reward = packed.reward - cost
            episodes = None if episodes is None else episodes.less(packed, cost)
        return episodes, {"policy/ref_kl": float(difference[known].mean()) if bool(known.any()) else 0.0}

    def _optimise(
        self,
        packed: PackedRows,
        advantages: Advantages,
        iteration: int,
        ent_coef: float,
        kl_coef: float,
        learning_rate: float,
    ) -> dict[str, float]:
        config = self.config.loss_config(ent_coef, kl_coef)
        mean, rstd = normalizer(advantages.stats) if advantages.whiten else (0.0, 1.0)
        scale = {"the advantages' mean": mean, "the advantages' deviation": rstd}
        names = {**_POLICY, **(_CRITIC if self.policy.has_critic else {})}
        totals: dict[str, list[float]] = {}
        skipped_before, stopped = self.guard.skipped, False
        entropy = ent_coef > 0 or self.config.bypass_old  # the scoring pass has measured it otherwise
        for epoch in range(self.config.epochs):
            order = (packed.rows, self.config.batch_size, self.seed, iteration, epoch)
            for index in mini_batches(*order, groups=packed.groups):
                batch = packed.select(index)
                denominator = denominator_of(batch, config)

                def loss_of(part: PackedRows, output: ScoreOutput, denominator: torch.Tensor = denominator):
                    return policy_gradient_loss(part, output, config, mean=mean, rstd=rstd, denominator=denominator)

                parts, flags = accumulate(
                    self.backend,
                    batch,
                    loss_of,
                    max_rows=self.micro_rows,
                    max_tokens=self.config.max_tokens,
                    entropy=entropy,
                    value=self.policy.has_critic,
                    temperature=self.temperature,
                )
                norm = self.backend.gradient_norm()
                if not self.guard.check(flags, norm, self.backend, batch, scale, iteration=iteration, epoch=epoch):
                    continue
                measured = loss_metrics(self.backend.merge(parts, merge_loss_stats))
                measured["grad_norm"] = float(norm)
                if self.config.target_kl is not None and measured["approx_kl_k3"] > self.config.target_kl:
                    self.backend.discard()
                    stopped = True
                    break
                self.backend.step(learning_rate, norm)
                self.steps += 1
                for name, value in measured.items():
                    totals.setdefault(name, []).append(value)
            if stopped:
                break
        result = {logged: float(np.mean(totals[name])) for name, logged in names.items() if name in totals}
        if entropy and "entropy" in totals:
            result["policy/entropy"] = float(np.mean(totals["entropy"]))
        return {
            **result,
            "update/grad_norm": float(np.mean(totals["grad_norm"])) if totals else 0.0,
            "update/steps": len(totals.get("grad_norm", ())),
            "update/skipped_steps": self.guard.skipped - skipped_before,
            "update/stopped_early": float(stopped),
        }
