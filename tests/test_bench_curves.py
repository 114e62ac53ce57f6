"""The picture of the learning curves, from made-up ones."""

import pytest

pytest.importorskip("matplotlib")


def test_curves_of_all_seeds_and_their_mean_are_drawn(tmp_path):
    from benchmarks.bench_curves import plot

    runs = [{"algorithm": "sft", "seed": 0, "unseen": 0.3}]
    for name in ("ppo", "grpo"):
        runs += [{"algorithm": name, "seed": s, "panel": [[0, 0.3], [1000 + s, 0.5], [2000, 0.6]]} for s in range(3)]
    plot({"runs": runs}, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert "<svg" in text and text.count('id="line2d_') > 8  # eight curves, and the ticks
