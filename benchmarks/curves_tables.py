"""What policy gradients add to imitation on the household demo, in Markdown, from a record of bench_curves."""

from __future__ import annotations

from typing import Any

from benchmarks.seeds import mean_difference


def section(record: dict[str, Any]) -> list[str]:
    """The picture, a paragraph and the table."""
    runs = {(run["seed"], run["algorithm"]): run for run in record["runs"]}
    seeds = sorted({seed for seed, _ in runs})
    names = [name for name in record["mean_unseen"] if name != "sft"]
    tasks = len(runs[seeds[0], "sft"]["solved"])
    lines = [
        "![Success against environment steps, a line a seed and a thick one for their mean](curves.svg)",
        "",
        f"`{record['command']}` at commit {record['commit']}:",
        f"each run on {record['cores']} of {record['cpus']} CPU cores, all of a seed from the same",
        "imitating policy. The picture shows valid_seen, which every run is measured on as",
        f"it trains; the table per cent of the {tasks} tasks of valid_unseen that are solved after it, greedily, with",
        "the difference to imitation in points (paired 95 % interval; that of the mean is over tasks, these seeds),",
        "and the environment steps that there was time for.",
        "",
        "| seed | imitation | " + " | ".join(names) + " | steps, thousands |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for seed in seeds:
        start = runs[seed, "sft"]
        cells = [_cell([_pair(start, runs[seed, name])], runs[seed, name]["unseen"]) for name in names]
        steps = ", ".join(f"{runs[seed, name]['steps'] / 1000:.0f}" for name in names)
        lines.append(f"| {seed} | {100 * start['unseen']:.1f} | {' | '.join(cells)} | {steps} |")
    means = record["mean_unseen"]
    cells = [_cell([_pair(runs[s, "sft"], runs[s, name]) for s in seeds], means[name]) for name in names]
    return [*lines, f"| mean | {100 * means['sft']:.1f} | {' | '.join(cells)} | |"]


def _pair(start: dict[str, Any], run: dict[str, Any]) -> tuple[int, int, int]:
    """Tasks that only imitation solves, that only the run does, and that neither failed to play."""
    both = [(a, b) for a, b in zip(start["solved"], run["solved"], strict=True) if "-" not in (a, b)]
    return both.count(("1", "0")), both.count(("0", "1")), len(both)


def _cell(pairs: list[tuple[int, int, int]], rate: float) -> str:
    mean, low, high = (100 * x for x in mean_difference(pairs))
    return f"{100 * rate:.1f}, {mean:+.1f} ({low:+.1f} to {high:+.1f})"
