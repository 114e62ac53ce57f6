"""Gathering the seeds of the preferences' benchmark."""

import json

import pytest

from benchmarks.bench_preferences import merge


def record(seed, commit="abc"):
    found = {"difference": 0.05, "low": 0.01, "high": 0.085}
    names = ("dpo", "best_of_n", "shortest", "oracle")
    row = {"seed": seed, "pairs": 900, "dpo_pairs": 700, "against_start": dict.fromkeys(names, found)}
    row["success"] = {"start": 0.35, "mean": 0.3, **dict.fromkeys(names, 0.4)}
    return {"commit": commit, "arguments": {"tasks": 500, "n": 4}, "overrides": ["dpo.beta=0.3"], "row": row}


def write(root, *records):
    for each in records:
        folder = root / f"seed{each['row']['seed']}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(each))


def test_seeds_are_gathered_in_a_table(tmp_path, capsys):
    write(tmp_path, record(0), record(1))
    merge(tmp_path, "run", str(tmp_path / "all.json"))
    cell = "40.0 (+5.0, +1.0 to +8.5)"
    assert capsys.readouterr().out.splitlines()[1] == f"| 1 | 35.0 | {' | '.join([cell] * 4)} | 30.0 | 900 | 700 |"
    whole = json.loads((tmp_path / "all.json").read_text())
    assert whole["command"] == "python -m benchmarks.bench_preferences --seeds 0 1 --tasks 500 --n 4 dpo.beta=0.3"
    assert [row["seed"] for row in whole["rows"]] == [0, 1] and "row" not in whole


def test_seeds_that_were_run_differently_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"expected folders seed<n> with run.json"):
        merge(tmp_path, "run", None)
    write(tmp_path, record(0), record(1, commit="def"))
    with pytest.raises(SystemExit, match=r"expected seeds of one commit"):
        merge(tmp_path, "run", None)
