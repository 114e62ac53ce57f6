"""Household worlds: microseconds per world of step, reset, clone, save and restore, a batch of worlds in one call.

    python -m benchmarks.bench_household --json benchmarks/results/cpu.json

"native" rows make texts and admissible commands in C++; "+ str" rows hand them to Python as `str` and lists, too, as
`EnvBatch` does. Actions are drawn from the admissible ones, so that every step does something; games that end are
reset outside the timed part. `ms` is one call on the whole batch; the table shows µs per world.
"""

import argparse
import statistics
import time

import numpy as np

from benchmarks import harness
from manus_fast import _C, envs


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worlds", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    report = harness.Report("household", harness.device_name("cpu"), harness.Ceilings(1, 1), harness.commit_name())
    machine_threads = _C.num_threads()
    for threads in sorted({1, machine_threads}):
        _C.set_num_threads(threads)
        for level in args.levels:
            medians, commands = measure(level, args.worlds, args.repeats)
            case = f"level {level}, {args.worlds} worlds, {threads} thread{'s' * (threads > 1)}"
            for name, ms in medians.items():
                report.add(case, "native + str" if "str" in name else "native", name.removesuffix(" + str"), ms)
            cells = "  ".join(f"{name} {ms / args.worlds * 1e3:.2f}" for name, ms in medians.items())
            print(f"µs per world, {case}, {commands:.0f} admissible commands: {cells}\n")
    _C.set_num_threads(machine_threads)
    report.save(args.json)


if __name__ == "__main__":
    main()
