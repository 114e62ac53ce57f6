"""Household worlds: microseconds per world of step, reset, clone, save and restore, a batch of worlds in one call.

    python -m benchmarks.bench_household --data GAMES --memory 1000 --json benchmarks/results/household.json

"native" rows make texts and admissible commands in C++; "+ str" rows hand them to Python as `str` and lists, too, as
`EnvBatch` does. Actions are drawn from the admissible ones, so that every step does something; games that end are
reset outside the timed part. `ms` is one call on the whole batch; the table shows µs per world.

With --data (a folder of `manus-fast env make-games`, or ALFWorld's own) the same games are played in this run by the
native engine and by TextWorld, stock and memoised (`bench_alfworld`, in a process of its own with the Python that has
the package alfworld); `ms` is then per world. With --memory all worlds are played on for so many steps: `peak_mib` is
what the process holds (resident) after each part, `ms` the mean step of all of them so far, choosing included.
"""

import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.arguments import Parser, output_file
from manus_fast import _C, envs
from manus_fast.envs.alfworld.native import NativeBatch
from manus_fast.envs.alfworld.panels import find_root, find_tasks


class Timer:
    """Medians of named parts."""

    def __init__(self):
        self.samples: dict[str, list[float]] = {}

    def __call__(self, name, function, *args):
        begin = time.perf_counter()
        result = function(*args)
        self.samples.setdefault(name, []).append((time.perf_counter() - begin) * 1e3)
        return result

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.samples.items()}


def measure(level: int, worlds: int, repeats: int) -> tuple[dict[str, float], float]:
    """Median ms per call on the whole batch, and the mean number of admissible commands."""
    env = envs.make("household", level=level, max_steps=60_000)
    batch = env.make_batch(worlds)
    native = batch._batch
    slots = list(range(worlds))
    tasks = env.tasks("train")[:worlds]
    seeds = [0] * worlds
    timer, rng, commands = Timer(), np.random.default_rng(0), []
    recipes = env.recipes(tasks)
    for _ in range(repeats // 2 + 1):
        timer("reset", native.reset, slots, recipes)
        timer("reset + str", batch.reset, slots, tasks, seeds)

    def actions():
        return [choices[rng.integers(len(choices))] for choices in native.admissible(slots)]

    def restart(ended):
        if len(ended):
            batch.reset(ended.tolist(), [tasks[i] for i in ended], [0] * len(ended))

    for _ in range(repeats):
        commands.append(statistics.fmean(len(c) for c in native.admissible(slots)))
        _, terminated, _ = timer("step", native.step, slots, actions())
        restart(np.flatnonzero(terminated))
        terminated = timer("step + str", batch.step, slots, actions())[2]
        restart(np.flatnonzero(terminated))
        timer("expert explorer", native.expert, slots, "explorer")
        timer("expert planner", native.expert, slots, "planner")

    def clones():
        for slot in range(0, worlds - 1, 2):
            native.clone(slot, slot + 1)

    def saves():
        return [native.save(slot) for slot in slots]

    for _ in range(repeats):
        timer("clone", clones)
        states = timer("save", saves)
        timer("restore", lambda: [native.restore(slot, state) for slot, state in enumerate(states)])  # noqa: B023
    medians = timer.medians()
    medians["clone"] *= 2  # half of the worlds were cloned
    return medians, statistics.fmean(commands)


def measure_games(root: Path, worlds: int, repeats: int) -> dict[str, float]:
    """Median ms per world of the native engine on game files, `worlds` of them in a call."""
    batch = NativeBatch(root, worlds, 60_000)
    native = batch._batch
    slots = list(range(worlds))
    found = find_tasks(root, "train")
    tasks = [found[slot % len(found)] for slot in slots]
    timer, rng = Timer(), random.Random(0)
    batch.reset(slots, tasks, [0] * worlds)
    games = [batch._world(task)[0] for task in tasks]
    for _ in range(repeats):
        timer("reset + str", batch.reset, slots, tasks, [0] * worlds)
        timer("reset", native.load, slots, games)
        for name, step in (("step", native.step), ("step + str", batch.step)):
            choices = [rng.choice(commands) for commands in native.admissible(slots)]
            timer(name, step, slots, choices)
        timer("clone", lambda: [native.clone(slot, slot + 1) for slot in range(0, worlds, 2)])
    return {name: ms / (worlds // 2 if name == "clone" else worlds) for name, ms in timer.medians().items()}


def compare(report: harness.Report, root: Path, python: str, worlds: int, repeats: int) -> None:
    """Adds the rows of both engines on the same games, and prints the ratios."""
    ours = measure_games(root, worlds, repeats)
    case = "ALFWorld games, per world"
    for name, ms in ours.items():
        report.add(case, "native + str" if "str" in name else "native", name.removesuffix(" + str"), ms)
    for engine in ("stock", "memoised"):
        command = [python, "-m", "benchmarks.bench_alfworld", "--data", str(root), "--engine", engine]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        theirs = json.loads(run.stdout.splitlines()[-1])
        for name in ("reset", "step", "clone"):
            report.add(case, f"{theirs['version']}, {engine}", name, theirs[name])
            print(f"  {name}: {theirs[name] / ours[name]:,.0f} times the native engine's", end="")
            print(f", {theirs[name] / ours[f'{name} + str']:,.0f} with strings" if f"{name} + str" in ours else "")


def memory(report: harness.Report, worlds: int, steps: int) -> None:
    """Plays `worlds` worlds for `steps` steps, with random commands, and adds the resident memory on the way."""
    env = envs.make("household", level=2, max_steps=60_000)
    batch, tasks, rng = env.make_batch(worlds), env.tasks("train"), random.Random(0)
    slots, played = list(range(worlds)), 0
    # A few games a world beforehand: the allocator has then met games of every size.
    for _ in range(5):
        infos = batch.reset(slots, [tasks[(played + i) % len(tasks)] for i in slots], [0] * worlds)[1]
        played += worlds
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        _, _, terminated, _, infos = batch.step(slots, [rng.choice(info["admissible"]) for info in infos])
        ended = np.flatnonzero(terminated).tolist()
        if ended:
            fresh = batch.reset(ended, [tasks[(played + i) % len(tasks)] for i in range(len(ended))], [0] * len(ended))
            played += len(ended)
            for slot, info in zip(ended, fresh[1], strict=True):
                infos[slot] = info
        if step in (1, steps // 10) or step % max(1, steps // 5) == 0:
            mib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
            ms = (time.perf_counter() - begin) * 1e3 / step
            case = f"level 2, {worlds} worlds, {played} games"
            report.add(case, "native + str", f"after step {step}", ms, peak_mib=mib)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("household", __doc__)
    parser.add_argument("--json", type=output_file, help="write the rows to this file")
    parser.add_argument("--worlds", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", help="folder of ALFWorld games: compare with TextWorld on them")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the package alfworld")
    parser.add_argument("--memory", type=int, default=0, metavar="STEPS", help="also so many steps of all worlds")
    args = parser.parse_args(argv)
    report = harness.Report("household", harness.device_name("cpu"), harness.Ceilings(1, 1), harness.commit_name())
    if args.memory:
        memory(report, args.worlds, args.memory)
    machine_threads = _C.num_threads()
    single: dict[int, dict[str, float]] = {}
    for level in args.levels:
        for threads in sorted({1, machine_threads}):
            _C.set_num_threads(threads)
            medians, commands = measure(level, args.worlds, args.repeats)
            plural = "s" * (threads > 1)
            case = f"level {level}, {commands:.0f} commands, {args.worlds} worlds, {threads} thread{plural}"
            for name, ms in medians.items():
                report.add(case, "native + str" if "str" in name else "native", name.removesuffix(" + str"), ms)
            cells = "  ".join(f"{name} {ms / args.worlds * 1e3:.2f}" for name, ms in medians.items())
            print(f"µs per world, {case}: {cells}")
            if threads == 1:
                single[level] = medians
            else:
                gain = "  ".join(f"{name} {single[level][name] / ms:.2f}" for name, ms in medians.items())
                print(f"  times as fast as one thread: {gain}")
    _C.set_num_threads(machine_threads)
    if args.data:
        _C.set_num_threads(1)
        compare(report, find_root(args.data), args.python, args.worlds, args.repeats)
        _C.set_num_threads(machine_threads)
    report.save(args.json)


if __name__ == "__main__":
    main()
