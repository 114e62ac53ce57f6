"""The same training with the fast ops and with the reference ones: how far the two curves are apart.

    manus-fast demo
    python -m benchmarks.bench_backends --model runs/demo/sft/model --json benchmarks/results/backends.json

Both runs start from the same policy with the same seeds. Their numbers agree to rounding until rounding moves a sampled
token over a boundary; from there on the episodes differ and only the curves can be compared. `same` says how many
iterations sampled token for token the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import Parser, output_file
from manus_fast.ops.dispatch import forced
from manus_fast.rollout.summary import summarise
from manus_fast.run_config import Config
from manus_fast.trainer import Trainer
from manus_fast.versions import git_commit

BACKENDS = ("auto", "reference")
METRICS = ("train/success", "train/reward", "policy/loss", "critic/loss", "policy/entropy", "update/grad_norm")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = Parser("backends", __doc__)
    parser.add_argument("--model", required=True, help="the policy that both start from")
    parser.add_argument("--config", default="configs/demo_household.yaml")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", type=output_file, default=None, help="where the record goes")
    parser.add_argument("overrides", nargs="*", default=[], help="of the config, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            name: curve(name, Path(folder) / name, arguments.config, arguments.model, arguments.iterations,
                        arguments.overrides)
            for name in BACKENDS
        }  # fmt: skip
    record = {
        "command": f"python -m benchmarks.bench_backends --iterations {arguments.iterations}",
        "commit": git_commit(),
        "torch": torch.__version__,
        "iterations": arguments.iterations,
        **differences(curves["auto"], curves["reference"]),
        "curves": curves,
    }
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record) + "\n")
    print(f"{record['same']} of {arguments.iterations} iterations sampled the same tokens")
    print(f"{'':<18} {'largest |fast - reference| while the same':>42} {'mean, fast':>12} {'mean, reference':>16}")
    for name in METRICS:
        row = record["metrics"][name]
        print(f"{name:<18} {row['largest']:>42.2e} {row['auto']:>12.4f} {row['reference']:>16.4f}")
    return record


def curve(backend: str, folder: Path, config: str, model: str, iterations: int, overrides: Sequence[str]) -> dict:
    """Metrics by iteration of a run whose ops are `backend`'s (those of MANUS_FAST_BACKEND=`backend`)."""
    # Schedules go by steps: by time the faster run would anneal later.
    own = (f"model.path={model}", f"training.output_dir={folder}", "training.max_seconds=null")
    rows = []
    with forced(backend):
        trainer = Trainer(Config.load(config, (*own, "training.total_steps=100000", *overrides)))
        for _ in range(iterations):
            played = trainer.collect()
            stats = trainer.update(played)
            rows.append({**summarise(played.trajectories), **stats, "tokens": trainer.counters.tokens})
        trainer.tracking.close()
    return {name: [row[name] for row in rows] for name in ("tokens", *METRICS)}


def differences(fast: dict[str, list[float]], reference: dict[str, list[float]]) -> dict[str, Any]:
    """How many iterations sampled alike, and for each metric the largest difference among those and both means."""
    unlike = [a != b for a, b in zip(fast["tokens"], reference["tokens"], strict=True)]
    same = unlike.index(True) if True in unlike else len(unlike)
    metrics = {
        name: {
            "largest": float(np.abs(np.subtract(fast[name], reference[name]))[:same].max(initial=0.0)),
            "auto": float(np.mean(fast[name])),
            "reference": float(np.mean(reference[name])),
        }
        for name in METRICS
    }
    return {"same": same, "metrics": metrics}


if __name__ == "__main__":
    main()
