"""The closed loop over native household games, against what the batch itself says and does."""

import numpy as np
import pytest

from manus_fast import _C
from manus_fast.envs.household import Household
from manus_fast.search import TreeBatch


@pytest.fixture(scope="module")
def world():
    return Household(max_steps=12, receptacles=[5, 6], objects=2, task_types=["pick_and_place_simple"])


def started(world, count):
    batch = world.make_batch(count)
    batch.reset(range(count), world.tasks("train")[:count], [0] * count)
    return batch


def near_the_end(world, count, left):
    """Games in which the planner needs `left` more commands."""
    batch = started(world, count)
    plans = []
    probe = world.make_batch(1)
    for slot in range(count):
        probe.restore(0, batch.save(slot))
        plan, over = [], False
        while not over:
            (action,), _ = probe.expert([0], "planner")
            over = bool(probe.step([0], [action])[2][0])
            plan.append(action)
        for action in plan[:-left]:
            batch.step([slot], [action])
        plans.append(plan[-left:])
    return batch, plans


def test_actions_are_the_admissible_commands_and_steps_those_of_the_batch(world):
    batch = started(world, 2)
    trees = TreeBatch(2, 64, max_edges=64 * 64)
    trees.set_household(batch, [0, 1])
    trees.search_worlds(30)
    rng = np.random.default_rng(0)
    for slot in range(2):
        for _ in range(6):
            commands = batch.admissible(slot)
            assert trees.view(slot).num_actions[0] == len(commands)
            action = int(rng.integers(len(commands)))
            reward, terminal = trees.advance_world(slot, action)
            _, rewards, ends, _, _ = batch.step([slot], [commands[action]])
            assert (reward, terminal) == (rewards[0], ends[0])
            if terminal:
                break
            trees.search_worlds(1)


@pytest.mark.parametrize("left", [1, 2])
def test_a_goal_within_reach_is_found_and_visited_most(world, left):
    """Every command of the first `left` turns is tried, so the known solution is among them."""
    batch, plans = near_the_end(world, 3, left)
    trees = TreeBatch(3, 8192, max_edges=8192 * 32, discount=0.9, rule="uct", c=1.0)
    trees.set_household(batch, range(3))
    trees.search_worlds(4000)
    for slot, plan in enumerate(plans):
        best = int(trees.root_visits()[slot].argmax())
        assert trees.root_q()[slot, best] > 0
        probe = world.make_batch(1)
        probe.restore(0, batch.save(slot))
        _, rewards, *_ = probe.step([0], [probe.admissible(0)[best]])
        if left == 1:
            assert rewards[0] == 1 and len(plan) == 1


def test_rollouts_see_the_goal_and_threads_change_nothing(world):
    batch, _ = near_the_end(world, 4, 2)
    before, visits = _C.num_threads(), []
    try:
        for threads in (1, 3):
            _C.set_num_threads(threads)
            trees = TreeBatch(4, 512, max_edges=512 * 32, seed=5)
            trees.set_household(batch, range(4), rollout_depth=6)
            trees.search_worlds(300, leaves=2)
            visits.append(trees.root_visits())
            assert (trees.root_values() > 0).all()
    finally:
        _C.set_num_threads(before)
    assert np.array_equal(*visits)


def test_an_episode_out_of_steps_ends_and_bad_calls_are_refused(world):
    short = Household(max_steps=1, receptacles=[5, 6], objects=2, task_types=["pick_and_place_simple"])
    batch = started(short, 1)
    trees = TreeBatch(1, 128, max_edges=4096)
    trees.set_household(batch, [0])
    trees.search_worlds(100)
    view = trees.view(0)
    assert (view.parent[1:] == 0).all() and view.closed[1:].all() and trees.root_values()[0] == 0
    with pytest.raises(ValueError, match=r"slots: expected one per tree \(1\), got 2"):
        trees.set_household(batch, [0, 0])
    with pytest.raises(ValueError, match="rollout_depth: expected an integer >= 0"):
        trees.set_household(batch, [0], rollout_depth=-1)
    batch.step([0], ["look"])
    with pytest.raises(ValueError, match="its episode is over"):
        trees.set_household(batch, [0])
