import math

import pytest
import torch

from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.presets import PRESETS, preset
from manus_fast.learn.schedules import Schedule
from manus_fast.learn.update import check_group_size
from manus_fast.run_config import Config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "gae"}, r"ppo.advantage: expected one of turn, token, .*, got 'gae'"),
        ({"critic": "none"}, r"ppo.critic: expected shared or separate for ppo.advantage 'turn', got 'none'"),
        ({"gamma": 1.5}, r"ppo.gamma: expected a number in \[0, 1\], got 1.5"),
        ({"epochs": 0}, "ppo.epochs: expected an integer >= 1, got 0"),
        ({"batch_size": 0}, "ppo.batch_size: expected an integer >= 1, got 0"),
        ({"vf_coef": -1.0}, "ppo.vf_coef: expected a number >= 0"),
        ({"clip_range": 2.0}, "ppo.clip_range: expected"),
        ({"kl": "k9"}, "ppo.kl: expected one of k1, k2, k3"),
        ({"kl_in": "both"}, "ppo.kl_in: expected one of loss, reward, got 'both'"),
        ({"kl_target": 0.1}, "ppo.kl_coef: expected a number above 0 where ppo.kl_target is set"),
        ({"kl_coef": {"start": -1.0}}, "ppo.kl_coef: schedule.start: expected a finite number >= 0"),
        ({"ent_coef": "much"}, "ppo.ent_coef: expected a number or a schedule"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "ppo.norm_length: expected"),
        ({"max_tokens": 0}, "ppo.max_tokens: expected null or a number above 0"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        PPOConfig(**options)
    assert "\n" not in str(caught.value)


def test_the_critic_follows_from_the_advantage():
    assert PPOConfig().critic_kind == "shared"
    assert PPOConfig(critic="separate").critic_kind == "separate"
    assert PPOConfig(advantage="grpo").critic_kind == "none"


def test_a_reference_is_needed_only_where_its_coefficient_is_ever_above_zero():
    assert not PPOConfig(kl_coef=0.0).needs_reference
    assert not PPOConfig(kl_coef=Schedule(0.0, "linear", 0.0)).needs_reference
    assert PPOConfig(kl_coef=0.01).needs_reference
    assert PPOConfig(kl_coef=Schedule(0.0, "linear", 0.1)).needs_reference


def test_a_kl_in_the_reward_is_no_part_of_the_loss():
    assert PPOConfig(kl_coef=0.1).loss_config(0.0, 0.1).kl_coef == 0.1
    assert PPOConfig(kl_coef=0.1, kl_in="reward").loss_config(0.0, 0.1).kl_coef == 0.0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_can_be_overridden(name):
    config = PPOConfig(**{**preset(name), "epochs": 7})
    assert config.epochs == 7
    assert math.isfinite(config.clip_range)


def test_group_algorithms_compare_several_episodes_of_a_task():
    sizes = {name: Config.load(None, [f"algorithm={name}"]).training.group_size for name in PRESETS}
    assert {name for name, size in sizes.items() if size == 1} == {"ppo", "reinforce++"}
    assert Config.load(None, ["algorithm=grpo", "training.group_size=4"]).training.group_size == 4
    check_group_size(PPOConfig(), 1)
    with pytest.raises(ValueError, match=r"training.group_size: expected an integer >= 2 for ppo.advantage 'rloo'"):
        check_group_size(PPOConfig(**preset("rloo")), 1)


def test_unknown_algorithm():
    with pytest.raises(ValueError, match=r"algorithm: expected one of ppo, grpo, .*, got 'pppo'"):
        preset("pppo")
    preset("grpo")["advantage"] = "changed"
    assert preset("grpo")["advantage"] == "grpo"


def test_the_loss_of_two_tokens_by_hand():
    """Ratios 1.5 (A = 2: clipped to 1.2) and 0.5 (A = -1: clipped to 0.8): -(2.4 - 0.8) / 2 = -0.8. Values 0.3 off its
    return 1: 0.5·0.49; times vf_coef 0.5, one token of two. Entropy 0.7 each at 0.1."""
    from learning import random_rows

    from manus_fast.data.packing import pack
    from manus_fast.learn.losses import denominator_of, policy_gradient_loss
    from manus_fast.learn.policy import ScoreOutput

    row = random_rows(1)[0]
    for name in ("token_ids", "loss_mask", "turn_id", "log_prob", "reward"):
        setattr(row, name, getattr(row, name)[:3])
    row.loss_mask[:] = [False, True, True]
    part = pack([row])
    part.old_log_prob = torch.tensor([0.0, -1.0, -1.0])
    part.advantage = torch.tensor([0.0, 2.0, -1.0])
    part.value, part.returns = torch.tensor([0.0, 0.3, 1.0]), torch.tensor([0.0, 1.0, 1.0])
    output = ScoreOutput(
        log_prob=torch.tensor([0.0, -1.0 + math.log(1.5), -1.0 + math.log(0.5)]),
        entropy=torch.tensor([0.0, 0.7, 0.7]),
        value=torch.tensor([0.0, 0.3, 1.0]),
        last_value=None,
    )
    config = PPOConfig(ent_coef=0.1).loss_config(ent_coef=0.1)
    loss, _ = policy_gradient_loss(part, output, config, mean=0.0, rstd=1.0, denominator=denominator_of(part, config))
    assert float(loss) == pytest.approx(-0.8 + 0.5 * 0.5 * 0.49 / 2 - 0.1 * 0.7, abs=1e-6)
