"""The README's figures come from benchmarks/results, row by row."""

import json

import pytest

from benchmarks import tables


def test_readme_is_up_to_date():
    with pytest.raises(SystemExit) as end:
        tables.main(["--check"])
    assert end.value.code == 0


def test_the_fastest_of_each_side_is_shown():
    rows = [
        {"op": "x", "case": "c", "pass": "fwd", "backend": backend, "ms": ms, "device": "D", "torch": "T"}
        for backend, ms in (("manus_fast a", 2.0), ("manus_fast b", 1.0), ("eager", 9.0), ("compile", 4.0))
    ]
    line = tables._ops(json.loads(json.dumps(rows)))[-2]
    assert line == "| x | c | fwd | **1** | b | 4 | compile | 4.0× |"
