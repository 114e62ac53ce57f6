"""Conversations a second on one core: rows of the published shapes checked and normalised, read from JSONL, and built.

    python -m benchmarks.bench_data --json benchmarks/results/data.json
    python -m benchmarks.bench_data --data FOLDER       # rows of your own as well

`normalise` takes parsed rows to conversations in the agent's form (`read_row`, `normalise`); `load` is the same from a
JSONL file, parsing included; `build` adds near duplicates, the split and writing. Rows are generated, all shapes and
forms of action alike. Two cases have published sizes:

`AgentInstruct` has the six parts of that set in their proportions, with their mean turns and bytes as its dataset card
states them (1,866 conversations of 5.24 turns and 4,310 bytes). `published` is like the rows that the repository
OpenManus-RL holds as parquet files (5.3 trained replies and 5,800 characters).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, output_file
from manus_fast.agent.protocol import Protocol
from manus_fast.data.build import BuildConfig, build
from manus_fast.data.load import load_conversations
from manus_fast.data.normalise import normalise
from manus_fast.data.schema import MalformedRow
from manus_fast.data.sources import read_row
from manus_fast.versions import git_commit

# Replies, words of an observation, words of a thought.
CASES = {"short": (2, 60, 15), "published": (5.3, 120, 30), "long": (20, 150, 40)}
# Of AgentInstruct (huggingface.co/datasets/THUDM/AgentInstruct): conversations, mean turns, mean bytes.
PARTS = {
    "alfworld": (336, 13.52, 3641),
    "webshop": (351, 3.68, 4566),
    "mind2web": (122, 1.00, 1308),
    "kg": (324, 6.04, 9136),
    "os": (195, 3.85, 3386),
    "db": (538, 2.06, 2670),
}
_WORD, _AROUND = 6.5, 45
"""Characters of a generated word with its space, and those of a turn's rows besides its words."""
_FROM, _ROLE = ("from", "value", "loss"), ("role", "content", "loss")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("data", __doc__)
    parser.add_argument("--rows", type=int, default=2000, help="conversations of a case")
    parser.add_argument("--repeats", type=int, default=7, help="the fastest of so many runs counts")
    parser.add_argument("--data", help="a dataset to measure besides: a file, a folder or a hub name")
    parser.add_argument("--json", type=output_file, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows = []
    for name, sizes in CASES.items():
        rows += measure(name, make_rows(arguments.rows, *sizes), arguments.repeats)
    rows += measure("AgentInstruct", agent_instruct(arguments.rows), arguments.repeats)
    if arguments.data:
        from manus_fast.data.load import read_records

        rows += measure(Path(arguments.data).name, list(read_records(arguments.data)), arguments.repeats)
    print(f"{'case':>12} {'stage':>10} {'conversations/s':>16} {'replies':>8} {'characters':>11} {'MB/s':>7}")
    for row in rows:
        print(
            f"{row['case'][-12:]:>12} {row['stage']:>10} {row['conversations_per_s']:16,.0f} {row['replies']:8.1f} "
            f"{row['characters']:11,.0f} {row['mb_per_s']:7.0f}"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")


def measure(name: str, rows: list[Any], repeats: int) -> list[dict[str, Any]]:
    """One row a stage: the fastest of `repeats` runs in this process, since other work may share its core."""
    protocol = Protocol()
    kept, dropped = normalised(rows, protocol)
    replies = statistics.fmean(sum(m["trainable"] for m in item.messages) for item in kept)
    characters = statistics.fmean(sum(len(m["content"]) for m in item.messages) for item in kept)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        stages: dict[str, Callable[[], Any]] = {
            "normalise": lambda: normalised(rows, protocol),
            "load": lambda: list(load_conversations(str(file), Counter(), protocol)),
            "build": lambda: build([(str(file), 1.0)], Path(folder) / "out", BuildConfig(), protocol),
        }
        made = []
        for stage, work in stages.items():
            seconds = min(timed(work) for _ in range(repeats))
            made.append(
                {
                    "op": "data",
                    "case": name,
                    "stage": stage,
                    "conversations_per_s": len(rows) / seconds,
                    "replies": replies,
                    "characters": characters,
                    "mb_per_s": characters * len(rows) / seconds / 1e6,
                    "rows": len(rows),
                    "kept": len(kept),
                    "dropped": dict(dropped),
                    "cpu": cpu(),
                    "commit": git_commit(),
                }
            )
    return made


def normalised(rows: list[Any], protocol: Protocol) -> tuple[list[Any], Counter[str]]:
    kept, dropped = [], Counter()
    for row in rows:
        try:
            kept.append(normalise(read_row(row), protocol))
        except MalformedRow as error:
            dropped[error.reason] += 1
    return kept, dropped


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def agent_instruct(count: int) -> list[dict[str, Any]]:
    """`count` rows with the sizes of AgentInstruct's parts, in random order; a fifth of the words are thoughts."""
    rows: list[dict[str, Any]] = []
    whole = sum(number for number, _, _ in PARTS.values())
    for seed, (number, turns, size) in enumerate(PARTS.values()):
        words = max(4.0, (size / (turns + 1) - _AROUND) / _WORD)
        rows += make_rows(round(count * number / whole), turns, round(0.8 * words), round(0.2 * words), seed)
    random.Random(0).shuffle(rows)
    return rows


def make_rows(count: int, replies: float, observation: int, thought: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of all shapes and forms in turn; sizes vary by half around the given ones, which are their means."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(3000)]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(max(1, length // 2), length + length // 2)))

    forms: list[Callable[[str, str], str]] = [
        lambda t, a: f"Think: {t}\nAct: click[{a}]",
        lambda t, a: f"Thought:\n{t}\n\nAction:\nclick[{a}]",
        lambda t, a: f'Thought: {t}\nAction: search\nAction Input: {{"query": "{a}"}}',
        lambda t, a: f"Think: {t}\n\nAct: bash\n\n```bash\nls {a}\n```",
        lambda t, a: f"{t}\n```sql\nSELECT {a}\nFROM t;\n```",
        lambda t, a: f'{t}\n<tool_call>{{"name": "f", "arguments": {{"a": "{a}"}}}}</tool_call>',
        lambda t, a: json.dumps({"thought": t, "action": f"open {a}"}),
    ]
    rows = []
    for number in range(count):
        pairs = [(text(observation), "Ok.", False)]
        for _ in range(max(1, int(rng.uniform(0.5, 1.5) * replies + rng.random()))):
            pairs.append((text(observation), rng.choice(forms)(text(thought), rng.choice(words)), True))
        shape, number = number % 4, number + 1_000_000 * seed  # ids differ between seeds
        keys, (user, assistant) = (_ROLE, ("user", "assistant")) if shape in (1, 3) else (_FROM, ("human", "gpt"))
        turns = []
        for seen, reply, flag in pairs:
            turns.append(dict(zip(keys, (user, seen, None), strict=True)))
            turns.append(dict(zip(keys, (assistant, reply, flag), strict=True)))
        rows.append(
            [
                {"id": f"os_{number}", "conversations": turns},
                {"id": f"db_{number}", "conversation": turns},
                {"item_id": f"webshop_{number}", "conversations": turns},
                {"item_id": f"maze_{number}", "data_source": "maze", "conversations": turns},
            ][shape]
        )
    return rows


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
