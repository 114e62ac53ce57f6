"""Advantages of a collection of episodes: generalised advantage estimation with a critic, group statistics without.

An episode may be spread over several rows (a windowed context starts a new row every turn); its tokens are one chain
here, in row order, so that credit flows through the whole episode.

| kind    | advantage of a token                                                        | critic | whitened |
|---------|-----------------------------------------------------------------------------|--------|----------|
| turn    | GAE over turns, then over the tokens of each turn                           | yes    | yes      |
| token   | GAE over the sampled tokens of the episode                                  | yes    | yes      |
| episode | GAE inside each turn, whose reward is the whole episode's                   | yes    | yes      |
| return  | discounted return from its turn on (REINFORCE)                              | no     | yes      |
| grpo    | episode's reward against its group's mean (and standard deviation)          | no     | no       |
| rloo    | episode's reward against the mean of the others of its group                | no     | no       |
| gigpo   | grpo of the episode + weighted grpo of the step among equal observations    | no     | no       |
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from manus_fast.agent.trajectory import Trajectory
from manus_fast.data.packing import PackedRows
from manus_fast.ops.gae import gae
from manus_fast.ops.group_advantages import discounted_returns, gigpo_advantages, group_advantages

if TYPE_CHECKING:
    from manus_fast.learn.losses import PPOConfig

CRITIC_KINDS = ("turn", "token", "episode")
GROUP_KINDS = ("grpo", "rloo", "gigpo")
KINDS = (*CRITIC_KINDS, "return", *GROUP_KINDS)


@dataclass
class Episodes:
    """What group advantages know about a collection: E episodes with S turns in all, in order. Invalid episodes (a
    failed environment or engine) have a reward of nan and take part in nothing."""

    reward: torch.Tensor
    """float32 [E], nan where invalid."""
    group: torch.Tensor
    """int64 [E]."""
    turn_reward: torch.Tensor
    """float32 [S]."""
    turn_penalty: torch.Tensor
    """float32 [S]: the part of `turn_reward` that is a penalty for an invalid action; GiGPO takes it off its own step
    and no other."""
    turn_episode: torch.Tensor
    """int64 [S]."""
    anchor: torch.Tensor
    """int64 [S]: equal where two turns began with the same observation."""
    cu_turns: torch.Tensor
    """int32 [E+1]: turns of each episode."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], penalty_part: str = "invalid_action") -> Episodes:
        """Reads finished trajectories. `penalty_part` names the reward part that penalises invalid actions."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        counts = [len(trajectory.turns) for trajectory in trajectories]
        return cls(
            reward=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
            group=torch.tensor([t.group for t in trajectories], dtype=torch.int64),
            turn_reward=torch.tensor([t.reward for t in turns], dtype=torch.float32),
            turn_penalty=torch.tensor([t.reward_parts.get(penalty_part, 0.0) for t in turns], dtype=torch.float32),
            turn_episode=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            anchor=torch.tensor([_hash(turn.observation) for turn in turns], dtype=torch.int64),
            cu_turns=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        )

    def less(self, packed: PackedRows, cost: torch.Tensor) -> Episodes:
        """The same episodes with `cost` (float32 [N], per token of `packed`) taken off their rewards. GiGPO's step
        returns stay as they are, as in its authors' code: a KL penalty belongs to the episode."""
        token, device = packed.episode[packed.row], packed.device
        total = torch.zeros(len(self.reward), dtype=torch.float64, device=device).index_add(0, token, cost.double())
        return replace(self, reward=self.reward - total.to(self.reward))


@dataclass
class Advantages:
    advantage: torch.Tensor
    """float32 [N], 0 off the loss mask."""
    returns: torch.Tensor | None
    """float32 [N]: target of the critic; None without one."""
    stats: torch.Tensor
    """float64 [3]: count, mean and sum of squared deviations over the loss mask; ranks merge theirs."""
    whiten: bool
    """Whether the loss is to use (advantage - mean) / std."""


def estimate(packed: PackedRows, config: PPOConfig, episodes: Episodes | None = None) -> Advantages:
    """Advantages of every trainable token.

    Args:
        packed: a whole collection, rows of an episode next to each other and in order. With a critic kind `value`
            is set, and `last_value` where `config.bootstrap_on_truncation`.
        config: its advantage, discounts and group options.
        episodes: needed by the group kinds; `packed.episode` indexes it.

    Raises:
        ValueError: values or episodes are missing, or rows of an episode are apart.
    """
    kind = config.advantage
    if kind in GROUP_KINDS:
        if episodes is None:
            raise ValueError(f"episodes: expected the collection's episodes for ppo.advantage {kind!r}, got none")
        advantage, returns = _from_groups(packed, config, episodes), None
        whiten = bool(config.whiten)
    elif kind == "return":
        zeros = torch.zeros_like(packed.reward)
        advantage, returns = _chained(packed, zeros, packed.reward, config, None, lam=1.0)[0], None
        whiten = config.whiten is not False
    else:
        if packed.value is None:
            raise ValueError(f"packed.value: expected values for ppo.advantage {kind!r}, got none")
        advantage, returns = _with_critic(packed, config)
        whiten = config.whiten is not False
    return Advantages(advantage, returns, _stats(advantage, packed.loss_mask), whiten)


def _with_critic(packed: PackedRows, config: PPOConfig) -> tuple[torch.Tensor, torch.Tensor]:
    chains, last_row = _chains(packed)
    bootstrap = None
    if config.bootstrap_on_truncation:
        if packed.last_value is None:
            raise ValueError("packed.last_value: expected values for ppo.bootstrap_on_truncation, got none")
        bootstrap = torch.where(packed.terminated, 0.0, packed.last_value)[last_row].contiguous()
    if config.advantage == "turn":
        return _chained(packed, packed.value, packed.reward, config, bootstrap, lam=config.lam)
    if config.advantage == "token":
        advantage, returns, _ = gae(
            packed.reward,
            packed.value,
            packed.loss_mask,
            config.token_gamma,
            config.token_lam,
            bootstrap=bootstrap,
            cu_seqlens=chains,
        )
        return advantage, returns
    return _episode_broadcast(packed, config, chains)


def _chained(
    packed: PackedRows,
    value: torch.Tensor,
    reward: torch.Tensor,
    config: PPOConfig,
    bootstrap: torch.Tensor | None,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn-level GAE over whole episodes."""
    advantage, returns, _ = gae(
        reward,
        value,
        packed.loss_mask,
        config.gamma,
        lam,
        bootstrap=bootstrap,
        cu_seqlens=_chains(packed)[0],
        turn_id=packed.turn_id,
        token_gamma=config.token_gamma,
        token_lam=config.token_lam,
    )
    return advantage, returns


def _episode_broadcast(
    packed: PackedRows, config: PPOConfig, chains: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each turn stands alone: its last token is rewarded with the episode's whole reward, and GAE runs inside it."""
    where = packed.trainable
    episode = torch.searchsorted(chains[1:].contiguous(), where.to(torch.int32), right=True)
    turn = packed.turn_id[where]
    last = torch.ones_like(where, dtype=torch.bool)
    last[:-1] = (turn[1:] != turn[:-1]) | (episode[1:] != episode[:-1])
    total = torch.zeros(len(chains) - 1, dtype=torch.float64, device=where.device)
    total.index_add_(0, episode, packed.reward[where].double())
    reward = torch.where(last, total[episode].float(), 0.0)
    ends = torch.nonzero(last).squeeze(1) + 1
    cu_turns = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    everywhere = torch.ones_like(last)
    value = packed.value[where].contiguous()
    advantage, returns, _ = gae(reward, value, everywhere, config.token_gamma, config.token_lam, cu_seqlens=cu_turns)
    blank = torch.zeros_like(packed.reward)
    return blank.index_copy(0, where, advantage), blank.index_copy(0, where, returns)


def _from_groups(packed: PackedRows, config: PPOConfig, episodes: Episodes) -> torch.Tensor:
    """Group advantages of episodes (or steps), given to every trainable token of them."""
    kind = "rloo" if config.advantage == "rloo" else "grpo" if config.group_std else "dr_grpo"
    of_token = packed.episode[packed.row]
    device = packed.device
    if config.advantage == "gigpo":
        plain = discounted_returns(episodes.turn_reward - episodes.turn_penalty, episodes.cu_turns, config.gamma)
        step = gigpo_advantages(
            episodes.reward,
            plain + episodes.turn_penalty,
            episodes.group,
            episodes.turn_episode,
            episodes.anchor,
            step_weight=config.step_weight,
            kind=kind,
            unit=config.group_stat_unit,
            singleton=config.singleton,
        ).to(device)
        first_turn = episodes.cu_turns.to(device)[of_token]
        advantage = step[(first_turn + packed.turn_id.clamp(min=0)).long()]
    else:
        if config.group_stat_unit == "step":
            # Every turn of an episode counts: expand, then read one entry of each episode.
            turns = episodes.turn_episode
            spread = group_advantages(
                episodes.reward[turns], episodes.group[turns], kind=kind, unit="step", singleton=config.singleton
            )
            by_episode = torch.zeros_like(episodes.reward).index_copy(0, turns, spread)
        else:
            by_episode = group_advantages(episodes.reward, episodes.group, kind=kind, singleton=config.singleton)
        advantage = by_episode.to(device)[of_token]
    return torch.where(packed.loss_mask, advantage, 0.0)


def _chains(packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Episodes as runs of rows: int32 [E'+1] token offsets, and the last row of each, int64 [E']."""
    episode = packed.episode
    starts = torch.ones(len(episode), dtype=torch.bool, device=episode.device)
    starts[1:] = episode[1:] != episode[:-1]
    first = torch.nonzero(starts).squeeze(1)
    if len(torch.unique(episode)) != len(first):
        raise ValueError("packed.episode: expected the rows of an episode next to each other, got them apart")
    chains = torch.cat([packed.cu_seqlens[first], packed.cu_seqlens[-1:]]).contiguous()
    last_row = torch.cat([first[1:] - 1, first.new_tensor([len(episode) - 1])])
    return chains, last_row


def _stats(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = x[mask].double()
    count = torch.tensor(float(len(kept)), dtype=torch.float64, device=x.device)
    mean = kept.sum() / count.clamp(min=1)
    return torch.stack([count, mean, (kept - mean).square().sum()])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
