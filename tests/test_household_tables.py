"""The tables of docs/household.md and docs/alfworld.md come from benchmarks/results."""

import pytest

from benchmarks import data_tables, household_tables, tables


def test_the_pages_are_up_to_date():
    household_tables.main(["--check"])


def test_a_page_without_the_markers_is_refused():
    for page in {page for page, _ in household_tables.BLOCKS}:
        with pytest.raises(ValueError, match=f"{page}: expected the markers <!-- "):
            data_tables.filled(page, "no tables here", household_tables.BLOCKS)


def compared(name, games, mismatches=0):
    counts = {"games": games, "walks": 5 * games, "steps": 1000 * games, "not_admissible": 7, "wins": 2}
    counts |= {"options": {"seed": 3}, "types": {"a": games // 2, "b": games // 2}, "verbs": {"go": 5, "look": 2}}
    return counts | {"set": name, "named": ["mug", name], "refused": {"odd goal": 1}, "mismatches": mismatches}


def test_sets_are_added_up_by_hand():
    record = {"command": "run", "commit": "abc", "engine": "E", "sets": [compared("x", 4), compared("y", 6)]}
    lines = household_tables.exactness(record)
    assert lines[1] == "2, 3 games of each of the 2 types."
    assert "| x | 3 | 4 | 20 | 4,000 | 7 | 2 | 1 | **0** |" in lines
    assert "| all |  | 10 | 50 | 10,000 | 14 | 4 | 2 | **0** |" in lines
    assert lines[-2:] == [
        "Admissible commands played: go 10, look 4.",
        "Commands named 3 classes of objects and receptacles.",
    ]
    assert tables._alfworld(record)[0].startswith(
        "The native ALFWorld engine is exact on 10 generated games of 2 types:"
    )


def test_the_readme_does_not_call_exact_what_differs():
    record = {"command": "run", "engine": "E", "sets": [compared("x", 4, mismatches=1)]}
    with pytest.raises(ValueError, match="expected no mismatches, got 1"):
        tables._alfworld(record)


def row(case, backend, kind, ms, mib=None):
    return {
        "case": case,
        "backend": backend,
        "pass": kind,
        "ms": ms,
        "peak_mib": mib,
        "device": "D, 2 threads",
        "commit": "c",
    }


def test_speed_ratios_and_memory_by_hand():
    level = "level 1, 11 commands, 2000 worlds, 1 thread"
    rows = [row(level, "native + str" if "str" in name else "native", name.removesuffix(" + str"), ms)
            for ms, name in enumerate(household_tables.PARTS, 1)]  # fmt: skip
    rows += [row("ALFWorld games, per world", backend, "step", ms) for backend, ms in
             (("native", 0.001), ("native + str", 0.002), ("alfworld 1, textworld 2, stock", 50.0))]  # fmt: skip
    rows += [row("level 2, 4 worlds, 9 games", "native + str", "after step 1", 0.5, 7.25)]
    # 1 ms for a call on 2,000 worlds is half a microsecond each.
    assert (
        household_tables.speed(rows)[-2]
        == f"| {level} | 0.50 | 1.00 | 1.50 | 2.00 | 2.50 | 3.00 | 3.50 | 4.00 | 4.50 |"
    )
    ratios = household_tables.ratios(rows)
    assert ratios[0] == "alfworld 1, textworld 2, one core, per world:"
    assert ratios[-1] == "| step, stock engine | 50.0 | 1.00 | 50,000× | 2.00 | 25,000× |"
    assert household_tables.memory(rows)[-1] == "| level 2, 4 worlds, 1 step | 9 | 7.2 | 0.5 |"


def test_engines_and_the_expert_by_hand():
    ms = {name: {"load": 10.0 / d, "reset": 8.0 / d, "step": 4.0 / d, "clone": 2.0 / d, "MiB": d}
          for name, d in (("stock", 1), ("memoised", 2), ("native", 1000))}  # fmt: skip
    ms["native"] |= {"batch reset": 0.01, "batch step": 0.002, "batch clone": 0.0004}
    lines = household_tables.engines({"engine": "E", "games": 8, "steps": 25, "ms": ms})
    assert "| first reset of a game | 10 | 5 (2×) | 0.01 (1,000×) |" in lines
    assert "takes 10 µs a reset, 2 µs a step, 0.4 µs a clone per world" in lines[-1]
    won = {"type": "t", "games": 20, "as it is": {"60": 3, "199": 4}, "told": {"60": 18, "199": 20}}
    lines = household_tables.expert({"command": "run", "engine": "E", "rows": [won]})
    assert lines[-1] == "| t | 3 | 4 | 18 | 20 |"
