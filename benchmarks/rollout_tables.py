"""Writes the tables of docs/rollout.md from benchmarks/results/rollout.json; none of their figures is typed by hand.

python -m benchmarks.rollout_tables            # rewrites docs/rollout.md between its markers
python -m benchmarks.rollout_tables --check    # exits with 1 where docs/rollout.md differs
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import data_tables

PAGE = "docs/rollout.md"
PARTS = ("decoding_s", "empty_s", "further_s", "prompts_s", "host_s")

Row = dict[str, Any]


def block(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown."""
    collected = [row for row in rows if row["pass"] == "collect"]
    played = [row for row in collected if row["case"] == rows[0]["case"]]
    (slow,) = (row for row in played if row["backend"] == "lockstep")
    usual = [row for row in collected if row["backend"] == "usual"]
    fewer = [row for row in collected if row not in played and row not in usual]
    tables = [_rates(played), _parts(played), _bounds(slow, played, usual)]
    tables += [_slots([*fewer, *played])] if fewer else []
    return [line for table in [*tables, _rest(rows)] for line in [*table, ""]][:-1]


def _rates(played: Sequence[Row]) -> list[str]:
    lines = [
        "| | seconds | tokens/s | episodes an hour | of vLLM alone | engine without a request, % | outside `poll`, % "
        "| µs a turn |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in played:
        share, idle, host = (row.get(name) for name in ("of_vllm_alone", "engine_idle_share", "host_share"))
        hour, turn = row.get("trajectories_per_hour"), row.get("us_per_turn")
        cells = (
            row["backend"],
            f"{row['ms'] / 1e3:.2f}",
            f"{row['tokens_per_s']:,}",
            "" if hour is None else f"{hour:,.0f}",
            "" if share is None else f"{share:.2f}",
            "" if idle is None else f"{100 * idle:.1f}",
            "" if host is None else f"{100 * host:.1f}",
            "" if turn is None else f"{turn:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _parts(played: Sequence[Row]) -> list[str]:
    lines = [
        "| seconds of | steps | tokens, all slots busy | empty slots | further steps | prompts, ends of replies "
        "| outside `poll` |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in played:
        if "decoding_s" in row:
            seconds = " | ".join(f"{row[name]:.1f}" for name in PARTS)
            lines.append(f"| {row['backend']} | {row['steps']:,} | {seconds} |")
    return lines


def _slots(rows: Sequence[Row]) -> list[str]:
    """A line for each number of slots: both loops over the same episodes."""
    lines = [
        "| | episodes an hour | lockstep | over lockstep | bound | share | where time went: tokens, all slots busy "
        "| empty slots | prompts, ends of replies | outside `poll` |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for slow in (row for row in rows if row["backend"] == "lockstep"):
        fast = _fastest(row for row in rows if row["case"] == slow["case"])
        parts = (fast[name] / (fast["ms"] / 1e3) for name in ("decoding_s", "empty_s", "prompts_s", "host_s"))
        shares = " | ".join(f"{100 * part:.0f} %" for part in parts)
        lines.append(
            f"| {slow['case'].removeprefix('household, ')} | {fast['trajectories_per_hour']:,.0f} "
            f"| {slow['trajectories_per_hour']:,.0f} | {slow['gain']:.2f} | {slow['bound']:.2f} "
            f"| {slow['share_of_bound']:.2f} | {shares} |"
        )
    return lines


def _fastest(rows: Iterable[Row]) -> Row:
    return min((row for row in rows if row["backend"].startswith("manus_fast")), key=lambda row: row["ms"])


def _bounds(slow: Row, played: Sequence[Row], usual: Sequence[Row]) -> list[str]:
    fast = _fastest(played)
    # All that lockstep took but for its barriers, and the end of a collection without any.
    left = slow["ms"] / 1e3 - slow["empty_s"] - slow["further_s"] + fast["empty_s"]
    return [
        "| over lockstep | |",
        "|---|---|",
        f"| reached, by the fastest row | {slow['gain']:.2f} |",
        f"| bound with equal steps and slots busy to the end | {slow['bound']:.2f} |",
        f"| with steps as long as lockstep's were | {slow['timed_bound']:.2f} |",
        f"| and slots that stand empty at the end | {slow['ended_bound']:.2f} |",
        f"| and prompts and host that take what they take lockstep | {slow['ms'] / 1e3 / left:.2f} |",
        *(f"| over lockstep as it is usually written, TextWorld's delays | {row['gain']:.1f} |" for row in usual),
    ]


def _rest(rows: Sequence[Row]) -> list[str]:
    named = {(row["backend"], row["pass"]): row for row in rows}
    lines = ["| | |", "|---|---|"]
    load, update = named["manus_fast", "load"], named["manus_fast", "update"]
    lines.append(f"| hand-over of weights | {load['ms']:.1f} ms |")
    lines.append(f"| idle share of an iteration | {100 * update['idle_share_of_iteration']:.1f} % |")
    lines.append(
        f"| \\|Δ log-prob\\|, mean (random weights, {update['entropy']:.1f} nats) | {update['gap_mean']:.3f} |"
    )
    sides = ", ".join(f"{update[name]:.3f}" for name in ("gap_of_sampler", "gap_of_trainer"))
    lines.append(f"| of sampler and trainer, each to the same weights in float32 | {sides} |")
    if "kernel_idle_share" in update:
        lines.append(f"| no kernel runs, of a collection (profiled) | {100 * update['kernel_idle_share']:.0f} % |")
    if ("manus_fast, staleness 1", "iterations") in named:
        row = named["manus_fast, staleness 1", "iterations"]
        lines.append(f"| iterations with `rollout.staleness=1` over 0 | {row['gain']:.2f} |")
    return lines


BLOCKS: data_tables.Blocks = {(PAGE, "rollout"): ("rollout.json", block)}


def written(text: str) -> str:
    """The page with what stands between its markers written anew. Raises ValueError where they are missing."""
    return data_tables.filled(PAGE, text, BLOCKS)


def main(argv: Sequence[str] | None = None) -> None:
    data_tables.main(argv, BLOCKS, __doc__)
    sys.exit(0)


if __name__ == "__main__":
    main()
