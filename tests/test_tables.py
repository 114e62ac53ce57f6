"""The README's figures come from benchmarks/results, row by row."""

import json

import pytest

from benchmarks import kernels_tables, tables


def test_readme_is_up_to_date():
    with pytest.raises(SystemExit) as end:
        tables.main(["--check"])
    assert end.value.code == 0


def test_the_fastest_of_each_side_is_shown():
    rows = [
        {
            "op": "x",
            "case": "c",
            "pass": "fwd",
            "backend": backend,
            "ms": ms,
            "device": "D",
            "torch": "T",
            "commit": "1",
        }
        for backend, ms in (("manus_fast a", 2.0), ("manus_fast b", 1.0), ("eager", 9.0), ("compile", 4.0))
    ]
    line = tables._ops(json.loads(json.dumps(rows)))[-2]
    assert line == "| x | c | fwd | **1** | b | 4 | compile | 4.0× |"
    rows[-1]["commit"] = "2"  # measured on another day: said
    *_, line, _, note, _ = tables._ops(rows)
    assert line == "| x | c | fwd | **1** | b | 4 | compile † | 4.0× |" and note.startswith("† ")


def test_kernels_tables_stand_between_their_marks_and_nowhere_else():
    page = (tables.ROOT / "docs" / "kernels.md").read_text()
    marks = [match["name"] for match in kernels_tables.MARKS.finditer(page)]
    assert sorted(marks) == sorted(kernels_tables.TABLES)
    assert not [line for line in kernels_tables.MARKS.sub("", page).splitlines() if line.startswith("|")]
    with pytest.raises(KeyError, match="unheard-of"):
        kernels_tables.fill("<!-- table: unheard-of -->\n<!-- /table -->")


def test_designs_show_the_median_round_and_the_fastest(monkeypatch):
    rows = [
        {"op": "x", "case": case, "design": design, "median_ms": ms, "commit": commit}
        for design, case, ms, commit in (("a", "c", 0.5, "1f"), ("b", "c", 0.25, None), ("a", "d", 1234.0, "1f"))
    ]
    monkeypatch.setattr(kernels_tables, "_load", lambda name: {"rows": rows})
    table = kernels_tables._designs("x", [("c", None, "C"), ("d", None, "D")])
    assert table == [
        "| design | C | D | commit |",
        "| --- | --- | --- | --- |",
        "| a | 0.500 | **1,234** | 1f |",
        "| b | **0.250** | – | – |",
    ]


def test_every_design_names_the_code_that_ran():
    record = kernels_tables._load("designs.json")
    assert "no command" in record["provenance"]
    for row in record["rows"]:
        present = row["design"].split(": ")[-1] == "present"
        assert row["commit"] is None or row["commit"].endswith("+") != present


def test_a_case_shows_ours_beside_the_peers_its_share_of_the_limit_and_its_target(monkeypatch):
    row = {"op": "x", "case": "c", "pass": "fwd", "pct_of_limit": 61.4}
    rows = [{**row, "backend": "eager", "ms": 9.0}, {**row, "backend": "mine", "ms": 0.0276}]
    monkeypatch.setattr(kernels_tables, "_load", lambda name: rows)
    lines = kernels_tables._beside("x", {"eager": "eager", "mine": "**ours**", "none": "other"}, {"c": 0.03}, "fwd")
    assert lines[-1] == "| c | 9.00 | **0.0276** | – | 61 % | 0.0300 |"
