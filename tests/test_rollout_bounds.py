"""What a collection could take, worked out by hand; and parts of its time that add up."""

import dataclasses

import pytest

from benchmarks.rollout_bounds import bounds, ended, parts, step_cost, waited

# Two slots. Waves of lockstep: (3, 1 | 4, 2) with turns of 1 and 5; then the last two.
LENGTHS = [[3, 1], [4, 2], [5], [1, 1, 1]]


def test_steps_by_hand():
    # First wave: max(3, 4), max(1, 2). Second: max(5, 1), then 1 and 1 of the longer one.
    assert waited(LENGTHS, 2) == 4 + 2 + 5 + 1 + 1
    # Slot 0: 4 steps, then the third episode until 9. Slot 1: 6, then the fourth until 9.
    assert ended(LENGTHS, 2) == 9
    assert ended(LENGTHS, 1) == waited(LENGTHS, 1) == 18 and ended(LENGTHS, 8) == 6


def test_bounds_by_hand():
    found = bounds(LENGTHS, 2, once=1.0, each=0.0)
    assert found.equal == found.timed == pytest.approx(13 / 9) and found.ended == pytest.approx(13 / 9)
    found = bounds(LENGTHS, 2, once=2.0, each=1.0)  # 18 tokens
    assert found.equal == pytest.approx(13 / 9) and found.timed == pytest.approx((26 + 18) / (18 + 18))
    one_long = bounds([[2], [2], [2], [10]], 2, once=1.0, each=0.0)
    assert one_long.equal == pytest.approx(12 / 8) and one_long.ended == pytest.approx(1.0)  # 2, then 10 alone


def test_the_cost_of_a_step_is_fitted_to_those_that_only_decode():
    steps = [(n, 0.002 + 1e-5 * n, False) for n in range(1, 101)]
    steps += [(n, 1.0, True) for n in range(50)] + [(10, 3.0, False)]  # prompts, and one that something held up
    once, each = step_cost(steps)
    assert once == pytest.approx(0.002) and each == pytest.approx(1e-5)


@pytest.mark.parametrize("barriers", [True, False])
def test_parts_add_up(barriers):
    found = parts(LENGTHS, 2, once=0.5, each=0.1, steps=15, engine=11.0, seconds=12.5, barriers=barriers)
    assert sum(dataclasses.astuple(found)) == pytest.approx(12.5)
    assert found.decoding == pytest.approx(0.5 * 9 + 0.1 * 18) and found.host == pytest.approx(1.5)
    assert found.empty == pytest.approx(0.5 * (4 if barriers else 0))
    assert found.further == pytest.approx(0.5 * (2 if barriers else 6))
