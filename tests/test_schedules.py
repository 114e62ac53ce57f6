import math

import pytest
import torch

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


def test_config_values_become_schedules():
    assert schedule(0.5, "k") == Schedule(0.5)
    assert schedule({"start": 1, "kind": "linear"}, "k") == Schedule(1.0, "linear")
    for bad in (True, "x", None, {"kind": "linear"}, {"start": 1, "slope": 2}, {"start": 1, "kind": "cubic"}):
        with pytest.raises(ValueError, match=r"^training.learning_rate: "):
            schedule(bad, "training.learning_rate")


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
