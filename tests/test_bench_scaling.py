"""The scaling benchmark's figures, from made-up records."""

import pytest

from benchmarks.bench_scaling import compared, figures, table


def record(rollout, update, episodes=60.0, tokens=9000.0, norm=2.0):
    return {
        "time/rollout": rollout, "time/update": update, "time/load": 0.0, "train/episodes": episodes,
        "update/tokens": tokens, "policy/loss": 0.5, "update/grad_norm": norm,
    }  # fmt: skip


def test_figures_leave_the_first_iteration_out():
    # Two iterations of 2 s playing and 1 s learning: 120 episodes in 6 s, 18,000 tokens in 2 s.
    found = figures(1, [record(50.0, 50.0), record(2.0, 1.0), record(2.0, 1.0)])
    assert found["episodes_per_hour"] == pytest.approx(72_000) and found["update_tokens_per_second"] == 9000
    assert found["rollout_share"] == pytest.approx(2 / 3) and found["iterations"] == 2
    with pytest.raises(RuntimeError, match="two iterations or more, got 1"):
        figures(2, [record(1.0, 1.0)])


def test_ratios_are_to_the_first_number_of_ranks():
    one = figures(1, [record(2.0, 1.0)] * 2)
    two = figures(2, [record(1.0, 0.5, norm=2.02), record(1.0, 0.5)])
    rows = compared([one, two])
    assert (rows[0]["episodes_speedup"], rows[1]["episodes_speedup"], rows[1]["update_speedup"]) == (1.0, 2.0, 2.0)
    assert rows[1]["loss_difference"] == 0.0 and rows[1]["norm_difference"] == pytest.approx(0.01)
    head, *lines = table(rows).splitlines()
    assert len(head) == len(lines[0]) == len(lines[1]) and "2.00x" in lines[1]
