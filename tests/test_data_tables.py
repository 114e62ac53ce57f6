"""The tables of docs/data.md and docs/webshop.md come from benchmarks/results."""

import pytest

from benchmarks import data_tables


def test_the_pages_are_up_to_date():
    data_tables.main(["--check"])


@pytest.mark.parametrize("page", ["docs/data.md", "docs/webshop.md"])
def test_a_page_without_the_markers_is_refused(page):
    with pytest.raises(ValueError, match=rf"{page}: expected the markers <!-- \w+:begin -->"):
        data_tables.filled(page, "no tables here")


def test_training_by_hand():
    stage = {"score": 0.5, "success": 0.25, "seconds": 100.4}
    better = {"score": 0.75, "success": 0.5, "seconds": 200.0}
    interval = {"difference": 0.25, "low": 0.2, "high": 0.3}
    row = {"sft": stage, "ppo": better, "ppo_minus_sft": {"score": interval, "success": interval}}
    mean = {"sft": stage, "ppo": better}
    rows = [{"seed": 3, "sampled": row, **row}]
    record = {"tasks": 500, "command": "run", "commit": "abc", "threads": 2, "rows": rows}
    record["mean"] = {"greedy": mean, "sampled": mean}
    figures = "0.500, 25.0 % | 0.750, 50.0 %"
    found = f"{figures} | +0.250 (+0.200 to +0.300) | +25.0 (+20.0 to +30.0) | 100 + 200"
    assert data_tables.training(record)[-4:] == [
        f"| 3, greedy | {found} |", f"| 3, sampled | {found} |",
        f"| mean, greedy | {figures} | +0.250 (+0.200 to +0.300) | +25.0 (+20.0 to +30.0) | |",
        f"| mean, sampled | {figures} | +0.250 (+0.200 to +0.300) | +25.0 (+20.0 to +30.0) | |",
    ]  # fmt: skip
    other = {"difference": 0.05, "low": -0.05, "high": 0.15}  # halves 0.05 and 0.1: sqrt(0.0125) / 2 = 0.0559
    worse = {**rows[0], "ppo_minus_sft": {"score": other, "success": other}}
    line = data_tables.training({**record, "rows": [*rows, worse], "mean": {"greedy": mean}})[-1]
    assert line == f"| mean, greedy | {figures} | +0.150 (+0.094 to +0.206) | +15.0 (+9.4 to +20.6) | |"
    assert len(data_tables.training({**record, "mean": {"greedy": mean}})) == len(data_tables.training(record)) - 2


def test_throughput_by_hand():
    rows = [
        {
            "case": case,
            "stage": stage,
            "conversations_per_s": rate,
            "replies": 5.0,
            "characters": 6000.0,
            "cpu": "C",
            "commit": "abc",
        }
        for case, stage, rate in (
            ("a", "normalise", 21_000.4),
            ("a", "load", 9000),
            ("b", "normalise", 1),
            ("b", "load", 2),
        )
    ]
    assert data_tables.throughput(rows)[-2:] == ["| a | 5.0 | 6,000 | 21,000 | 9,000 |", "| b | 5.0 | 6,000 | 1 | 2 |"]
