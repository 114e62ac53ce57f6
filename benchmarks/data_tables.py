"""Writes the tables of docs/data.md and docs/webshop.md from benchmarks/results/*.json; no figure is typed by hand.

python -m benchmarks.data_tables            # rewrites both pages between their markers
python -m benchmarks.data_tables --check    # exits with 1 where a page differs
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def throughput(rows: list[dict[str, Any]]) -> list[str]:
    """Conversations a second by case and stage."""
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    lines = [
        f"One core of {rows[0]['cpu']}, commit {rows[0]['commit']}: conversations a second.",
        "",
        "| case | replies | characters | " + " | ".join(stages) + " |",
        "|---|---|---|" + "---|" * len(stages),
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["stage"]: row for row in rows if row["case"] == case}
        first = next(iter(own.values()))
        figures = " | ".join(f"{own[stage]['conversations_per_s']:,.0f}" for stage in stages)
        lines.append(f"| {case} | {first['replies']:.1f} | {first['characters']:,.0f} | {figures} |")
    return lines


def speed(rows: list[dict[str, Any]]) -> list[str]:
    """Steps a second by mode, and what a clone takes."""
    steps = [row for row in rows if row["pass"] == "step"]
    lines = [
        f"One core of {rows[0]['cpu']}, {rows[0]['worlds']} worlds, commit {rows[0]['commit']}.",
        "",
        "| mode, player | steps/s | searches | characters a page | saved world, bytes (most) |",
        "|---|---|---|---|---|",
    ]
    for row in steps:
        lines.append(
            f"| {row['case']} | **{row['steps_per_s']:,.0f}** | {100 * row['searches']:.0f} % | "
            f"{row['characters']:,.0f} | {row['saved_bytes']:.0f} ({row['saved_bytes_max']}) |"
        )
    (clone,) = (row for row in rows if row["pass"] == "clone")
    return [*lines, "", f"A clone that took a step of its own takes {clone['bytes']:.0f} bytes of memory."]


def memory(rows: list[dict[str, Any]]) -> list[str]:
    """What processes that play at the same time share."""
    alone, many = rows
    own = (many["pss"] - many["base_pss"] - many["store_pss"]) / many["workers"]
    return [
        f"{many['workers']} processes that play at the same time have the store's files mapped "
        f"{many['store_rss']:.0f} MiB large in all, and share them:",
        f"their proportional share (PSS) is {many['store_pss']:.1f} MiB for all of them together, as it is "
        f"({alone['store_pss']:.1f} MiB) for one alone.",
        f"Everything else that the store and its caches take is {own:.1f} MiB a process.",
    ]


def training(record: dict[str, Any]) -> list[str]:
    """Imitation and PPO by seed, with intervals; sampled play too where it was measured."""
    plays = list(record["mean"])
    lines = [
        f"Mean score, and success (score 1), on the {record['tasks']} test goals; {record['threads']} threads a seed;",
        f"`{record['command']}` at commit {record['commit']}.",
        "",
        "| seed, play | imitation | PPO | score, difference (95 %) | success, points (95 %) | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        seconds = f"{row['sft']['seconds']:.0f} + {row['ppo']['seconds']:.0f}"
        for play in plays:
            figures = row if play == "greedy" else row[play]
            lines.append(f"| {row['seed']}, {play} | {_compared(figures)} | {seconds} |")
    for play in plays:
        mean = {n: f"{r['score']:.3f}, {100 * r['success']:.1f} %" for n, r in record["mean"][play].items()}
        found = [(row if play == "greedy" else row[play])["ppo_minus_sft"] for row in record["rows"]]
        score, points = (_cell(_joined([part[name] for part in found]), name) for name in ("score", "success"))
        lines.append(f"| mean, {play} | {mean['sft']} | {mean['ppo']} | {score} | {points} | |")
    return lines


def _joined(parts: list[dict[str, float]]) -> dict[str, float]:
    """The mean of independent differences, with the interval that their own make: over goals, the seeds being these."""
    mean = sum(part["difference"] for part in parts) / len(parts)
    half = math.sqrt(sum(((part["high"] - part["low"]) / 2) ** 2 for part in parts)) / len(parts)
    return {"difference": mean, "low": mean - half, "high": mean + half}


def _cell(found: dict[str, float], name: str) -> str:
    scale, form = (1, "+.3f") if name == "score" else (100, "+.1f")
    difference, low, high = (format(scale * found[key], form) for key in ("difference", "low", "high"))
    return f"{difference} ({low} to {high})"


def _compared(row: dict[str, Any]) -> str:
    cells = [f"{row[name]['score']:.3f}, {100 * row[name]['success']:.1f} %" for name in ("sft", "ppo")]
    found = row["ppo_minus_sft"]
    return " | ".join([*cells, *(_cell(found[name], name) for name in ("score", "success"))])


Blocks = dict[tuple[str, str], tuple[str, Callable[[Any], list[str]]]]
"""(page, marker) → (file of results, its lines)"""
BLOCKS: Blocks = {
    ("docs/data.md", "throughput"): ("data.json", throughput),
    ("docs/webshop.md", "speed"): ("webshop.json", speed),
    ("docs/webshop.md", "memory"): ("webshop_memory.json", memory),
    ("docs/webshop.md", "training"): ("webshop_training.json", training),
}


def filled(page: str, text: str, blocks: Blocks = BLOCKS) -> str:
    """The page's text with every block between its markers; blocks whose file of results is absent are left out.

    Raises:
        ValueError: a block has no markers there.
    """
    for (place, name), (file, lines) in blocks.items():
        if place != page or not (RESULTS / file).is_file():
            continue
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page}: expected the markers {begin.strip()} and {end}, got none")
        before, _, rest = text.partition(begin)
        made = "\n".join(lines(json.loads((RESULTS / file).read_text())))
        text = f"{before}{begin}{made}\n{end}{rest.partition(end)[2]}"
    return text


def main(argv: Sequence[str] | None = None, blocks: Blocks = BLOCKS, description: str = __doc__) -> None:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a page differs")
    arguments = parser.parse_args(argv)
    for page in dict.fromkeys(page for page, _ in blocks):
        text = (ROOT / page).read_text()
        new = filled(page, text, blocks)
        if arguments.check and new != text:
            sys.exit(f"{page}: a table differs from benchmarks/results: run it again")
        if not arguments.check:
            (ROOT / page).write_text(new)


if __name__ == "__main__":
    main()
