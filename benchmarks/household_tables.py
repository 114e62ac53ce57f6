"""Writes the tables of docs/household.md and docs/alfworld.md from benchmarks/results; no figure is typed by hand.

python -m benchmarks.household_tables            # rewrites both pages between their markers
python -m benchmarks.household_tables --check    # exits with 1 where a page differs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import data_tables

PARTS = ("reset", "reset + str", "step", "step + str", "expert explorer", "expert planner", "clone", "save", "restore")
TARGETS = {"step": 5, "reset": 100, "clone": 1}
"""µs per world, one thread, without the strings for Python."""


def totals(record: dict[str, Any]) -> dict[str, int]:
    """Games, steps, walks, … of all sets together."""
    names = ("games", "walks", "steps", "not_admissible", "wins", "mismatches")
    total = {name: sum(s[name] for s in record["sets"]) for name in names}
    return total | {"refused": sum(sum(s["refused"].values()) for s in record["sets"])}


def exactness(record: dict[str, Any]) -> list[str]:
    """What both engines were compared on, set by set, and how often each command was played."""
    sets = [s | {"seed": s["options"]["seed"], "refused": sum(s["refused"].values())} for s in record["sets"]]
    types = sorted({count for s in sets for count in s["types"].values()})
    lines = [
        f"`{record['command']}` at commit {record['commit']} ({record['engine']});",
        f"{', '.join(map(str, types))} games of each of the {len(sets[0]['types'])} types.",
        "",
        "| games | seed | games | walks | steps | of these not admissible | won | refused | mismatches |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for s in [*sets, {"set": "all", "seed": "", **totals(record)}]:
        lines.append(
            f"| {s['set']} | {s['seed']} | {s['games']} | {s['walks']:,} | {s['steps']:,} "
            f"| {s['not_admissible']:,} | {s['wins']:,} | {s['refused']} | **{s['mismatches']}** |"
        )
    verbs: Counter[str] = Counter()
    for s in sets:
        verbs.update(s["verbs"])
    played = ", ".join(f"{verb} {count:,}" for verb, count in verbs.most_common())
    named = set().union(*(s["named"] for s in sets))
    lines += ["", f"Admissible commands played: {played}."]
    return [*lines, f"Commands named {len(named)} classes of objects and receptacles."]


def _cases(rows: list[dict[str, Any]], start: str) -> dict[str, dict[str, dict[str, Any]]]:
    """case → part → row, of the cases that begin so."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["case"].startswith(start):
            name = f"{row['pass']} + str" if row["backend"] == "native + str" else row["pass"]
            cases.setdefault(row["case"], {})[name if row["backend"].startswith("native") else row["backend"]] = row
    return cases


def speed(rows: list[dict[str, Any]]) -> list[str]:
    """µs per world by level and number of threads."""
    cases = {case: parts for case, parts in _cases(rows, "level").items() if "thread" in case}
    first = next(iter(cases.values()))["step"]
    lines = [
        f"{first['device'].rsplit(',', 1)[0]}, commit {first['commit']}; µs per world, all worlds in one call:",
        "",
        "| | " + " | ".join(PARTS) + " |",
        "|---|" + "---|" * len(PARTS),
    ]
    for case, parts in cases.items():
        worlds = int(case.split(" worlds")[0].rsplit(" ", 1)[1])
        lines.append(f"| {case} | " + " | ".join(f"{parts[name]['ms'] * 1e3 / worlds:.2f}" for name in PARTS) + " |")
    target = ["" if name not in TARGETS else f"≤ {TARGETS[name]}" for name in PARTS]
    return [*lines, f"| target, one thread | {' | '.join(target)} |"]


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """TextWorld and the native engine on the same games in the same run."""
    games = [row for row in rows if row["case"].startswith("ALFWorld games")]
    ours = {(row["pass"], row["backend"]): row["ms"] for row in games if row["backend"].startswith("native")}
    theirs = [row for row in games if not row["backend"].startswith("native")]
    lines = [
        "| | " + " | ".join(("TextWorld, ms", "native, µs", "ratio", "with strings, µs", "ratio")) + " |",
        "|---|---|---|---|---|---|",
    ]
    for row in theirs:
        plain, text = ours[row["pass"], "native"], ours.get((row["pass"], "native + str"))
        cells = [f"{plain * 1e3:.2f}", f"{row['ms'] / plain:,.0f}×"]
        cells += ["", ""] if text is None else [f"{text * 1e3:.2f}", f"{row['ms'] / text:,.0f}×"]
        name = row["backend"].rsplit(", ", 1)[1]
        lines.append(f"| {row['pass']}, {name} engine | {row['ms']:,.1f} | {' | '.join(cells)} |")
    version = theirs[0]["backend"].rsplit(", ", 1)[0]
    return [f"{version}, one core, per world:", "", *lines]


def memory(rows: list[dict[str, Any]]) -> list[str]:
    """What the process holds while all worlds are played on."""
    lines = ["| played | games so far | resident, MiB | ms a step of all worlds |", "|---|---|---|---|"]
    for case, parts in _cases(rows, "level").items():
        for row in parts.values():
            if row["pass"].startswith("after step"):
                level, worlds, games = case.split(", ")
                number = row["pass"].removeprefix("after step ")
                played = f"{level}, {worlds}, {int(number):,} step" + "s" * (number != "1")
                lines.append(f"| {played} | {int(games.split()[0]):,} | {row['peak_mib']:.1f} | {row['ms']:.1f} |")
    return lines


def engines(record: dict[str, Any]) -> list[str]:
    """One world of each engine, ms; what its memory grows by; and the native one in batches."""
    stock, memoised, native = (record["ms"][name] for name in ("stock", "memoised", "native"))
    lines = [
        f"`python -m benchmarks.bench_alfworld` ({record['engine']}; {record['games']} generated games, "
        f"{record['steps']} steps each, one core), medians in ms:",
        "",
        "| | TextWorld | memoised | native |",
        "|---|---|---|---|",
    ]
    names = {"load": "first reset of a game", "reset": "further resets", "step": "step", "clone": "clone"}
    for key, name in names.items():
        cells = [f"{side[key]:.3g} ({stock[key] / side[key]:,.0f}×)" for side in (memoised, native)]
        lines.append(f"| {name} | {stock[key]:,.0f} | {' | '.join(cells)} |")
    cells = " | ".join(f"{side['MiB']:.2f}" for side in (stock, memoised, native))
    lines.append(f"| memory left behind by 40 more loads, MiB | {cells} |")
    batch = ", ".join(f"{native[f'batch {name}'] * 1e3:.2g} µs a {name}" for name in ("reset", "step", "clone"))
    return [*lines, "", f"In batches of 256 with all strings in Python, the native engine takes {batch} per world."]


def expert(record: dict[str, Any]) -> list[str]:
    """Games that the package's expert wins, by type."""
    rows = record["rows"]
    limits = list(rows[0]["as it is"])
    cells = [f"{name}, within {n}" for name in ("as it is", "told") for n in limits]
    lines = [
        f"`{record['command']}` ({record['engine']}), games won of {rows[0]['games']} a type, by commands:",
        "",
        "| | " + " | ".join(cells) + " |",
        "|---|" + "---|" * len(cells),
    ]
    for row in rows:
        won = [str(row[name][n]) for name in ("as it is", "told") for n in limits]
        lines.append(f"| {row['type']} | {' | '.join(won)} |")
    return lines


BLOCKS: data_tables.Blocks = {
    ("docs/household.md", "exactness"): ("alfworld_diff.json", exactness),
    ("docs/household.md", "speed"): ("household.json", speed),
    ("docs/household.md", "ratios"): ("household.json", ratios),
    ("docs/household.md", "memory"): ("household.json", memory),
    ("docs/alfworld.md", "engines"): ("alfworld.json", engines),
    ("docs/alfworld.md", "expert"): ("alfworld_expert.json", expert),
}


def main(argv: Sequence[str] | None = None) -> None:
    data_tables.main(argv, BLOCKS, __doc__)


if __name__ == "__main__":
    main()
