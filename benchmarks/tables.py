"""Writes the README's results section, docs/results.md, the learning curves' table of docs/algorithms.md and the tables
of docs/kernels.md from benchmarks/results/*.json; nothing in them is typed by hand.

python -m benchmarks.tables            # rewrites docs/results.md, and what stands between markers in the other three
python -m benchmarks.tables --check    # exits with 1 where one of them differs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import alfworld_tables, curves_tables, household_tables, kernels_tables, preferences_tables
from benchmarks.data_tables import training

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RESULTS_MARKS = ("<!-- results:begin -->", "<!-- results:end -->")
CURVES_MARKS = ("<!-- curves:begin -->", "<!-- curves:end -->")


def section() -> str:
    """The results section in Markdown; files that are absent are left out."""
    parts = ["## Results", ""]
    for record in _records("h200.json"):
        parts += _ops(record)
    if trained := _records("alfworld_training*.json"):
        parts += alfworld_tables.learned(trained)
    for name, write in (
        ("demo", _demo),
        ("update", _update),
        ("webshop_training", _webshop),
        ("preferences", preferences_tables.section),
        ("preferences_rounds", preferences_tables.section),
        ("search_panel", _search),
        ("alfworld_diff", _alfworld),
    ):
        for record in _records(f"{name}.json"):
            parts += write(record)
    return "\n".join(parts).rstrip() + "\n"


def page() -> str:
    """docs/results.md: the README's section, and what has no room there."""
    parts = [
        section().replace("## Results", "# Results", 1).rstrip(),
        "",
        "This page is written by `python -m benchmarks.tables` from `benchmarks/results/`.",
        "",
    ]
    if trained := _records("alfworld_training*.json"):
        parts += ["## A language model learns ALFWorld", ""]
        parts += [*alfworld_tables.types(trained), *alfworld_tables.rates(trained), *alfworld_tables.curves(trained)]
    for record in _records("alfworld_first.json"):
        parts += ["An earlier run, whose records led to the settings of the one above (`docs/alfworld.md`):", ""]
        parts += alfworld_tables.panels([record])
    for rows in _records("alfworld_replay.json"):
        parts += [*alfworld_tables.replayed(rows), *alfworld_tables.losses(rows)]
    for rows in _records("alfworld_live.json"):
        parts += alfworld_tables.lived(rows)
    if compared := _records("alfworld_compare*.json"):
        parts += ["## Side by side: the same windows of time from one SFT policy", ""]
        peers = _records("alfworld_trl.json")
        parts += alfworld_tables.rates([*compared, *peers])
        for record in compared:
            parts += alfworld_tables.windows(record, peers)
        for record in _records("alfworld.json"):
            parts += alfworld_tables.engines(record)
    return "\n".join(parts).rstrip() + "\n"


def _records(pattern: str) -> list[dict[str, Any]]:
    """Result files by a pattern, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def _webshop(record: dict[str, Any]) -> list[str]:
    """Imitation and PPO in the generated WebShop."""
    return [
        "A small policy in the generated WebShop imitates an expert, then learns by PPO (`docs/webshop.md`).",
        *training(record),
        "",
    ]


def _search(record: dict[str, Any]) -> list[str]:
    rows = record["rows"]
    budgets = list(rows[0]["solved"])
    lines = [
        f"Search with an SFT policy of the demo (600 demonstrations): per cent of {rows[0]['tasks']} tasks of "
        f"{record['split']} solved",
        f"within a number of generated tokens a task (`{record['command']}`). `docs/search.md` says what each",
        "strategy does.",
        "",
        "| strategy | temperature | " + " | ".join(budgets) + " | tokens used | turns played |",
        "|---|---|" + "---|" * (len(budgets) + 2),
    ]
    for row in rows:
        figures = " | ".join(f"{100 * row['success'][budget]:.1f}" for budget in budgets)
        temperature = "–" if row["name"] == "greedy" else f"{row['search']['temperature']:g}"
        lines.append(
            f"| {row['name']} | {temperature} | {figures} | {row['mean_tokens']:.0f} | {row['mean_steps']:.1f} |"
        )
    return [*lines, ""]


def _alfworld(record: dict[str, Any]) -> list[str]:
    total = household_tables.totals(record)
    kinds = len({name for s in record["sets"] for name in s["types"]})
    if total["mismatches"]:
        raise ValueError(f"alfworld_diff.json: expected no mismatches, got {total['mismatches']}")
    return [
        f"The native ALFWorld engine is exact on {total['games']:,} generated games of {kinds} types:",
        f"{total['steps']:,} steps beside {record['engine']}, compared string by string (`{record['command']}`;",
        "`docs/household.md` has the walks, and the speed beside TextWorld).",
        "",
    ]


def _ops(rows: list[dict[str, Any]]) -> list[str]:
    """One line a case: ours, and the fastest of the others in the same run."""
    device, torch = rows[0]["device"], rows[0]["torch"]
    lines = [
        f"Ops on one {device}, torch {torch}: milliseconds (median, L2 flushed), beside the fastest peer that was",
        "measured in the same run. `docs/kernels.md` has designs, memory, targets and what falls short of them, and",
        "`manus-fast bench OP` measures. Liger's SM90 kernel was not among the peers of linear_logprob.",
        "",
        "| op | case | pass | ours | | fastest peer | | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    apart = False
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["case"], row["pass"]), []).append(row)
    for (op, case, kind), members in groups.items():
        ours = [row for row in members if row["backend"].startswith("manus_fast") and "packed" not in row["backend"]]
        peers = [row for row in members if not row["backend"].startswith("manus_fast")]
        ours = [row for row in ours if "turn level" not in row["backend"]]
        if kind == "fwd":  # without gradients nothing is kept: the mode has no forward time of its own there
            ours = [row for row in ours if not row["backend"].endswith("keep")]
        if not ours or not peers:
            continue
        best, peer = (min(side, key=lambda row: row["ms"]) for side in (ours, peers))
        name = best["backend"].removeprefix("manus_fast ")
        other = "" if best["commit"] == peer["commit"] else " †"
        apart = apart or bool(other)
        lines.append(
            f"| {op} | {case} | {kind} | **{best['ms']:.3g}** | {name} | {peer['ms']:.4g} | {peer['backend']}{other} "
            f"| {peer['ms'] / best['ms']:.1f}× |"
        )
    note = ["", "† The peer from an earlier run on another day, on the same kind of GPU."] if apart else []
    return [*lines, *note, ""]


def _demo(record: dict[str, Any]) -> list[str]:
    first = record["rows"][0]
    tasks, types = first["tasks"], len(first["ppo_against_sft"]["per_type"])
    jobs, cpus = record["jobs"], record["cpus"]
    where = f"{jobs} runs side by side on {cpus} CPU cores" if jobs > 1 else f"a run at a time on {cpus} CPU cores"
    lines = [
        f"The demo, {where}: success in per cent on the",
        f"{tasks} tasks of valid_unseen, {types} task types (`{record['command']}` at commit {record['commit']},",
        "with that commit's settings).",
        "",
        "| seed | SFT | PPO | SFT continued for PPO's time | PPO - SFT | PPO - control |",
        "|---|---|---|---|---|---|",
    ]
    for row in [*record["rows"], {"seed": "mean", **record["mean"]}]:
        numbers = (row[name] for name in ("sft", "ppo", "control", "ppo_minus_sft", "ppo_minus_control"))
        lines.append(f"| {row['seed']} | " + " | ".join(f"{100 * number:.1f}" for number in numbers) + " |")
    return [*lines, ""]


def _update(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "One update (old log-probs, forward, backward, AdamW) of a 1.5B Qwen2 with random weights on one",
        f"{rows[0]['device']} (`python -m benchmarks.bench_update`); MFU against the chip's nominal bf16 peak.",
        "",
        "| rows | trainer | ms | tokens/s | MFU, per cent | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["pass"] == "update":
            lines.append(
                f"| {row['case']} | {row['backend']} | {row['ms']:,.0f} | {row['tokens_per_s']:,} | {row['mfu']:.1f} "
                f"| {row['peak_mib'] / 1024:.1f} |"
            )
    return [*lines, ""]


def _between(text: str, marks: tuple[str, str], new: str) -> str:
    """`text` with what stands between the marks replaced."""
    begin, end = marks
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{new}{end}{rest.partition(end)[2]}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a file differs")
    arguments = parser.parse_args(argv)
    readme, algorithms, kernels = ROOT / "README.md", ROOT / "docs" / "algorithms.md", ROOT / "docs" / "kernels.md"
    curves = [line for record in _records("curves.json") for line in curves_tables.section(record)]
    curves = curves or ["No run of it is recorded in `benchmarks/results` yet."]
    new = {
        readme: _between(readme.read_text(), RESULTS_MARKS, section()),
        ROOT / "docs" / "results.md": page(),
        algorithms: _between(algorithms.read_text(), CURVES_MARKS, "\n".join(curves) + "\n"),
        kernels: kernels_tables.fill(kernels.read_text()),
    }
    for path, text in new.items():
        if not arguments.check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)}: its figures differ from benchmarks/results: run it again")
    if arguments.check:
        sys.exit(0)


if __name__ == "__main__":
    main()
