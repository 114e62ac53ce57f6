"""Which groups an update learns from: by hand, on made-up rewards."""

import math

import numpy as np
import pytest

from manus_fast.agent.trajectory import Trajectory, Turn, build_rows
from manus_fast.data.packing import pack
from manus_fast.learn.filters import EmptySteps, NothingToLearnError, Selection
from manus_fast.learn.losses import PPOConfig, denominator_of
from manus_fast.learn.presets import preset
from manus_fast.learn.update import check_group_size
from manus_fast.rollout.summary import summarise


def group(number, *rewards):
    """Episodes of one group; a reward of None is a failed episode."""
    return [
        Trajectory(
            f"t/{number}/{member}", "", "", "", "", 0, number, member,
            turns=[Turn(*[[]] * 3, "stop", reward=r or 0.0)], error="the world broke" if r is None else None,
        )
        for member, r in enumerate(rewards)
    ]  # fmt: skip


def select(config, *batches, groups=2):
    """Plays batch after batch for as long as the selection asks for more; what is kept, as group numbers."""
    selection = Selection(config, groups)
    rest = iter(batches)
    while selection.wants_more:
        selection.add([t for g in next(rest) for t in g])
    kept = [(t.group, t.member) for t, keep in zip(selection.trajectories, selection.kept, strict=True) if keep]
    return selection, kept


ALIKE, APART, FAILED = group(0, 1.0, 1.0), group(1, 1.0, 0.0), group(2, None, None)


def test_without_filters_every_valid_episode_is_kept_and_nothing_is_played_again():
    selection, kept = select(PPOConfig(), [ALIKE, APART, group(2, None, 1.0)])
    assert selection.batches == 1 and kept == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]
    # One of three groups differs: the failed episode leaves its fellow alone, whose reward equals itself.
    assert selection.metrics() == pytest.approx(
        {"filter/zero_variance_share": 2 / 3, "filter/kept_share": 5 / 6, "filter/gen_batches": 1.0}
    )


def test_groups_without_a_difference_are_dropped_on_request():
    _, kept = select(PPOConfig(drop_zero_variance=True), [ALIKE, APART, FAILED])
    assert kept == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("options", "counts"),
    # Three sampled tokens an episode, three groups of two episodes, one of which failed.
    [
        ({}, {"token-mean": 15, "seq-mean-token-mean": 5}),
        ({"drop_zero_variance": True}, {"token-mean": 6, "seq-mean-token-mean": 2}),
    ],
)
def test_groups_that_are_left_out_are_in_no_denominator(options, counts):
    prompt, ids = np.asarray([1, 2], np.int32), np.asarray([3, 4, 5], np.int32)
    played = [t for g in (group(0, 1.0, 1.0), group(1, 1.0, 0.0), group(2, None, 1.0)) for t in g]
    for t in played:
        t.turns = [Turn(prompt, ids, np.zeros(3, np.float32), "stop", reward=t.turns[0].reward)]
    selection = Selection(PPOConfig(**options), 3)
    selection.add(played)
    rows = [row for row in build_rows(played) if selection.kept[row.episode]]
    for aggregation, count in counts.items():
        config = PPOConfig(aggregation=aggregation, **options).loss_config()
        assert denominator_of(pack(rows), config) == count


def test_figures_of_a_collection_are_over_the_episodes_that_did_not_fail():
    """Cut ones included: reward, length and how many were cut are all of one set of episodes."""
    played = group(0, 1.0, 0.0, None)
    played[1].truncated = True
    for t, turns in zip(played, (1, 3, 9), strict=True):
        t.turns = [Turn([], [7] * 4, [], "stop", reward=t.turns[0].reward / turns) for _ in range(turns)]
    found = summarise(played)
    assert (found["train/episodes"], found["train/failed"], found["train/truncated_rate"]) == (3, 1, 0.5)
    assert (found["train/turns"], found["train/tokens"], found["train/reward"]) == (2.0, 8.0, 0.5)


def test_success_is_told_by_kind_where_there_are_several():
    played = group(0, 1.0, 0.0, None) + group(1, 1.0)
    for t, kind, won in zip(played, ("heat", "heat", "cool", "light"), (True, False, True, True), strict=True):
        t.task_type, t.success = kind, won
        t.turns = t.turns or [Turn([], [7], [], "stop")]
    found = {name: value for name, value in summarise(played).items() if name.startswith("train_success")}
    assert found == {"train_success/heat": 0.5, "train_success/light": 1.0}  # the episode that cools failed
    assert not any(name.startswith("train_success") for name in summarise(played[:2]))


def test_rewards_that_differ_by_rounding_are_equal():
    almost = group(0, 0.1 + 0.2, 0.3)
    assert almost[0].reward != almost[1].reward
    assert select(PPOConfig(drop_zero_variance=True), [almost, APART])[1] == [(1, 0), (1, 1)]


def test_dynamic_sampling_plays_on_until_enough_groups_differ():
    """Two groups are wanted: the first batch has one, the second none, the third two, of which the first is taken."""
    config = PPOConfig(**preset("dapo"))
    third = [group(4, 0.0, 3.0), group(5, 0.0, 3.0)]
    selection, kept = select(config, [ALIKE, APART], [FAILED, group(3, 0.0, 0.0)], third)
    assert selection.batches == 3 and kept == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert selection.metrics()["filter/gen_batches"] == 3.0
    assert selection.metrics()["filter/zero_variance_share"] == pytest.approx(2 / 5)  # of those that did not fail


def test_dynamic_sampling_gives_up_at_the_cap_with_what_it_has():
    config = PPOConfig(dynamic_sampling=True, max_num_gen_batches=2)
    selection, kept = select(config, [ALIKE, APART], [FAILED, group(3, 0.0, 0.0)], [group(4, 0.0, 1.0)])
    assert selection.batches == 2 and kept == [(1, 0), (1, 1)]


def test_variance_top_p_keeps_the_groups_that_vary_most():
    """Standard deviations 0.5, 2, 1.5, 0: of their sum 4, groups 1 and 2 have 3.5 = 87.5 %, group 1 alone 50 %."""
    batch = [group(0, 0.0, 1.0), group(1, 0.0, 4.0), group(2, 0.0, 3.0), group(3, 1.0, 1.0)]
    for share, want in ((0.4, {1}), (0.5, {1}), (0.6, {1, 2}), (0.875, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2})):
        _, kept = select(PPOConfig(variance_top_p=share), batch, groups=4)
        assert {number for number, _ in kept} == want


def test_five_empty_iterations_in_a_row_end_a_run_and_say_why():
    config = PPOConfig(drop_zero_variance=True)
    empty, some = select(config, [ALIKE])[0], select(config, [APART])[0]
    steps = EmptySteps(5)
    for _ in range(4):
        steps.check(empty)
    steps.check(some)
    for _ in range(4):
        steps.check(empty)
    with pytest.raises(NothingToLearnError, match=r"after 5 iterations in a row .* every group's episodes earned") as e:
        steps.check(empty)
    assert isinstance(e.value, ValueError) and "\n" not in str(e.value) and "training.group_size" in str(e.value)


def test_a_world_that_always_breaks_ends_a_run_too_whatever_the_algorithm():
    steps, broken = EmptySteps(2), select(PPOConfig(), [FAILED])[0]
    steps.check(broken)
    with pytest.raises(NothingToLearnError, match=r"every episode failed \(the world broke\)"):
        steps.check(broken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_gen_batches": 0}, "ppo.max_num_gen_batches: expected an integer >= 1, got 0"),
        ({"max_empty_steps": 0}, "ppo.max_empty_steps: expected an integer >= 1, got 0"),
        ({"variance_top_p": 1.5}, "ppo.variance_top_p: expected null or a share in"),
        ({"overlong_buffer": -0.1}, "ppo.overlong_buffer: expected a share in"),
        ({"overlong_penalty": math.nan}, "ppo.overlong_penalty: expected a number >= 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**options)


def test_a_filter_needs_groups():
    with pytest.raises(ValueError, match=r"training.group_size: expected an integer >= 2 with ppo.dynamic_sampling"):
        check_group_size(PPOConfig(dynamic_sampling=True), 1)
