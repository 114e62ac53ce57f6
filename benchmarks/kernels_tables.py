"""The tables of docs/kernels.md, each from rows of benchmarks/results: h200.json, cpu.json, and the designs tried."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MARKS = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)

# What the project set itself to reach on an H200, ms; the limit where no figure was set is the memory or the products.
GAE_TARGETS = {"[1024, 4096]": 0.030, "[65536, 512]": 0.175, "[64, 8192]": 0.015}
PPO_TARGETS = {"4M tokens": 0.070, "16M tokens": 0.235}
LOGPROB_TARGETS = {"fwd": 0.65, "fwd+bwd": 1.95}
LINEAR_TARGETS = {
    ("H1536", "recompute"): (5.9, 23.5, 800), ("H1536", "keep"): (6.2, 17.8, 2950),
    ("H3584", "recompute"): (13.6, 54, 1400), ("H3584", "keep"): (14.0, 42, 3600),
}  # fmt: skip

Row = dict[str, Any]


def fill(text: str) -> str:
    """The page with every marked table written again. KeyError for a mark without a table."""
    return MARKS.sub(lambda match: match[1] + "\n".join(TABLES[match["name"]]()) + "\n" + match[3], text)


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _markdown(columns: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _figure(ms: float | None, digits: int = 3) -> str:
    """Three significant digits, plain; – where nothing was measured."""
    if ms is None:
        return "–"
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.{digits}g}".rstrip(".")


def _times(rows: list[Row], key: str = "case") -> dict[tuple[str, str, str], Row]:
    return {(row[key], row["backend"], row["pass"]): row for row in rows}


def _of(op: str, file: str = "h200.json") -> list[Row]:
    return [row for row in _load(file) if row["op"] == op]


def _ordered(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _beside(op: str, names: dict[str, str], targets: dict[str, float] | None, kind: str) -> list[str]:
    """A line a case: milliseconds by backend, ours in bold; with targets also the share of the limit it reaches."""
    rows = _of(op)
    found = _times(rows)
    ours = next(name for name, heading in names.items() if heading.startswith("**"))
    lines = []
    for case in _ordered(row["case"] for row in rows):
        cells = [_figure(found.get((case, name, kind), {}).get("ms")) for name in names]
        cells = [f"**{c}**" if name == ours else c for c, name in zip(cells, names, strict=True)]
        if targets is not None:
            cells += [f"{found[case, ours, kind]['pct_of_limit']:.0f} %", _figure(targets.get(case))]
        lines.append([case, *cells])
    return _markdown([op, *names.values(), *(["of a copy", "target"] if targets is not None else [])], lines)


def gae_results() -> list[str]:
    names = {
        "python loop": "Python loop", "compile + associative_scan": "compile + associative_scan",
        "manus_fast triton": "Triton", "manus_fast cuda": "**ours**", "manus_fast cuda packed": "packed",
        "manus_fast cuda turn level": "turn level",
    }  # fmt: skip
    return _beside("gae", names, GAE_TARGETS, "fwd")


def ppo_results() -> list[str]:
    names = {
        "torch eager": "eager", "torch eager, graph": "eager, graph", "torch.compile": "compile",
        "torch.compile, graph": "compile, graph", "manus_fast triton, graph": "Triton, graph",
        "manus_fast cuda": "ours", "manus_fast cuda, graph": "**ours, graph**",
    }  # fmt: skip
    return _beside("ppo_loss", names, PPO_TARGETS, "fwd+bwd")


def group_results() -> list[str]:
    return _beside(
        "group_advantages", {"python loop": "loop over groups", "manus_fast triton": "**ours**"}, None, "fwd"
    )


def _designs(op: str, columns: list[tuple[str, str | None, str]]) -> list[str]:
    """Designs by cases (case, pass, heading): the median round, and the code that ran (see `provenance` in the record).

    The first row is what the others were compared with.
    """
    rows = [row for row in _load("designs.json")["rows"] if row["op"] == op]
    found = {(row["design"], row["case"], row.get("pass")): row for row in rows}
    wanted = [(case, kind) for case, kind, _ in columns]
    designs = _ordered(row["design"] for row in rows if (row["case"], row.get("pass")) in wanted)
    best = {
        place: min(found[(design, *place)]["median_ms"] for design in designs if (design, *place) in found)
        for place in wanted
    }

    def cell(design, place):
        row = found.get((design, *place))
        if row is None:
            return "–"
        figure = _figure(row["median_ms"])
        return f"**{figure}**" if row["median_ms"] == best[place] else figure

    commits = {row["design"]: row["commit"] or "–" for row in rows}
    return _markdown(
        ["design", *(heading for *_, heading in columns), "commit"],
        [[design, *(cell(design, place) for place in wanted), commits[design]] for design in designs],
    )


def _shapes(layout: str) -> list[str]:
    cases = ("[1024, 4096]", "[65536, 512]", "[64, 8192]", "[64, 131072]")
    return _designs("gae", [(f"{case} {layout}", None, case) for case in cases])


def ppo_designs() -> list[str]:
    kinds = (("fwd", "forward"), ("fwd+bwd", "with autograd"))
    return _designs("ppo_loss", [(f"{n}M tokens", kind, f"{n}M {name}") for n in (4, 16) for kind, name in kinds])


def linear_designs() -> list[str]:
    """Every round, for the chip's temperature moves them more than the designs do."""
    rows = [row for row in _load("designs.json")["rows"] if row["op"] == "linear_logprob"]
    cases = ("H 1536", "H 3584")
    found = {(row["design"], row["case"]): row for row in rows if row["case"] in cases}

    def rounds(design, case):
        row = found.get((design, case))
        return "–" if row is None else " ".join(_figure(ms, 4) for ms in row["ms"])

    def memory(design):
        peak = found[design, cases[0]]["peak_mib"]
        return "–" if peak is None else f"{peak:,.0f}"

    designs = _ordered(design for design, _ in found)
    return _markdown(
        ["design", *cases, "extra MiB at H 1536", "commit"],
        [
            [
                design,
                *(rounds(design, case) for case in cases),
                memory(design),
                found[design, cases[0]]["commit"] or "–",
            ]
            for design in designs
        ],
    )


def linear_pieces() -> list[str]:
    rows = [row for row in _load("designs.json")["rows"] if row["case"] == "H 1536, pieces"]
    return _markdown(
        ["piece", "ms", "commit"],
        [[row["design"], " ".join(_figure(ms) for ms in row["ms"]), row["commit"] or "–"] for row in rows],
    )


def _early(op: str) -> list[str]:
    table = _load("designs_early.json")["tables"][op]
    return _markdown([name or "design" for name in table["columns"]], table["rows"])


def logprob_results() -> list[str]:
    found, lines = _times(_of("logprob")), []
    for what in ("log-prob + entropy", "log-prob"):
        for case in (f"[8192, 151936] bfloat16 {what}", f"[32768, 151936] bfloat16 {what}"):
            for name, backend in (
                ("eager", "torch eager"),
                ("compile", "torch.compile"),
                ("**ours**", "manus_fast triton"),
                ("**ours**, gradient in place", "manus_fast triton in place"),
            ):
                forward, both = (found.get((case, backend, kind)) for kind in ("fwd", "fwd+bwd"))
                if both is not None:
                    share = f"{both['pct_of_limit']:.0f} %"
                    times = [_figure(row and row["ms"]) for row in (forward, both)]
                    lines.append([case.replace(" bfloat16", ""), name, *times, share, f"{both['peak_mib']:,.0f}"])
    lines.append(["[8192, 151936] log-prob + entropy", "target", *map(_figure, LOGPROB_TARGETS.values()), "", ""])
    return _markdown(["case", "", "forward", "forward + backward", "of a copy", "extra MiB"], lines)


def linear_results() -> list[str]:
    rows = _of("linear_logprob")
    found = _times(rows)
    cases = {case.split()[1]: case for case in _ordered(row["case"] for row in rows)}
    lines = []
    for backend in _ordered(row["backend"] for row in rows):
        cells = []
        for case in cases.values():
            forward, both = found[case, backend, "fwd"], found[case, backend, "fwd+bwd"]
            kept = backend.endswith("keep")  # the forward is timed without gradients, where nothing is kept
            cells += ["–" if kept else _figure(forward["ms"], 4), _figure(both["ms"], 4), f"{both['peak_mib']:,.0f}"]
        first = next(iter(cases.values()))
        errors = " / ".join(f"{found[first, backend, kind]['error']:.1e}" for kind in ("fwd", "fwd+bwd"))
        name = backend.removeprefix("manus_fast ")
        lines.append([name if name == backend else f"**{name}**", *cells, errors])
    for mode in ("recompute", "keep"):
        cells = [cell for width in cases for cell in map("{:,g}".format, LINEAR_TARGETS[width, mode])]
        lines.append([f"target, {mode}", *cells, ""])
    headings = [f"{width} {what}" for width in cases for what in ("fwd", "fwd+bwd", "MiB")]
    return _markdown(["", *headings, "error"], lines)


def cpu_results() -> list[str]:
    rows = _load("cpu.json")
    lines = []
    for op, case, kind in dict.fromkeys((row["op"], row["case"], row["pass"]) for row in rows):
        members = [r for r in rows if (r["op"], r["case"], r["pass"]) == (op, case, kind)]
        ours = {r["backend"].removeprefix("manus_fast cpu").strip(): r["ms"] for r in members if "cpu" in r["backend"]}
        peers = [r for r in members if not r["backend"].startswith("manus_fast")]
        if "" not in ours or not peers:
            continue
        peer = min(peers, key=lambda r: r["ms"])
        extra = ", ".join(f"{name} {_figure(ms)}" for name, ms in ours.items() if name)
        ratio = f"{peer['ms'] / ours['']:.3g}×"
        line = [op, case, kind, f"**{_figure(ours[''])}**", extra, f"{peer['backend']} {_figure(peer['ms'])}", ratio]
        lines.append(line)
    return _markdown(["op", "case", "pass", "ours, ms", "", "fastest peer", "ratio"], lines)


TABLES: dict[str, Callable[[], list[str]]] = {
    "gae": gae_results,
    "gae-designs": lambda: _shapes("padded"),
    "gae-packed-designs": lambda: _shapes("packed"),
    "gae-early": lambda: _early("gae"),
    "ppo_loss": ppo_results,
    "ppo_loss-designs": ppo_designs,
    "ppo_loss-early": lambda: _early("ppo_loss"),
    "group_advantages": group_results,
    "logprob": logprob_results,
    "logprob-early": lambda: _early("logprob"),
    "linear_logprob": linear_results,
    "linear_logprob-designs": linear_designs,
    "linear_logprob-pieces": linear_pieces,
    "linear_logprob-early": lambda: _early("linear_logprob"),
    "cpu": cpu_results,
}
