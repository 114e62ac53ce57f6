"""Each preset's advantages, loss and gradient on one small table, against numbers worked out here by hand.

The table: group 0 holds A, B, H and the failed F; C is alone in group 1; D and E earn the same in group 2; M, alone in
group 3, has no token to train. Old log-probabilities are -2 throughout, new ones -2 + log(ratio).

| episode | rewards of its turns | observations | tokens of its turns | ratios          | old values      |
|---------|----------------------|--------------|---------------------|-----------------|-----------------|
| A       | 3                    | s            | 2                   | 1.5, 1.1        | 0.5, 1.0        |
| B       | -1, 1                | s, t         | 1, 1                | 0.5, 1.25       | 0.2, 0.4        |
| F       | failed               | s            | 1                   |                 |                 |
| H       | 0, 0                 | s, t         | 2, 1                | 1.0, 0.9, 4.0   | 0.1, 0.3, 0.2   |
| C       | 3                    | s            | 1                   | 1.0             | 1.0             |
| D, E    | 2 each               | s            | 1 each              | 1.3, 0.7        | 2.0, 1.0        |
"""

import math
import statistics

import numpy as np
import pytest
import torch

from manus_fast.agent.trajectory import Row, Trajectory, Turn, build_rows
from manus_fast.data.packing import pack
from manus_fast.learn.advantages import Episodes, estimate
from manus_fast.learn.losses import PPOConfig, denominator_of, policy_gradient_loss
from manus_fast.learn.policy import ScoreOutput
from manus_fast.learn.presets import PRESETS, preset
from manus_fast.ops.gae import normalizer

RATIOS = [1.5, 1.1, 0.5, 1.25, 1.0, 0.9, 4.0, 1.0, 1.3, 0.7]
VALUES = [0.5, 1.0, 0.2, 0.4, 0.1, 0.3, 0.2, 1.0, 2.0, 1.0]
EPISODE = [*"AA", *"BB", *"HHH", "C", "D", "E"]
TOKENS, ROWS = 10, 6  # that count: M's row and the failed episode are in neither


def episode(group, turns, error=None):
    built, history = [], np.zeros(0, np.int32)
    for observation, tokens, reward in turns:
        prompt = np.concatenate([history, np.ones(2, np.int32)])
        ids = np.full(tokens, 3, np.int32)
        built.append(Turn(prompt, ids, np.full(tokens, -2.0, np.float32), "stop", observation, reward=reward))
        history = np.concatenate([prompt, ids])
    return Trajectory("", "", "", "", "", 0, group, 0, turns=built, terminated=True, error=error)


EPISODES = [
    episode(0, [("s", 2, 3.0)]),
    episode(0, [("s", 1, -1.0), ("t", 1, 1.0)]),
    episode(0, [("s", 1, 50.0)], error="the world broke"),
    episode(0, [("s", 2, 0.0), ("t", 1, 0.0)]),
    episode(1, [("s", 1, 3.0)]),
    episode(2, [("s", 1, 2.0)]),
    episode(2, [("s", 1, 2.0)]),
    episode(3, [("s", 0, 9.0)]),
]


def table():
    rows = build_rows(EPISODES)
    assert [row.episode for row in rows] == [0, 1, 3, 4, 5, 6]
    blank = Row(
        np.zeros(3, np.int64),
        np.zeros(3, bool),
        np.full(3, -1, np.int32),
        np.zeros(3, np.float32),
        np.zeros(3, np.float32),
        episode=7,
    )
    batch = pack([*rows, blank])
    where = batch.trainable
    assert len(where) == TOKENS
    batch.old_log_prob = torch.full((batch.tokens,), 77.0).index_fill(0, where, -2.0)  # 77: never to be read
    batch.value = torch.full((batch.tokens,), 77.0).index_copy(0, where, torch.tensor(VALUES))
    return batch


def run(algorithm, values=None, **options):
    """Advantages of the ten tokens as the loss uses them, the loss, and its gradient for each log-probability."""
    config = PPOConfig(**{**preset(algorithm), **options})
    batch = table()
    found = estimate(batch, config, Episodes.of(EPISODES))
    batch.advantage, batch.returns = found.advantage, found.returns
    mean, rstd = normalizer(found.stats) if found.whiten else (0.0, 1.0)
    new = torch.tensor([-2.0 + math.log(r) for r in RATIOS], requires_grad=True)
    blank = torch.full((batch.tokens,), 55.0)
    output = ScoreOutput(
        log_prob=blank.index_copy(0, batch.trainable, new),
        entropy=None,
        value=None if values is None else blank.index_copy(0, batch.trainable, torch.tensor(values)),
        last_value=None,
    )
    loss_config = config.loss_config()
    loss, _ = policy_gradient_loss(
        batch, output, loss_config, mean=mean, rstd=rstd, denominator=denominator_of(batch, loss_config)
    )
    loss.backward()
    advantage = (found.advantage[batch.trainable] - mean) * rstd
    assert float(found.advantage[~batch.loss_mask].abs().max()) == 0.0
    return advantage.tolist(), float(loss.detach()), new.grad.tolist()


def spread(**by_episode):
    """One number an episode, for each of its tokens."""
    return [by_episode.get(name, 0.0) for name in EPISODE]


def check(got, advantage, loss, gradient):
    assert got[0] == pytest.approx(advantage, abs=2e-5)
    assert got[1] == pytest.approx(loss, abs=2e-6)
    assert got[2] == pytest.approx(gradient, abs=2e-6)


# Group 0 earns 3, 0, 0 (F is out): mean 1, deviations 2, -1, -1, variance (4 + 1 + 1) / 2 = 3. C is alone, D and E do
# not differ, so all three have 0.
STD = math.sqrt(3)
GRPO = spread(A=2 / STD, B=-1 / STD, H=-1 / STD)


def test_grpo():
    """Clip 0.2: A's first ratio counts as 1.2 and passes no gradient. B's 0.5 counts as 0.8 (its advantage is
    negative), 1.25 as it is; H's 4 is bounded by the dual clip at 3. Each row weighs its mean, over six rows."""
    rows = -2 / STD * (1.2 + 1.1) / 2 + 1 / STD * (0.8 + 1.25) / 2 + 1 / STD * (1.0 + 0.9 + 3.0) / 3
    gradient = [0, -2 / STD * 1.1 / 2, 0, 1.25 / STD / 2, 1.0 / STD / 3, 0.9 / STD / 3, 0, 0, 0, 0]
    check(run("grpo"), GRPO, rows / ROWS, [g / ROWS for g in gradient])


def test_dr_grpo():
    """No division by the deviation; sums over tokens, over six rows of a constant length of 1024."""
    total = -2 * (1.2 + 1.1) + (0.8 + 1.25) + (1.0 + 0.9 + 3.0)
    gradient = [0, -2 * 1.1, 0, 1.25, 1.0, 0.9, 0, 0, 0, 0]
    check(run("dr_grpo"), spread(A=2, B=-1, H=-1), total / (6 * 1024), [g / (6 * 1024) for g in gradient])


def test_dapo():
    """Clip-higher: 1.5 counts as 1.28. Every token weighs the same: ten of them."""
    total = (-2 * (1.28 + 1.1) + (0.8 + 1.25) + (1.0 + 0.9 + 3.0)) / STD
    gradient = [0, -2 / STD * 1.1, 0, 1.25 / STD, 1.0 / STD, 0.9 / STD, 0, 0, 0, 0]
    check(run("dapo"), GRPO, total / TOKENS, [g / TOKENS for g in gradient])


def test_rloo():
    """Against the mean of the others: 3 - 0; 0 - 3/2; 0 - 3/2. That is n / (n - 1) = 3/2 times the deviation."""
    total = -3 * (1.2 + 1.1) + 1.5 * (0.8 + 1.25) + 1.5 * (1.0 + 0.9 + 3.0)
    gradient = [0, -3 * 1.1, 0, 1.5 * 1.25, 1.5, 1.5 * 0.9, 0, 0, 0, 0]
    check(run("rloo"), spread(A=3, B=-1.5, H=-1.5), total / TOKENS, [g / TOKENS for g in gradient])


def test_reinforce_plus_plus():
    """Undiscounted return from each turn on: 3 | 0, 1 | 0, 0 | 3 | 2 | 2; B's first turn has -1 + 1 = 0. Whitened over
    the ten tokens; C has no group to compare with and needs none."""
    returns = [3, 3, 0, 1, 0, 0, 0, 3, 2, 2]
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    assert mean == 1.4 and std**2 == pytest.approx((3 * 1.6**2 + 4 * 1.4**2 + 0.4**2 + 2 * 0.6**2) / 9)
    white = [(r - mean) / std for r in returns]
    # Above the mean: A, C, D, E: ratios at most 1.2. Below: B and H, at least 0.8 and the dual clip's 3.
    counted = [1.2, 1.1, 0.8, 1.25, 1.0, 0.9, 3.0, 1.0, 1.2, 0.7]
    passes = [0, 1, 0, 1, 1, 1, 0, 1, 0, 1]
    loss = -sum(a * r for a, r in zip(white, counted, strict=True)) / TOKENS
    gradient = [-a * r * p / TOKENS for a, r, p in zip(white, counted, passes, strict=True)]
    check(run("reinforce++"), white, loss, gradient)


def test_gigpo():
    """gamma 0.95. Step returns where the agent saw s: A 3, B -1 + 0.95 = -0.05, H 0; where it saw t: B 1, H 0. C, D and
    E saw s too, but in other groups: C alone, D and E alike."""
    s = [3.0, -0.05, 0.0]
    mean, std = sum(s) / 3, statistics.stdev(s)
    assert mean == pytest.approx(0.983333, abs=1e-6) and std == pytest.approx(1.746663, abs=1e-6)
    step_s = [(x - mean) / std for x in s]
    half = 0.5 / statistics.stdev([1.0, 0.0])  # of 1 and 0: ±0.5 over a deviation of sqrt(1/2)
    a = 2 / STD + step_s[0]
    b1, b2 = -1 / STD + step_s[1], -1 / STD + half
    h1, h2 = -1 / STD + step_s[2], -1 / STD - half
    assert b2 > 0  # a good step of a poor episode: its ratio of 1.25 is cut to 1.2
    advantage = [a, a, b1, b2, h1, h1, h2, 0, 0, 0]
    total = -a * (1.2 + 1.1) - b1 * 0.8 - b2 * 1.2 - h1 * 1.9 - h2 * 3.0
    gradient = [0, -a * 1.1, 0, 0, -h1, -h1 * 0.9, 0, 0, 0, 0]
    check(run("gigpo"), advantage, total / TOKENS, [g / TOKENS for g in gradient])


def test_gspo():
    """The ratio of a row is the geometric mean of its tokens': A sqrt(1.65), above 1.0004; B sqrt(0.625), below 0.9997;
    H the cube root of 3.6, which a negative advantage leaves as it is. Each of H's tokens passes a third of it."""
    h = 3.6 ** (1 / 3)
    rows = -2 / STD * 1.0004 + 0.9997 / STD + h / STD
    gradient = [0, 0, 0, 0, *[h / STD / 3] * 3, 0, 0, 0]
    check(run("gspo"), GRPO, rows / ROWS, [g / ROWS for g in gradient])


def test_cispo():
    """The ratio, at most 1.28 and without a lower bound, is a constant weight of the log-probability: clipped tokens
    still have a gradient."""
    weight = [1.28, 1.1, 0.5, 1.25, 1.0, 0.9, 1.28, 1.0, 1.28, 0.7]
    log_prob = [-2 + math.log(r) for r in RATIOS]
    loss = -sum(a * w * x for a, w, x in zip(GRPO, weight, log_prob, strict=True)) / TOKENS
    check(run("cispo"), GRPO, loss, [-a * w / TOKENS for a, w in zip(GRPO, weight, strict=True)])


def test_ppo():
    """Turn-level GAE, gamma 0.99, lam 0.95, so their product is 0.9405; inside a turn both are 1.

    A: last token 3 - 1; before it 1 - 0.5 + 2. B: 1 - 0.4 = 0.6; -1 + 0.99·0.4 - 0.2 + 0.9405·0.6. H: -0.2;
    0.99·0.2 - 0.3 - 0.9405·0.2; before it 0.3 - 0.1 + that. C 3 - 1, D 2 - 2, E 2 - 1.
    """
    h = 0.99 * 0.2 - 0.3 - 0.9405 * 0.2
    plain = [2.5, 2.0, -1 + 0.99 * 0.4 - 0.2 + 0.9405 * 0.6, 0.6, 0.2 + h, h, -0.2, 2.0, 0.0, 1.0]
    mean, std = statistics.mean(plain), statistics.stdev(plain)
    white = [(x - mean) / std for x in plain]
    # Positive: A, C, E. Negative: B (0.6 is below the mean), H and D.
    assert [x > 0 for x in white] == [True, True, *[False] * 5, True, False, True]
    counted = [1.2, 1.1, 0.8, 1.25, 1.0, 0.9, 3.0, 1.0, 1.3, 0.7]
    passes = [0, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    policy = -sum(a * r for a, r in zip(white, counted, strict=True)) / TOKENS
    gradient = [-a * r * p / TOKENS for a, r, p in zip(white, counted, passes, strict=True)]
    # New values are the old ones, but A's first is 1.5, not 0.5: its target 0.5 + 2.5 = 3 is 1.5 off, and the clip
    # at 0.5 + 0.5 makes that 2. The others are off by their advantage.
    values = [1.5, *VALUES[1:]]
    errors = [2.0, *plain[1:]]
    value = 0.5 * sum(e * e for e in errors) / TOKENS
    check(run("ppo", values=values), white, policy + 0.5 * value, gradient)


def test_every_preset_is_worked_out_here():
    assert set(PRESETS) == {"grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gigpo", "gspo", "cispo", "ppo"}


def test_a_field_goes_over_the_preset():
    """GRPO with raw singletons: C has its reward of 3 as advantage, and so has a gradient."""
    advantage, _, gradient = run("grpo", singleton="raw")
    assert advantage == pytest.approx([*GRPO[:7], 3.0, 0.0, 0.0], abs=2e-5)
    assert gradient[7] == pytest.approx(-3.0 / ROWS)


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_to_learn_from_gives_zero_and_no_nan(name):
    """Only C, D and E, whose groups say nothing: group presets have advantage, loss and gradient of exactly 0."""
    config = PPOConfig(**preset(name))
    trajectories = EPISODES[4:7]
    batch = pack(build_rows(trajectories))
    batch.value = torch.zeros(batch.tokens)
    found = estimate(batch, config, Episodes.of(trajectories))
    if name in ("ppo", "reinforce++"):
        assert torch.isfinite(found.advantage).all()
    else:
        assert found.advantage.abs().max() == 0


def test_kl_in_the_reward_reaches_group_advantages():
    """Costs of 0.2 and 0.1 on A's tokens and 0.3 on H's first: A earns 2.7, B 0, H -0.3. Against the others' mean:
    2.7 + 0.15, 0 - 1.2, -0.3 - 1.35. Of the failed episode, the masked one and the other groups nothing changes."""
    batch = table()
    cost = torch.zeros(batch.tokens)
    cost[batch.trainable[:2]] = torch.tensor([0.2, 0.1])
    cost[batch.trainable[4]] = 0.3
    episodes = Episodes.of(EPISODES)
    less = episodes.less(batch, cost)
    assert less.reward.tolist() == pytest.approx([2.7, 0, math.nan, -0.3, 3, 2, 2, 9], nan_ok=True)
    assert episodes.reward[0] == 3.0
    found = estimate(batch, PPOConfig(**preset("rloo"), kl_in="reward"), less)
    want = spread(A=2.85, B=-1.2, H=-1.65)
    assert found.advantage[batch.trainable].tolist() == pytest.approx(want, abs=1e-5)
