"""Tables of a language model that learns ALFWorld, from what benchmarks/bench_alfworld_training.py wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
VARIANTS = ("ours", "ahead", "lockstep", "reference", "textworld")
REACHED = 0.6
"""Success of the training episodes, mean of WINDOW iterations, whose time is told."""
WINDOW = 3
NAMES = {
    "ours": "ours",
    "ahead": "ours, episodes begun ahead",
    "lockstep": "with a barrier each turn",
    "reference": "reference ops",
    "textworld": "TextWorld's delays",
}
PHASES = ("generation", "environment", "log_prob", "update", "hand_over", "other")


def learned(records: Sequence[Record]) -> list[str]:
    """The panel before, after imitation and after RL, a run a group of rows."""
    first = records[0]
    panel = first["parts"]["before"]["panel"]
    longest = max(record["seconds"] for record in records)
    lines = [
        f"A language model of {first['parameters'] / 1e6:.0f} million parameters learns ALFWorld on one",
        f"{first['device']}, each run whole in one process of at most {longest / 60:.1f} minutes",
        f"(`{first['command']} …`; `docs/results.md` has curves and times): per cent of",
        f"the {panel['tasks']} generated games of {panel['split']} solved, greedily and at the temperature of training",
        "(sampled), with 95 % intervals. Each run imitates anew; gains are over its own imitation. `docs/alfworld.md`",
        "has the settings of each, and what broke one of them.",
        *[record["note"] for record in records if record["note"]][:1],
        "",
    ]
    return lines + panels(records)


def panels(records: Sequence[Record]) -> list[str]:
    """The table of `learned`."""
    lines = [
        "| | solved | sampled | seconds | tokens |",
        "|---|---|---|---|---|",
        f"| as it came | {_solved(records[0]['parts']['before']['panel'])} | | | |",
    ]
    for record in records:
        sft = record["parts"]["sft"]
        steps = f"{sft['step']} steps on {sft['rows']:,} episodes"
        lines.append(
            f"| SFT, {steps} | {_solved(sft['panel'])} | {_solved(sft.get('sampled'))} | {sft['seconds']:.0f} "
            f"| {sft['tokens']:,.0f} trained |"
        )
        for name, part in _runs(record):
            if "panel" in part:
                panel, sampled = (_solved(part.get(kind), sft.get(kind)) for kind in ("panel", "sampled"))
                lines.append(
                    f"| then {name}, {part['iterations']} iterations, {part['episodes']:,.0f} episodes "
                    f"| {panel} | {sampled} | {part['seconds']:.0f} "
                    f"| {part['tokens']:,.0f} sampled |"
                )
    return [*lines, ""]


def types(records: Sequence[Record]) -> list[str]:
    """The panel by kind of task, greedy and sampled."""
    lines = ["Per cent solved by kind of task:", ""]
    columns = [("as it came", {"panel": records[0]["parts"]["before"]["panel"]})]
    for record in records:
        columns += [("SFT", record["parts"]["sft"]), *_runs(record)]
    kinds = (("panel", ""), ("sampled", ", sampled"))
    columns = [(name + end, part[kind]["types"]) for name, part in columns for kind, end in kinds if kind in part]
    lines += ["| | " + " | ".join(name for name, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for kind in columns[0][1]:
        lines.append(f"| {kind} | " + " | ".join(f"{100 * found[kind]:.0f}" for _, found in columns) + " |")
    return [*lines, ""]


COLUMNS = (
    ("success", "success", 100, ".1f"),
    ("turns", "turns", 1, ".1f"),
    ("admissible", "valid_actions", 100, ".1f"),
    ("repeats", "repeats", 100, ".0f"),
    ("entropy", "entropy", 1, ".2f"),
    ("KL", "kl", 1e4, ".1f"),
    ("clipped", "clip_fraction", 100, ".2f"),
)
"""Of a learning curve: head, name in a point, factor, form."""


def curves(records: Sequence[Record], points: int = 12) -> list[str]:
    """Learning curves against wall-clock and tokens."""
    heads = " | ".join(head for head, *_ in COLUMNS)
    lines = []
    for record in records:
        for name, part in _runs(record):
            lines += [
                f"Learning curve of {name} (sampled training episodes; panel: valid_seen). Repeats: per cent of an",
                "episode's 4-grams that it said before; KL: in 1e-4 a token, within an iteration; clipped: per cent of",
                "the tokens.",
                "",
                f"| seconds | commands | sampled tokens | {heads} | panel |",
                "|---|---|---|---|" + "---|" * len(COLUMNS),
            ]
            curve = part["curve"]
            size = max(1, -(-len(curve) // points))
            for start in range(0, len(curve), size):
                some = curve[start : start + size]
                end = some[-1]
                seen = [point["panel"] for point in some if "panel" in point]
                cells = [_mean(some, key, scale, form) for _, key, scale, form in COLUMNS]
                cells.append(f"{100 * seen[-1]:.1f}" if seen else "")
                lines.append(
                    f"| {end['seconds']:.0f} | {end['steps']:,} | {end['tokens']:,.0f} | " + " | ".join(cells) + " |"
                )
            lines.append("")
    return lines


def rates(records: Sequence[Record]) -> list[str]:
    """Where the time goes, and how fast each phase is, a column a run."""
    columns = [run for record in records for run in _runs(record)]
    lines = [
        "Where the time of training goes, evaluations left out, in per cent. `host` is environment and other together,",
        "in which the engine may have a step under way; `idle`: no request, no update, no hand-over is under way.",
        f"Time to {100 * REACHED:.0f} %: of the sampled training episodes, mean of {WINDOW} iterations.",
        "",
        "| | " + " | ".join(name for name, _ in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]

    def row(name: str, cell: Any) -> None:
        lines.append(f"| {name} | " + " | ".join(cell(part) for _, part in columns) + " |")

    def rate(name: str, key: str, form: str = ",.0f", scale: float = 1.0) -> None:
        row(name, lambda part: format(scale * part[key], form) if key in part else "")

    for phase in PHASES:
        row(
            phase.replace("_", "-"),
            lambda part, phase=phase: f"{100 * part['shares'][phase]:.1f}" if phase in part["shares"] else "",
        )
    row("host", lambda part: f"{100 * part['host_share']:.1f}" if "host_share" in part else "")
    row("**idle**", lambda part: f"**{100 * part['idle_share']:.1f}**" if "idle_share" in part else "")
    rate("trajectories an hour", "trajectories_per_hour")
    rate("sampled tokens/s, inside the engine", "sampled_tokens_per_s")
    rate("sampled tokens/s, of the rollout", "rollout_tokens_per_s")
    rate("tokens/s of the update", "update_tokens_per_s")
    rate("hand-over, ms", "hand_over_ms", ".1f")
    row("log-prob, sampled less trained, mean of absolute", lambda part: _mean(part["curve"], "gap_mean", 1, ".4f"))
    rate("largest memory of tensors, GiB", "peak_mib", ".1f", 1 / 1024)
    reached = str(REACHED)
    row(
        f"seconds to {100 * REACHED:.0f} %",
        lambda part: "–" if part["seconds_to"][reached] is None else f"{part['seconds_to'][reached]:.0f}",
    )
    return [*lines, ""]


def windows(record: Record, peers: Sequence[Record]) -> list[str]:
    """What has to be known to read the rates of variants that were measured one after another."""
    alike = [(name, part) for name, part in _runs(record) if part["variant"] != "textworld"]
    rates = [part["sampled_tokens_per_s"] for _, part in alike]
    firsts = ", ".join(f"{part['curve'][0]['seconds']:.1f}" for _, part in alike)
    outside = "; ".join(
        f"{name} {1e3 * (1 - part['shares']['generation']) * part['seconds'] / part['episodes']:.1f}"
        for name, part in [*alike, *(run for peer in peers for run in _runs(peer))]
    )
    return [
        "The windows followed one another on a machine whose processors are shared with others, and vLLM's step for a",
        f"model of this size is the host's work: inside the engine, where the first {len(alike)} columns are alike,",
        f"the rate changed by {100 * (max(rates) / min(rates) - 1):.0f} %. Their first iterations, the same games from",
        f"the same weights, took {firsts} s. So their trajectories an hour do not rank them. Milliseconds outside the",
        f"engine, an episode: {outside}.",
        "",
    ]


def engines(record: Record) -> list[str]:
    """What a step of ALFWorld's own engine takes, beside ours."""
    ms, delays = record["ms"], record["ms"]["stock"]
    rows = [("TextWorld", delays), ("TextWorld, memoised by us", ms["memoised"]), ("native", ms["native"])]
    return [
        "TextWorld does not install on the machine of the runs above. Its milliseconds on a CPU, a world on one core",
        f"({record['engine']}; `python -m benchmarks.bench_alfworld`); with TextWorld's delays, native answers are",
        f"handed over as late as by workers that take {delays['step']:.0f} ms a step",
        f"and {delays['reset']:.0f} ms a reset, one a core:",
        "",
        "| | reading a game | reset | step |",
        "|---|---|---|---|",
        *(f"| {name} | {row['load']:.2f} | {row['reset']:.3g} | {row['step']:.3g} |" for name, row in rows),
        "",
    ]


def replayed(rows: Sequence[Record]) -> list[str]:
    """Policies of the native worlds, judged by ALFWorld's own engine."""
    return [
        "What trained policies played in native worlds, played again in ALFWorld's own engine",
        f"({rows[0]['engine']}; `python -m benchmarks.replay_alfworld`). A greedy policy that is answered alike plays",
        "alike, so the last column is its success there, in per cent:",
        "",
        "| policy | split | games | commands | different answers | different outcomes | native | TextWorld |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['policy']} | {row['split']} | {row['games']} | {row['steps']:,} | {row['different_answers']} "
            f"| {row['different_outcomes']} | {100 * row['success_native']:.1f} | {100 * row['success']:.1f} |"
            for row in rows
        ),
        "",
    ]


def losses(rows: Sequence[Record]) -> list[str]:
    """How the games that a policy lost went."""
    lines = [
        "How lost games went (a game that circles gave half of its last 20 commands before; a refused one had half",
        'of them answered "Nothing happens."):',
        "",
    ]
    lines += [
        "| policy | kind of task | games | lost | in circles | refused | otherwise |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for kind, lost in row["losses"].items():
            ways = [lost[name] for name in ("circles", "refused", "otherwise")]
            lines.append(
                f"| {row['policy']} | {kind} | {lost['games']} | {sum(ways)} | " + " | ".join(map(str, ways)) + " |"
            )
    return [*lines, ""]


def lived(rows: Sequence[Record]) -> list[str]:
    """Panels that a policy played itself in both engines."""
    return [
        "The same policy playing itself in both engines, greedily, game by game",
        "(`manus-fast eval alfworld … environment.backend=textworld`; `python -m benchmarks.replay_alfworld --live`).",
        "p: chance of so uneven a split of the games that only one of the two saw solved (McNemar, exact):",
        "",
        "| | games | native | TextWorld | solved in both | only native | only TextWorld | p |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['policy']} | {row['games']} | {100 * row['success_native']:.1f} | {100 * row['success']:.1f} "
            f"| {row['both']} | {row['only_native']} | {row['only_textworld']} | {row['p_value']:.2f} |"
            for row in rows
        ),
        "",
    ]


def _runs(record: Record) -> list[tuple[str, Any]]:
    """RL runs of a record in their order, under what tables call them."""
    runs = []
    for key, part in record["parts"].items():
        if "curve" in part:
            variant = part.get("variant", key)  # the first runs were kept under their variant alone
            name = NAMES.get(variant, variant)
            runs.append((part["algorithm"] if name == "ours" else f"{part['algorithm']}, {name}", part))
    return runs


def _solved(panel: Mapping[str, Any] | None, before: Mapping[str, Any] | None = None) -> str:
    """Of a panel, where it was played, and how much more than before that is."""
    if panel is None:
        return ""
    solved = f"{100 * panel['success']:.1f} ({100 * panel['low']:.1f} to {100 * panel['high']:.1f})"
    return solved if before is None else f"{solved}, {100 * (panel['success'] - before['success']):+.1f}"


def _mean(points: Sequence[Mapping[str, float]], name: str, scale: float, form: str) -> str:
    """Of the points that tell it; nothing where none does."""
    values = [point[name] for point in points if name in point]
    return format(scale * sum(values) / len(values), form) if values else ""
