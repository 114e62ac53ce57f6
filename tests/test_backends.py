"""A whole training run gives the same numbers with the fast ops as with the reference ones."""

import pytest

from benchmarks.bench_backends import BACKENDS, METRICS, curve, differences
from manus_fast.demo import make_small_policy
from manus_fast.player import make_environment
from manus_fast.run_config import Config

SMALL = ["training.num_rollouts=6", "ppo.batch_size=3", "environment.max_steps=4", "ppo.ent_coef=0.01"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    config = Config.load("configs/demo_household.yaml")
    return make_small_policy(config, make_environment(config), tmp_path_factory.mktemp("policy") / "model")


def test_a_run_does_not_depend_on_the_backend(policy, tmp_path):
    curves = [curve(name, tmp_path / name, "configs/demo_household.yaml", str(policy), 2, SMALL) for name in BACKENDS]
    result = differences(*curves)
    assert result["same"] == 2
    for name in METRICS:
        scale = max(1e-3, abs(result["metrics"][name]["reference"]))
        assert result["metrics"][name]["largest"] <= 1e-4 * scale, name


def test_differences_stop_where_the_episodes_part():
    fast = {"tokens": [5, 6, 7], **{name: [1.0, 2.0, 9.0] for name in METRICS}}
    slow = {"tokens": [5, 6, 8], **{name: [1.0, 2.5, 3.0] for name in METRICS}}
    result = differences(fast, slow)
    assert result["same"] == 2
    assert result["metrics"]["policy/loss"] == {"largest": 0.5, "auto": 4.0, "reference": 6.5 / 3}
