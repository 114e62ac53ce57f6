"""What the benchmarks write: each row at once, in the place of the same measurement."""

import json

from benchmarks import harness


def test_rows_are_written_at_once_and_replace_only_their_like(tmp_path):
    file = tmp_path / "rows.json"
    for commit, times in (("a", {"one": 1.0, "two": 2.0}), ("b", {"two": 3.0, "three": 4.0})):
        report = harness.Report("gae", "CPU", harness.Ceilings(1, 1), commit, str(file))
        for backend, ms in times.items():
            report.add("[2, 3]", backend, "fwd", ms)
            assert json.loads(file.read_text())[-1]["op"] == "gae"
    harness.Report("logprob", "CPU", harness.Ceilings(1, 1), "c", str(file)).add("[2, 3]", "one", "fwd", 5.0)
    harness.merge(file, [{**json.loads(file.read_text())[0], "backend": "four"}])
    rows = [(row["op"], row["backend"], row["ms"], row["commit"]) for row in json.loads(file.read_text())]
    assert rows == [
        ("gae", "one", 1.0, "a"), ("gae", "two", 3.0, "b"), ("gae", "three", 4.0, "b"), ("gae", "four", 1.0, "a"),
        ("logprob", "one", 5.0, "c"),
    ]  # fmt: skip
