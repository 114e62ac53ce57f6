"""Writes the tables of docs/search.md from benchmarks/results/*.json; none of their figures is typed by hand.

python -m benchmarks.search_tables            # rewrites docs/search.md between its markers
python -m benchmarks.search_tables --check    # exits with 1 where docs/search.md differs
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import data_tables

PAGE = "docs/search.md"


def _panel(record: dict[str, Any]) -> list[str]:
    rows = [row for row in record["rows"] if row["name"] == "greedy" or row["search"]["temperature"] == 1.0]
    budgets = list(rows[0]["success"])
    lines = ["| | " + " | ".join(f"{int(b):,} tokens" for b in budgets) + " |", "|---|" + "---|" * len(budgets)]
    for row in rows:
        figures = " | ".join(f"{100 * row['success'][b]:.1f}" for b in budgets)
        lines.append(f"| {row['name']} | {figures} |")
    return lines


def _prefixes(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| | rows | their tokens | computed | operations, ratio | time, ratio | gradient differs by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["backend"] == "row by row":
            continue
        name, count, tokens = re.fullmatch(r"(\w+): (\d+) rows, (\d+) tokens.*", row["case"]).groups()
        lines.append(
            f"| {name} | {count} | {int(tokens):,} | {row['tokens']:,} | **{row['ratio']:.2f}** | "
            f"{row['speedup']:.2f} | {row['error']:.0e} |"
        )
    return lines


def _expert(record: dict[str, Any]) -> list[str]:
    lines = [
        "| seed | round | solved by search | rows imitated | before | after | difference, points (95 %) | McNemar p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        found = row["comparison"]
        points, low, high = (f"{100 * found[name]:+.1f}" for name in ("difference", "low", "high"))
        lines.append(
            f"| {row['seed']} | {row['number']} | {row['solved']:,} of {row['tasks']:,} | {row['rows']:,} | "
            f"{100 * row['before']:.1f} | {100 * row['after']:.1f} | {points} ({low} to {high}) | "
            f"{found['p_value']:.1g} |"
        )
    return lines


def _speed(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| | | simulations/s | against one thread |", "|---|---|---|---|"]
    for row in rows:
        if row["case"].startswith("cost of"):
            continue
        faster = f"{row['speedup']:.2f}×" if row["backend"].endswith("2 threads") else ""
        case = row["case"].removesuffix(", 200 sims").replace(" x ", " × ")
        lines.append(f"| {case} | {row['backend']} | {row['simulations_per_s'] / 1e3:,.0f}k | {faster} |")
    return lines


BLOCKS: data_tables.Blocks = {
    (PAGE, "panel"): ("search_panel.json", _panel),
    (PAGE, "prefixes"): ("prefixes.json", _prefixes),
    (PAGE, "expert"): ("expert_iteration.json", _expert),
    (PAGE, "speed"): ("search_cpu.json", _speed),
}


def written(text: str) -> str:
    """The page with what stands between its markers written anew. Raises ValueError where they are missing."""
    return data_tables.filled(PAGE, text, BLOCKS)


def main(argv: Sequence[str] | None = None) -> None:
    data_tables.main(argv, BLOCKS, __doc__)
    sys.exit(0)


if __name__ == "__main__":
    main()
