"""What DPO and a reward model's choice of n add to imitation, in Markdown, from a record of bench_preferences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.seeds import mean_difference


def section(record: dict[str, Any]) -> list[str]:
    """A paragraph and the table."""
    arguments, rows = record["arguments"], record["rows"]
    rounds, judged = arguments.get("rounds", 0), "best_of_n" in rows[0]["against_start"]
    learners = "DPO and a reward model learn" if judged else "DPO learns"
    judges = (
        f" Of {arguments['n']} sampled episodes one is chosen by the reward model,\n"
        "by its length, or by whether it succeeded."
        if judged
        else ""
    )
    when = f", in {rounds} rounds of which each plays anew" if rounds > 1 else ""
    return [
        f"{learners} from pairs of the demo's policy's own episodes{when} (`{record['command']}` at commit "
        f"{record['commit']}).",
        f"Per cent of {arguments['panel']} tasks of valid_unseen solved, and the difference to imitation played",
        "greedily in points (paired 95 % interval; that of the mean is over tasks, for these seeds)." + judges,
        record["note"],
        "",
        *table(record),
        "",
    ]


def table(record: dict[str, Any]) -> list[str]:
    """A row a seed and their mean; columns of what the record holds."""
    rows, n = record["rows"], record["arguments"]["n"]
    names = {"one_sample": "one sample", "best_of_n": f"reward model's of {n}", "shortest": f"shortest of {n}"}
    names |= {"oracle": f"best of {n}"}
    rounds = sorted(name for name in rows[0]["against_start"] if name.startswith("round"))
    names |= {name: f"DPO, {name.removeprefix('round')} round{'s' if name != 'round1' else ''}" for name in rounds}
    if len(rounds) == 1:
        names["round1"] = "DPO"
    if not rounds:
        names = {"dpo": "DPO", **names}
    shown = {name: title for name, title in names.items() if name in rows[0]["against_start"]}
    lines = [
        "| seed | imitation | " + " | ".join(shown.values()) + " |",
        "|---|---|" + "---|" * len(shown),
    ]
    for row in rows:
        cells = [against(row, name) for name in shown]
        lines.append(f"| {row['seed']} | {100 * row['success']['start']:.1f} | " + " | ".join(cells) + " |")
    return [*lines, "| mean | | " + " | ".join(mean_against(rows, name) for name in shown) + " |"]


def against(row: dict[str, Any], name: str) -> str:
    """A cell: the rate, its difference to the start, and that one's interval."""
    found = row["against_start"][name]
    low, high = 100 * found["low"], 100 * found["high"]
    return f"{100 * row['success'][name]:.1f}, {100 * found['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def mean_against(rows: Sequence[dict[str, Any]], name: str) -> str:
    """A cell: the mean over seeds of the difference to the start, and its interval (`seeds.mean_difference`)."""
    found = [row["against_start"][name] for row in rows]
    mean, low, high = mean_difference([(pair["only_a"], pair["only_b"], pair["tasks"]) for pair in found])
    return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
