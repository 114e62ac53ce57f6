"""The tables of docs/search.md come from benchmarks/results; seeds are merged only if they were run alike."""

import json

import pytest

from benchmarks import bench_expert_iteration, bench_search_panel, search_tables


def test_the_page_is_up_to_date():
    with pytest.raises(SystemExit) as end:
        search_tables.main(["--check"])
    assert end.value.code == 0


def test_a_page_without_the_markers_is_refused():
    with pytest.raises(ValueError, match=r"docs/search\.md: expected the markers <!-- panel:begin -->"):
        search_tables.written("no tables here")


def rounds(seed, after, commit="abc"):
    comparison = {"difference": after - 0.25, "low": after - 0.3, "high": after - 0.2, "p_value": 0.004, "tasks": 512}
    row = {"number": 1, "tasks": 1000, "solved": 400, "rows": 400, "seed": seed, "before": 0.25, "after": after,
           "search_seconds": 10.0, "seconds": 20.0, "comparison": comparison}  # fmt: skip
    return {"commit": commit, "overrides": ["sft.epochs=2"], "expert_iteration": {"rounds": 1}, "rows": [row]}


def test_seeds_are_merged_with_their_mean(tmp_path, capsys):
    for seed, after in ((0, 0.35), (1, 0.30)):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(rounds(seed, after)))
    bench_expert_iteration.merge(tmp_path, "run", str(tmp_path / "all.json"))
    assert "mean difference after the last round: +7.5 points over 2 seeds" in capsys.readouterr().out
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["command"].endswith("--seeds 0 1 --out FOLDER --panel 512 sft.epochs=2")
    table = search_tables._expert(record)
    assert table[2] == "| 0 | 1 | 400 of 1,000 | 400 | 25.0 | 35.0 | +10.0 (+5.0 to +15.0) | 0.004 |"
    (tmp_path / "seed1" / "run.json").write_text(json.dumps(rounds(1, 0.3, commit="def")))
    with pytest.raises(SystemExit, match="expected seeds of one commit, machine and config"):
        bench_expert_iteration.merge(tmp_path, "run", None)
    with pytest.raises(SystemExit, match=r"expected folders seed<n> with other\.json"):
        bench_expert_iteration.merge(tmp_path, "other", None)


def test_runs_of_one_panel_are_joined(tmp_path, capsys):
    def record(name, temperature, tasks=200, commit="abc"):
        row = {"name": name, "search": {"temperature": temperature}, "tasks": tasks, "solved": {"125": 50},
               "success": {"125": 0.25}, "mean_tokens": 100.0, "mean_steps": 5.0}  # fmt: skip
        return {"split": "valid_unseen", "commit": commit, "rows": [row]}

    files = []
    for number, case in enumerate((("MCTS", 1.0), ("beam", 1.4), ("beam", 1.0), ("greedy", 1.0), ("greedy", 1.0))):
        files.append(str(tmp_path / f"{number}.json"))
        (tmp_path / f"{number}.json").write_text(json.dumps(record(*case)))
    bench_search_panel.main(["--merge", *files, "--json", str(tmp_path / "all.json")])
    joined = json.loads((tmp_path / "all.json").read_text())
    rows = joined["rows"]
    assert joined["commit"] == "abc"
    found = [(row["name"], row["search"]["temperature"]) for row in rows]
    assert found == [("greedy", 1.0), ("beam", 1.0), ("MCTS", 1.0), ("beam", 1.4)]
    assert "| greedy | – | 25.0 | 100 | 5.0 |" in capsys.readouterr().out
    # A checkout with edits is told from a clean one, and another commit is refused.
    (tmp_path / "0.json").write_text(json.dumps(record("MCTS", 1.0, commit="abc+")))
    bench_search_panel.main(["--merge", *files, "--json", str(tmp_path / "all.json")])
    assert json.loads((tmp_path / "all.json").read_text())["commit"] == "abc+"
    (tmp_path / "0.json").write_text(json.dumps(record("MCTS", 1.0, commit="abd")))
    with pytest.raises(SystemExit, match="expected runs of one commit"):
        bench_search_panel.main(["--merge", *files])
    (tmp_path / "0.json").write_text(json.dumps(record("MCTS", 1.0, tasks=100)))
    with pytest.raises(SystemExit, match="expected runs of one commit, split, number of tasks and budgets"):
        bench_search_panel.main(["--merge", *files])
