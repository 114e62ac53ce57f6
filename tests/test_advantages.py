import math

import numpy as np
import pytest
import torch

from manus_fast.agent.trajectory import Row, Trajectory, Turn, build_rows
from manus_fast.data.packing import pack
from manus_fast.learn.advantages import Episodes, estimate
from manus_fast.learn.losses import PPOConfig
from manus_fast.ops.gae import normalizer


def row(turns, values, episode=0, terminated=True):
    """A row from turns [(observation tokens, sampled tokens, reward)], and the values of its sampled tokens."""
    mask, turn_id, reward = [], [], []
    for number, (seen, sampled, r) in turns:
        mask += [False] * seen + [True] * sampled
        turn_id += [-1] * seen + [number] * sampled
        reward += [0.0] * (seen + sampled - 1) + [r]
    mask = np.asarray(mask)
    value = np.full(len(mask), 99.0, np.float32)  # off the mask: never to be read
    value[mask] = values
    built = Row(
        np.zeros(len(mask), np.int64),
        mask,
        np.asarray(turn_id, np.int32),
        np.zeros(len(mask), np.float32),
        np.asarray(reward, np.float32),
        episode,
        terminated,
    )
    return built, value


def packed(*rows):
    batch = pack([built for built, _ in rows])
    batch.value = torch.from_numpy(np.concatenate([value for _, value in rows]))
    return batch


def trainable(batch, x):
    return [round(v, 6) for v in x[batch.trainable].tolist()]


# One episode: turn 0 samples 2 tokens and earns 0.5, turn 1 samples 1 token and earns 1.
TWO_TURNS = [(0, (2, 2, 0.5)), (1, (1, 1, 1.0))]
VALUES = [0.1, 0.2, 0.4]


def test_turn_level_by_hand():
    """gamma 0.5, lam 0.5: turn 1: 1 - 0.4 = 0.6. Turn 0: 0.5 + 0.5·0.4 - 0.2 + 0.25·0.6 = 0.65 at its last token; the
    token before it, with token discounts of 1: (0.2 - 0.1) + 0.65 = 0.75."""
    batch = packed(row(TWO_TURNS, VALUES))
    result = estimate(batch, PPOConfig(gamma=0.5, lam=0.5))
    assert trainable(batch, result.advantage) == [0.75, 0.65, 0.6]
    assert trainable(batch, result.returns) == [0.85, 0.85, 1.0]
    assert result.advantage[~batch.loss_mask].abs().max() == 0
    assert result.whiten


def test_token_level_by_hand():
    """token_gamma 0.5, token_lam 0.5 over the three sampled tokens: 0.6; 0.5 + 0.2 - 0.2 + 0.15 = 0.65;
    0.1 - 0.1 + 0.1625 = 0.1625."""
    batch = packed(row(TWO_TURNS, VALUES))
    result = estimate(batch, PPOConfig(advantage="token", token_gamma=0.5, token_lam=0.5))
    assert trainable(batch, result.advantage) == pytest.approx([0.1625, 0.65, 0.6], abs=1e-6)


def test_episode_broadcast_by_hand():
    """Both turns end with the episode's reward 1.5, and nothing flows between them: 1.5 - 0.4 = 1.1; 1.5 - 0.2 = 1.3;
    0.2 - 0.1 + 1.3 = 1.4."""
    batch = packed(row(TWO_TURNS, VALUES), row([(0, (1, 1, -1.0))], [0.5], episode=1))
    result = estimate(batch, PPOConfig(advantage="episode"))
    assert trainable(batch, result.advantage) == pytest.approx([1.4, 1.3, 1.1, -1.5])


@pytest.mark.parametrize("kind", ["turn", "token", "episode"])
def test_an_episode_in_several_rows_is_one_chain(kind):
    """What a windowed context gives, one row a turn, has the advantages of the same episode in one row."""
    config = PPOConfig(advantage=kind, gamma=0.9, lam=0.8, token_gamma=0.95, token_lam=0.7)
    whole = packed(row(TWO_TURNS, VALUES), row([(0, (1, 2, 2.0))], [0.3, 0.1], episode=1))
    parts = packed(
        row(TWO_TURNS[:1], VALUES[:2]),
        row(TWO_TURNS[1:], VALUES[2:]),
        row([(0, (1, 2, 2.0))], [0.3, 0.1], episode=1),
    )
    one, two = (trainable(batch, estimate(batch, config).advantage) for batch in (whole, parts))
    assert one == pytest.approx(two)


@pytest.mark.parametrize("kind", ["turn", "token"])
def test_only_a_truncated_episode_is_bootstrapped_and_only_when_asked(kind):
    """One token, reward 0, value 0.5, V afterwards 2: the advantage is 0.5·2 - 0.5 where the future counts."""
    rows = [row([(0, (1, 1, 0.0))], [0.5], episode=e, terminated=e == 0) for e in range(2)]
    batch = packed(*rows)
    batch.last_value = torch.tensor([2.0, 2.0])
    options = {"advantage": kind, "gamma": 0.5, "token_gamma": 0.5}
    cut = PPOConfig(**options)
    assert trainable(batch, estimate(batch, cut).advantage) == [-0.5, -0.5]
    kept = PPOConfig(**options, bootstrap_on_truncation=True)
    assert trainable(batch, estimate(batch, kept).advantage) == [-0.5, 0.5]
    batch.last_value = None
    with pytest.raises(ValueError, match=r"last_value"):
        estimate(batch, kept)


def test_returns_without_a_critic_by_hand():
    """gamma 0.5: turn 0 has 0.5 + 0.5·1 = 1, turn 1 has 1."""
    batch = packed(row(TWO_TURNS, [0.0, 0.0, 0.0]))
    result = estimate(batch, PPOConfig(advantage="return", gamma=0.5))
    assert trainable(batch, result.advantage) == [1.0, 1.0, 1.0]
    assert result.returns is None and result.whiten


def test_whitening_statistics():
    batch = packed(row(TWO_TURNS, VALUES), row([(0, (1, 3, 1.0))], [0.1, 0.9, 0.3], episode=1))
    result = estimate(batch, PPOConfig())
    mean, rstd = normalizer(result.stats)
    white = (result.advantage[batch.loss_mask].double() - mean) * rstd
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(white.var()) == pytest.approx(1.0, abs=1e-5)
    single = packed(row([(0, (1, 1, 1.0))], [0.0]))
    stats = estimate(single, PPOConfig()).stats
    assert all(math.isfinite(float(x)) for x in normalizer(stats))


def trajectory(group, turns, error=None, member=0):
    """turns: [(observation, reward, invalid-action penalty within it)]."""
    built, history = [], np.zeros(0, np.int32)
    for observation, reward, penalty in turns:
        prompt = np.concatenate([history, np.ones(2, np.int32)])
        ids = np.full(2, 3, np.int32)
        parts = {"environment": reward - penalty, "invalid_action": penalty}
        built.append(Turn(prompt, ids, np.zeros(2, np.float32), "stop", observation, reward=reward, reward_parts=parts))
        history = np.concatenate([prompt, ids])
    return Trajectory("x", "", "", "", "", 0, group, member, turns=built, terminated=True, error=error)


def by_episode(trajectories, config):
    """Advantage of each turn of each valid episode."""
    batch = pack(build_rows(trajectories))
    advantage = estimate(batch, config, Episodes.of(trajectories)).advantage
    result = {}
    for t in batch.trainable.tolist():
        result.setdefault((int(batch.episode[batch.row[t]]), int(batch.turn_id[t])), set()).add(
            round(float(advantage[t]), 5)
        )
    assert all(len(values) == 1 for values in result.values())
    return {key: values.pop() for key, values in result.items()}


GROUPS = [
    trajectory(0, [("a", 1.0, 0.0)]),
    trajectory(0, [("a", 0.0, 0.0), ("b", 0.0, 0.0), ("c", 0.0, 0.0)]),
    trajectory(0, [("a", 1.0, 0.0)], error="the world broke"),
    trajectory(1, [("a", 7.0, 0.0)]),
    trajectory(2, [("a", 3.0, 0.0)]),
    trajectory(2, [("a", 3.0, 0.0)]),
]


@pytest.mark.parametrize(
    ("options", "first", "second", "alone"),
    [
        # Rewards 1 and 0 (the failed episode is out): mean 0.5, std sqrt(0.5).
        ({"advantage": "grpo"}, 0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6), 0.0),
        ({"advantage": "grpo", "group_std": False}, 0.5, -0.5, 0.0),
        ({"advantage": "rloo"}, 1.0, -1.0, 0.0),
        ({"advantage": "rloo", "singleton": "raw"}, 1.0, -1.0, 7.0),
        ({"advantage": "gigpo", "group_std": False, "step_weight": 0.0, "singleton": "raw"}, 0.5, -0.5, 7.0),
        # Every turn counts: 1, 0, 0, 0: mean 0.25.
        ({"advantage": "grpo", "group_std": False, "group_stat_unit": "step"}, 0.75, -0.25, 0.0),
    ],
)
def test_group_advantages_by_hand(options, first, second, alone):
    result = by_episode(GROUPS, PPOConfig(**options))
    want = {(0, 0): first, (1, 0): second, (1, 1): second, (1, 2): second, (3, 0): alone, (4, 0): 0.0, (5, 0): 0.0}
    assert result == pytest.approx(want, abs=1e-5)


def test_gigpo_by_hand():
    """Group of two, gamma 0.5, no division by the deviation.

    Episode 0: a (reward 0), b (reward 1): total 1; step returns 0.5, 1. Episode 1: a (reward -0.1, an invalid action's
    penalty), a (reward 0): total -0.1; step returns -0.1 (the penalty is taken off its own step only) and 0.
    Episode level: mean 0.45, so ±0.55. Anchor a: returns 0.5, -0.1, 0: mean 0.4/3. Anchor b: alone, 0.
    """
    trajectories = [
        trajectory(0, [("a", 0.0, 0.0), ("b", 1.0, 0.0)]),
        trajectory(0, [("a", -0.1, -0.1), ("a", 0.0, 0.0)]),
    ]
    result = by_episode(trajectories, PPOConfig(advantage="gigpo", gamma=0.5, group_std=False, step_weight=2.0))
    mean = 0.4 / 3
    assert result == pytest.approx(
        {
            (0, 0): 0.55 + 2 * (0.5 - mean),
            (0, 1): 0.55,
            (1, 0): -0.55 + 2 * (-0.1 - mean),
            (1, 1): -0.55 + 2 * (0.0 - mean),
        },
        abs=1e-5,
    )


def test_refusals():
    batch = packed(row(TWO_TURNS, VALUES))
    batch.value = None
    with pytest.raises(ValueError, match=r"packed.value: expected values for ppo.advantage 'turn'"):
        estimate(batch, PPOConfig())
    with pytest.raises(ValueError, match=r"episodes: expected the collection's episodes for ppo.advantage 'grpo'"):
        estimate(batch, PPOConfig(advantage="grpo"))
    apart = packed(*(row(TWO_TURNS, VALUES, episode=e) for e in (0, 1, 0)))
    with pytest.raises(ValueError, match=r"expected the rows of an episode next to each other"):
        estimate(apart, PPOConfig())
