"""How a PPO run scales with the number of ranks: episodes an hour, update tokens a second.

    manus-fast demo                                                     # leaves runs/demo/sft/model
    python -m benchmarks.bench_scaling --model runs/demo/sft/model --ranks 1 2 4 --json benchmarks/results/scaling.json
    python -m benchmarks.bench_scaling --model smollm2 --ranks 1 2 --config ppo_household model.dtype=bfloat16
    python -m benchmarks.bench_scaling --ranks 1 2 --random qwen2-1.5b backend.kind=fsdp backend.zero_stage=3

Each number of ranks runs `manus-fast ppo` for `--seconds` with the same config, seeds and global batch (strong
scaling), a GPU a rank, or on the CPU a process a rank. Figures are means over the iterations after the first, in which
kernels are compiled and caches taken. The last two columns tell how far the first update's loss and gradient norm are
from those of the first number of ranks: rounding, as long as the engine samples the same tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import Parser, output_file
from benchmarks.bench_update import QWEN2_1_5B, TINY
from manus_fast.launch import launch
from manus_fast.modeling.load import load_tokenizer
from manus_fast.tracking import METRICS_FILE, read_metrics
from manus_fast.versions import git_commit

SHAPES = {"qwen2-1.5b": QWEN2_1_5B, "tiny": TINY}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = Parser("scaling", __doc__)
    parser.add_argument("--model", default="smollm2", help="the policy; with --random only its tokenizer")
    parser.add_argument("--random", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--config", default="demo_household")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each number of ranks")
    parser.add_argument("--json", type=output_file, default=None, help="where the record goes")
    arguments, overrides = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.random:
            model = random_model(Path(folder) / "model", SHAPES[arguments.random], model)
        rows = [
            run(ranks, Path(folder) / f"ranks-{ranks}", arguments.config, model, arguments.seconds, overrides)
            for ranks in arguments.ranks
        ]
    record = {
        "command": "python -m benchmarks.bench_scaling " + " ".join(argv if argv is not None else sys.argv[1:]),
        "commit": git_commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPUs",
        "rows": compared(rows),
    }
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["rows"]))
    return record


def random_model(folder: Path, shape: Mapping[str, Any], tokenizer: str) -> str:
    """A Qwen2 folder with random weights; returns its path."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    words = load_tokenizer(tokenizer)
    torch.manual_seed(0)
    config = Qwen2Config(**{**shape, "vocab_size": max(shape["vocab_size"], len(words))})
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def run(ranks: int, out: Path, config: str, model: str, seconds: float, overrides: Sequence[str]) -> dict[str, float]:
    """Figures of one run.

    Raises:
        RuntimeError: the run failed, or was over before its second iteration.
    """
    words = ["ppo", "--config", config, "--model_path", model, "--output_dir", str(out), "evaluation.tasks=1"]
    words += [f"training.max_seconds={seconds}", "training.total_steps=100000000", "training.save_strategy=no"]
    code = launch(ranks, [*words, *overrides])
    if code:
        raise RuntimeError(f"ppo on {ranks} ranks: expected exit code 0, got {code}")
    records = read_metrics(out / METRICS_FILE)
    return figures(ranks, [record for record in records if "train/iteration" in record])


def figures(ranks: int, records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over all iterations but the first, from their records."""
    if len(records) < 2:
        raise RuntimeError(f"ppo on {ranks} ranks: expected two iterations or more, got {len(records)}: more --seconds")
    total = {
        name: float(np.sum([record.get(name, 0.0) for record in records[1:]]))
        for name in ("time/rollout", "time/update", "time/load", "train/episodes", "update/tokens")
    }
    spent = total["time/rollout"] + total["time/update"] + total["time/load"]
    return {
        "ranks": ranks,
        "iterations": len(records) - 1,
        "episodes_per_hour": 3600.0 * total["train/episodes"] / spent,
        "update_tokens_per_second": total["update/tokens"] / total["time/update"],
        "rollout_share": total["time/rollout"] / spent,
        "loss": records[0]["policy/loss"],
        "norm": records[0]["update/grad_norm"],
    }


def compared(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Each row with its ratios to the first, and how far its first update is from the first row's."""
    first = rows[0]
    return [
        {
            **row,
            "episodes_speedup": row["episodes_per_hour"] / first["episodes_per_hour"],
            "update_speedup": row["update_tokens_per_second"] / first["update_tokens_per_second"],
            "loss_difference": abs(row["loss"] - first["loss"]),
            "norm_difference": abs(row["norm"] / first["norm"] - 1.0),
        }
        for row in rows
    ]


def table(rows: Sequence[Mapping[str, float]]) -> str:
    """The rows as text."""
    names = ("ranks", "episodes/h", "", "update tok/s", "", "rollout", "|Δ loss|", "Δ norm")
    lines = [" ".join(f"{name:>{width}}" for name, width in zip(names, (5, 12, 6, 13, 6, 8, 9, 8), strict=True))]
    for row in rows:
        lines.append(
            f"{row['ranks']:>5} {row['episodes_per_hour']:>12,.0f} {row['episodes_speedup']:>5.2f}x "
            f"{row['update_tokens_per_second']:>13,.0f} {row['update_speedup']:>5.2f}x {row['rollout_share']:>8.0%} "
            f"{row['loss_difference']:>9.1e} {row['norm_difference']:>8.1e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
