"""Steps that are not finite: skipped, counted, saved, fatal after some in a row; the first bad tensor is named."""

import copy
import json
import logging
import math

import numpy as np
import pytest
import torch
from learning import random_rows, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file

from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.guard import NonFiniteError
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy
from manus_fast.learn.sft import SFTConfig, train_sft
from manus_fast.learn.update import PolicyGradientUpdate

ROWS = random_rows(12, seed=3)


def make(config, policy=None, **options):
    policy = policy or Policy(tiny_model(), critic=config.critic_kind)
    return PolicyGradientUpdate(policy, make_backend(policy, BackendConfig(), config.optimizer()), config, **options)


def go(update, rows, iteration=0):
    return update.run(rows, iteration=iteration, progress=0.0, learning_rate=1e-3)


def spoiled(episode, value=math.inf):
    rows = copy.deepcopy(ROWS)
    rows[episode].reward[rows[episode].loss_mask] = value
    return rows


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_many_bad_steps_in_a_row_stop_training_and_leave_the_weights(tmp_path, value):
    """Whitening spreads one bad reward over the collection, so that every step is bad."""
    update = make(PPOConfig(batch_size=4, max_bad_steps=2), dump_folder=tmp_path)
    start = copy.deepcopy(update.policy.state_dict())
    with pytest.raises(NonFiniteError, match=r"after 2 optimizer steps in a row .* the first bad tensor is the ") as e:
        go(update, spoiled(5, value))
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)
    assert update.guard.skipped == 2 and update.steps == 0
    assert all(torch.equal(start[name], weight) for name, weight in update.policy.state_dict().items())
    assert not update.backend.gradients()


def test_a_saved_batch_is_whole_and_says_what_was_bad_and_where(tmp_path):
    update = make(PPOConfig(batch_size=12, max_bad_steps=9), dump_folder=tmp_path)
    stats = go(update, spoiled(5), iteration=7)
    assert stats["update/skipped_steps"] == 1.0 and stats["update/steps"] == 0
    (path,) = tmp_path.iterdir()
    tensors = load_file(path)
    assert {"token_ids", "loss_mask", "advantage", "old_log_prob", "cu_seqlens", "reward"} <= tensors.keys()
    assert tensors["cu_seqlens"][-1] == len(tensors["token_ids"]) == sum(len(row) for row in ROWS)
    assert torch.isinf(tensors["reward"]).any()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["first_bad"] == "the reward of a token of episode 5"
    assert json.loads(metadata["where"]) == {"iteration": 7, "epoch": 0}


def test_one_bad_step_among_good_ones_goes_on_and_the_count_in_a_row_starts_again(caplog):
    rows = spoiled(5)
    update = make(PPOConfig(batch_size=4, whiten=False, max_bad_steps=3))
    with caplog.at_level(logging.WARNING, "manus_fast.learn"):
        for iteration in range(3):  # one bad step of three in each: never three in a row
            stats = go(update, rows, iteration)
            assert stats["update/skipped_steps"] == 1 and stats["update/steps"] == 2
            assert math.isfinite(stats["policy/loss"]) and math.isfinite(stats["update/grad_norm"])
    assert update.guard.skipped == 3
    assert caplog.text.count("optimizer step skipped: the reward of a token of episode 5 is not finite") == 3


def test_the_count_in_a_row_is_in_the_checkpoint():
    config = PPOConfig(batch_size=12, max_bad_steps=2)
    update = make(config)
    go(update, spoiled(5))
    other = make(config)
    other.load_state_dict(json.loads(json.dumps(update.state_dict())))
    assert other.guard.in_row == 1
    with pytest.raises(NonFiniteError, match=r"after 2 optimizer steps in a row"):
        go(other, spoiled(5))


def test_at_most_ten_batches_are_saved(tmp_path):
    update = make(PPOConfig(batch_size=4, epochs=4, max_bad_steps=99), dump_folder=tmp_path)
    assert go(update, spoiled(5))["update/skipped_steps"] == 12
    assert len(list(tmp_path.iterdir())) == 10


def test_a_folder_that_cannot_be_written_does_not_end_training(tmp_path, caplog):
    (tmp_path / "taken").write_text("a file where the folder should be")
    update = make(PPOConfig(batch_size=12, max_bad_steps=9), dump_folder=tmp_path / "taken")
    with caplog.at_level(logging.WARNING, "manus_fast.learn"):
        go(update, spoiled(5))
    assert "could not be saved" in caplog.text


def bad_weight(policy):
    policy.model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan


def bad_critic(policy):
    policy.value_head.bias.fill_(math.inf)


@pytest.mark.parametrize(
    ("spoil", "culprit"),
    [
        (bad_weight, "the weight model.model.layers.1.mlp.up_proj.weight"),
        (bad_critic, "the weight value_head.bias"),
    ],
)
def test_the_first_bad_tensor_is_a_weight(spoil, culprit):
    policy = Policy(tiny_model(), critic="shared")
    with torch.no_grad():
        spoil(policy)
    with pytest.raises(NonFiniteError, match=f"the first bad tensor is {culprit}"):
        go(make(PPOConfig(batch_size=12, max_bad_steps=1), policy), ROWS)


def test_a_bad_reward_of_another_mini_batch_shows_as_the_mean():
    """With steps of one row, the first is most likely not the bad one: what it shares with it is the whitening."""
    update = make(PPOConfig(batch_size=1, max_bad_steps=1))
    with pytest.raises(NonFiniteError, match=r"the first bad tensor is the advantages' mean"):
        go(update, spoiled(5))


def test_a_bad_gradient_is_named_where_all_before_it_was_finite():
    """A hook makes the gradient of one matrix infinite: the loss is fine, the step is not."""
    policy = Policy(tiny_model(), critic="shared")
    name = "model.model.layers.0.self_attn.q_proj.weight"
    dict(policy.named_parameters())[name].register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match=f"the first bad tensor is the gradient of {name}"):
        go(make(PPOConfig(batch_size=12, max_bad_steps=1), policy), ROWS)


def test_activations_that_overflow_are_named_by_what_they_give():
    """Finite weights, infinite log-probabilities: the loss leaves such tokens out, the guard does not."""
    model = tiny_model(tied=False)
    with torch.no_grad():
        model.lm_head.weight[3].fill_(1e38)
        model.model.norm.weight.fill_(1e10)
    with pytest.raises(NonFiniteError, match=r"the first bad tensor is the log-probability"):
        go(make(PPOConfig(batch_size=12, max_bad_steps=1, advantage="return"), Policy(model)), ROWS)


def test_supervised_training_has_the_same_guard(tmp_path):
    policy = Policy(tiny_model())
    with torch.no_grad():
        bad_weight(policy)
    config = SFTConfig(epochs=5, batch_size=12, max_bad_steps=2)
    with pytest.raises(NonFiniteError, match=r"after 2 optimizer steps in a row .* the first bad tensor is the weight"):
        train_sft(make_backend(policy, BackendConfig(), config.optimizer()), ROWS, config, dump_folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad-step-1.safetensors", "bad-step-2.safetensors"]


def test_a_token_whose_sampled_log_probability_is_lost_is_left_out_and_no_reason_to_skip():
    rows = copy.deepcopy(ROWS)
    rows[0].log_prob[np.flatnonzero(rows[0].loss_mask)[0]] = math.nan
    stats = go(make(PPOConfig(batch_size=12, bypass_old=True)), rows)
    assert stats["policy/dropped_tokens"] == 1.0 and stats["update/skipped_steps"] == 0
