import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from manus_fast.config import from_mapping, to_dict
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.optim import OptimizerConfig, adamw, clip_gradients, grad_norm
from manus_fast.learn.schedules import KLController, Schedule, schedule


def test_values_by_hand():
    linear = Schedule(1.0, "linear", 0.2, warmup=0.2)
    assert [round(linear.at(p), 6) for p in (0.0, 0.1, 0.2, 0.6, 1.0, 2.0)] == [0.0, 0.5, 1.0, 0.6, 0.2, 0.2]
    cosine = Schedule(2.0, "cosine")
    assert [round(cosine.at(p), 6) for p in (0.0, 0.5, 1.0)] == [2.0, 1.0, 0.0]
    assert cosine.at(0.25) == pytest.approx(1 + math.cos(math.pi / 4))
    assert Schedule(3.0, warmup=0.5).at(0.75) == 3.0
    held = Schedule(1.0, "linear", 0.2, warmup=0.1, hold=0.5)
    assert [round(held.at(p), 6) for p in (0.05, 0.1, 0.3, 0.5, 0.7, 1.0)] == [0.5, 1.0, 0.6, 0.2, 0.2, 0.2]


SHARES = st.floats(0.0, 0.999)
VALUES = st.floats(0.0, 1e3)


@settings(deadline=None)
@given(
    start=VALUES, end=VALUES, kind=st.sampled_from(["linear", "cosine"]), warmup=SHARES, hold=SHARES,
    progress=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20),
)  # fmt: skip
def test_a_schedule_rises_to_start_goes_one_way_to_end_and_stays_there(start, end, kind, warmup, hold, progress):
    assume(warmup + hold < 0.999)
    rate = Schedule(start, kind, end, warmup, hold)
    held = 1.0 - hold
    assert rate.at(warmup) == pytest.approx(start) and rate.at(held) == rate.at(1.0) == end
    assert rate.at(0.0) == (0.0 if warmup else start)
    progress.sort()
    values = [rate.at(p) for p in progress]
    near = 1e-9 * (start + end)
    for (p, a), (q, b) in pairwise(zip(progress, values, strict=True)):
        if q < warmup:
            assert a <= b + near
        elif p >= warmup:
            assert a <= b + near if start <= end else b <= a + near
    assert all(value == end for p, value in zip(progress, values, strict=True) if p >= held)
    assert all(-near <= value <= max(start, end) + near for value in values)
    # A run that is taken up asks again, in any order.
    assert [rate.at(p) for p in reversed(progress)] == values[::-1]


@given(
    start=VALUES, end=VALUES, kind=st.sampled_from(["linear", "cosine"]), warmup=SHARES, progress=st.floats(0.0, 1.0)
)
def test_a_hold_shortens_the_fall_and_0_leaves_it_alone(start, end, kind, warmup, progress):
    """Between warm-up and hold the value is that of a schedule without a hold at the same share of the fall."""
    plain = Schedule(start, kind, end)
    for hold in (0.0, 0.5 * (1.0 - warmup)):
        rate = Schedule(start, kind, end, warmup, hold)
        at = warmup + progress * (1.0 - hold - warmup)
        if at >= warmup:
            assert rate.at(at) == pytest.approx(plain.at(progress), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "linear", "hold": 1.0}, r"schedule.hold: expected a share in \[0, 1\), got 1.0"),
        ({"kind": "linear", "hold": -0.1}, r"schedule.hold: expected a share in \[0, 1\), got -0.1"),
        ({"kind": "cosine", "hold": math.nan}, r"schedule.hold: expected a share in \[0, 1\), got nan"),
        (
            {"kind": "cosine", "warmup": 0.5, "hold": 0.5},
            r"schedule.hold: expected warmup \+ hold below 1, got 0.5 \+ 0.5",
        ),
        ({"hold": 0.2}, r"schedule.hold: expected 0 with kind constant, which has no end, got 0.2"),
    ],
)
def test_shares_that_leave_no_room_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Schedule(1.0, **values)


def test_config_values_become_schedules():
    assert schedule(0.5, "k") == Schedule(0.5)
    assert schedule({"start": 1, "kind": "linear", "hold": 0.5}, "k") == Schedule(1.0, "linear", hold=0.5)
    for bad in (True, "x", None, {"kind": "linear"}, {"start": 1, "slope": 2}, {"start": 1, "kind": "cubic"}):
        with pytest.raises(ValueError, match=r"^training.learning_rate: "):
            schedule(bad, "training.learning_rate")
    with pytest.raises(ValueError, match=r"^k: schedule: expected start, kind, end, warmup, hold, got start, slope$"):
        schedule({"start": 1, "slope": 2}, "k")


def test_a_config_file_may_give_a_number_or_a_mapping():
    config = from_mapping(PPOConfig, {"ent_coef": {"start": 0.1, "kind": "linear"}, "kl_coef": 0.05})
    assert config.ent_schedule.at(0.5) == pytest.approx(0.05)
    assert config.kl_controller().at(0.9) == 0.05
    assert from_mapping(PPOConfig, to_dict(config)) == config


def test_the_adaptive_controller_follows_its_rule():
    """Error clipped to ±0.2, times 50 episodes over a horizon of 100: a factor 1.1 up, 0.9 down, 1 on target."""
    controller = KLController(Schedule(0.2), target=0.1, horizon=100)
    controller.update(10.0, 50)
    assert controller.at(0.3) == pytest.approx(0.22)
    controller.update(0.0, 50)
    assert controller.at(0.9) == pytest.approx(0.198)
    controller.update(0.1, 50)
    controller.update(math.nan, 50)
    assert controller.at(0.9) == pytest.approx(0.198)
    other = KLController(Schedule(0.2), target=0.1, horizon=100)
    other.load_state_dict(controller.state_dict())
    assert other.at(0.0) == controller.at(0.0)


def test_a_fixed_controller_ignores_measurements():
    controller = KLController(Schedule(0.2, "linear"))
    controller.update(10.0, 1000)
    assert controller.at(0.5) == pytest.approx(0.1)


def test_decay_leaves_vectors_alone():
    """With zero gradients AdamW only decays: matrices shrink by lr·decay, norms and biases stay."""
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer = adamw([("w", matrix), ("norm", vector)], OptimizerConfig(weight_decay=0.5), lr=0.1)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))


def test_the_norm_is_global_and_clipping_keeps_directions():
    a, b = torch.zeros(2), torch.zeros(1)
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    norm = grad_norm([a, b])
    assert float(norm) == 5.0
    clip_gradients([a, b], norm, 10.0)
    assert a.grad.tolist() == [3.0, 0.0]
    clip_gradients([a, b], norm, 1.0)
    assert a.grad[0] == pytest.approx(0.6) and b.grad[0] == pytest.approx(0.8)
    clip_gradients([a, b], norm, 0.0)
    assert b.grad[0] == pytest.approx(0.8)
    with pytest.raises(ValueError, match=r"optimizer.beta1: expected a number in \[0, 1\), got 1.0"):
        OptimizerConfig(beta1=1.0)
