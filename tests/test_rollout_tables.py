"""The tables of docs/rollout.md come from benchmarks/results; what barriers can cost is worked out by hand."""

import pytest

from benchmarks import rollout_tables


def test_the_page_is_up_to_date():
    with pytest.raises(SystemExit) as end:
        rollout_tables.main(["--check"])
    assert end.value.code == 0


def test_a_page_without_the_markers_is_refused():
    with pytest.raises(ValueError, match=r"docs/rollout\.md: expected the markers <!-- rollout:begin -->"):
        rollout_tables.written("no tables here")


def test_what_barriers_alone_can_cost():
    slow = {"backend": "lockstep", "ms": 20_000.0, "empty_s": 9.0, "further_s": 1.0, "gain": 2.0, "bound": 6.0,
            "timed_bound": 3.0, "ended_bound": 2.5}  # fmt: skip
    fast = [{"backend": "manus_fast", "ms": ms, "empty_s": empty} for ms, empty in ((11_000.0, 5.0), (10_000.0, 2.5))]
    line = rollout_tables._bounds(slow, [slow, *fast], [])[-1]
    assert line.endswith("| 1.60 |")  # 20 over 20 - 9 - 1 + 2.5 seconds
