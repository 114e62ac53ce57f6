"""Writes the tables of docs/search.md from benchmarks/results/*.json; none of their figures is typed by hand.

python -m benchmarks.search_tables            # rewrites docs/search.md between its markers
python -m benchmarks.search_tables --check    # exits with 1 where docs/search.md differs
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "search.md"


def blocks() -> dict[str, list[str]]:
    """Lines of Markdown by the name of their markers; files that are absent are left out."""
    makers = {"panel": _panel, "prefixes": _prefixes, "expert": _expert, "speed": _speed}
    files = {
        "panel": "search_panel.json",
        "prefixes": "prefixes.json",
        "expert": "expert_iteration.json",
        "speed": "search_cpu.json",
    }
    there = {name: RESULTS / file for name, file in files.items() if (RESULTS / file).is_file()}
    return {name: makers[name](json.loads(file.read_text())) for name, file in there.items()}


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


def written(text: str) -> str:
    """The page with every block between its markers.

    Raises:
        ValueError: a block has no markers there.
    """
    for name, lines in blocks().items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin not in text or end not in text:
            raise ValueError(f"docs/search.md: expected the markers {begin.strip()} and {end}, got none")
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where the page differs")
    arguments = parser.parse_args(argv)
    text = PAGE.read_text()
    new = written(text)
    if arguments.check:
        sys.exit(0 if new == text else "docs/search.md: a table differs from benchmarks/results: run it again")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
