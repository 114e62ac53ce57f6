"""Draws benchmarks/results/search_panel.json: success against generated tokens, a line a strategy.

python -m benchmarks.search_plot docs/search_panel.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "search_panel.json"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 420, 60, 190, 20, 50
_COLOURS = (
    "#111827", "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#6b7280",
)  # fmt: skip


def plot(record: dict[str, Any], temperature: float = 1.0) -> str:
    """The SVG's text. Rows of other temperatures are left out."""
    rows = [row for row in record["rows"] if row["name"] == "greedy" or row["search"]["temperature"] == temperature]
    budgets = [int(budget) for budget in rows[0]["solved"]]
    low, high = math.log(budgets[0]), math.log(budgets[-1])
    top = 10 * math.ceil(10 * max(max(row["success"].values()) for row in rows))

    def x(budget: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log(budget) - low) / (high - low)

    def y(per_cent: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * per_cent / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for mark in range(0, top + 1, 10):
        parts.append(f'<path d="M{_LEFT} {y(mark):.1f} H{_WIDTH - _RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark} %</text>')
    for budget in budgets:
        parts.append(f'<text x="{x(budget):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{budget}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">generated tokens a task</text>')
    ends = sorted(range(len(rows)), key=lambda i: -rows[i]["success"][str(budgets[-1])])
    for place, index in enumerate(ends):
        row, colour = rows[index], _COLOURS[index % len(_COLOURS)]
        points = " ".join(f"{x(b):.1f},{y(100 * row['success'][str(b)]):.1f}" for b in budgets)
        dash = ' stroke-dasharray="5 3"' if index >= len(_COLOURS) else ""
        label = f"{row['name']} {100 * row['success'][str(budgets[-1])]:.1f}"
        level = _TOP + 14 + 20 * place
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 12} {level - 4} h18" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 36}" y="{level}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="the SVG file to write")
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    Path(arguments.out).write_text(plot(json.loads(RESULTS.read_text()), arguments.temperature))


if __name__ == "__main__":
    main()
