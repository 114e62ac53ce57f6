"""ALFWorld's games: the real engine, the same memoised, and the native one, on the same commands in one run.

    python -m benchmarks.bench_alfworld --data DIR --json benchmarks/results/alfworld.json

Needs the package alfworld and games (`manus-fast env make-games DIR`). Each engine runs in a process of its own, one
after the other. "load" is the first reset of a game, "reset" each further one, "clone" a second world in the middle of
an episode; MiB is what 40 more loads of 4 games leave behind. One core; medians in ms, over all games and steps.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import Parser, output_file
from manus_fast.envs.alfworld.native import NativeBatch, NativeEnv
from manus_fast.envs.alfworld.panels import find_root, find_tasks
from manus_fast.envs.alfworld.textworld import TextWorldEnv, engine_version

ENGINES = ("stock", "memoised", "native")
LIMIT = 60_000


def timed(samples: list[float], function, *args):
    begin = time.perf_counter()
    result = function(*args)
    samples.append((time.perf_counter() - begin) * 1e3)
    return result


def resident() -> float:
    """MiB of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(engine: str, root: Path, games: int, steps: int) -> dict[str, float]:
    tasks = find_tasks(root, "train")
    tasks = [tasks[i * len(tasks) // games] for i in range(games)]
    env = NativeEnv(root, LIMIT) if engine == "native" else TextWorldEnv(root, LIMIT, fast=engine == "memoised")
    # What the process pays once: imports and the planner's library.
    env.reset(tasks[-1], 0)
    samples: dict[str, list[float]] = {name: [] for name in ("load", "reset", "step", "clone")}
    for task in tasks:
        timed(samples["load"], env.reset, task, 0)
        _, info = timed(samples["reset"], env.reset, task, 0)
        rng = random.Random(task.id)
        for _ in range(steps):
            _, _, terminated, _, info = timed(samples["step"], env.step, rng.choice(info["admissible"]))
            if terminated:
                break
        timed(samples["clone"], env.clone).close()
    out = {name: statistics.median(values) for name, values in samples.items()}
    before = resident()
    for i in range(40):
        env.reset(tasks[i % min(4, games)], 0)
    out["MiB"] = resident() - before
    if engine == "native":
        out |= measure_batch(root, tasks)
    return out


def measure_batch(root: Path, tasks: list) -> dict[str, float]:
    """The native engine's own way: 256 worlds in a call, ms per world, strings for Python included."""
    batch = NativeBatch(root, 256, LIMIT)
    slots = list(range(256))
    played = [tasks[slot % len(tasks)] for slot in slots]
    samples: dict[str, list[float]] = {"batch reset": [], "batch step": [], "batch clone": []}
    rng = random.Random(0)
    batch.reset(slots, played, [0] * 256)
    for _ in range(20):
        _, infos = timed(samples["batch reset"], batch.reset, slots, played, [0] * 256)
        answer = timed(samples["batch step"], batch.step, slots, [rng.choice(i["admissible"]) for i in infos])
        timed(samples["batch clone"], lambda: [batch.clone(slot, slot + 1) for slot in range(0, 256, 2)])
        assert len(answer[0]) == 256
    worlds = {"batch reset": 256, "batch step": 256, "batch clone": 128}
    return {name: statistics.median(values) / worlds[name] for name, values in samples.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("alfworld", __doc__)
    parser.add_argument("--data", help="folder of the games; default: as the environment finds them")
    parser.add_argument("--games", type=int, default=8)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", type=output_file, help="write the results to this file")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    root = find_root(args.data)
    if args.engine:
        measured = measure(args.engine, root, args.games, args.steps)
        print(json.dumps({"version": engine_version()} | measured))
        return
    results = {}
    for engine in ENGINES:
        command = [sys.executable, "-m", "benchmarks.bench_alfworld", "--data", str(root), "--engine", engine]
        command += ["--games", str(args.games), "--steps", str(args.steps)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        results[engine] = json.loads(run.stdout.splitlines()[-1])
        version = results[engine].pop("version")
    print(version)
    for name in ("load", "reset", "step", "clone"):
        stock = results["stock"][name]
        cells = "  ".join(f"{e} {results[e][name]:.4g} ({stock / results[e][name]:.3g}×)" for e in ENGINES)
        print(f"{name:6} ms  {cells}")
    print("MiB left  " + "  ".join(f"{e} {results[e]['MiB']:.2f}" for e in ENGINES))
    cells = "  ".join(f"{name} {results['native'][name] * 1e3:.3g}" for name in results["native"] if "batch" in name)
    print(f"native, 256 worlds a call, µs per world with strings: {cells}")
    if args.json:
        rows = {"schema": 1, "engine": version, "games": args.games, "steps": args.steps, "ms": results}
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
