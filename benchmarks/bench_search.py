"""Times the tree search: driven from Python (one leaf per tree a call) and closed in C++, on one thread and on several.

    python -m benchmarks.bench_search --json benchmarks/results/search_cpu.json --plot docs/figures/search_cost.svg

Priors and values are given, 200 simulations a tree, actions as named in the case; a row's `ms` is the best whole search
of several (the machine's other work only ever adds time), `simulations_per_s` counts over all trees, `peak_mib` is the
batch's block of memory. mctx runs in the same process when it can be imported. Other peers stand as another run's.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks import harness
from benchmarks.arguments import Parser, output_file
from manus_fast import _C
from manus_fast.search import TreeBatch

SIMULATIONS = 200
SHAPES = [(1, 16), (1024, 16), (1024, 50)]
ROUNDS = 8  # different rows of answers, taken in turn
# Measured on 2 cores on 2026-12-02 with the same 200 simulations, in another run than this one.
OTHER_RUN = [
    ("LightZero ctree driven, 1 thread (another run)", (1, 16), 147e3),
    ("LightZero ctree driven, 1 thread (another run)", (1024, 16), 79e3),
    ("LightZero ctree driven, 1 thread (another run)", (1024, 50), 47e3),
    ("mctx closed (another run)", (1, 16), 30e3),
    ("mctx closed (another run)", (1024, 16), 30e3),
]


def answers(trees: int, actions: int, peak: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Priors [ROUNDS, trees, actions] and values [ROUNDS, trees]; `peak` moves that share of the prior to action 0."""
    rng = np.random.default_rng(0)
    priors = rng.random((ROUNDS, trees, actions), dtype=np.float32)
    priors *= (1 - peak) / priors.sum(axis=-1, keepdims=True)
    priors[..., 0] += peak
    spread = 1.0 - peak
    return priors, rng.uniform(-spread, spread, (ROUNDS, trees))


def driven(batch: TreeBatch, priors: np.ndarray, values: np.ndarray, simulations: int) -> None:
    batch.set_roots(values[0], priors[0])
    for s in range(1, simulations + 1):
        leaves = batch.select()
        batch.update(leaves, values[s % ROUNDS], priors[s % ROUNDS])


def closed(batch: TreeBatch, priors: np.ndarray, values: np.ndarray, simulations: int) -> None:
    batch.search_given(simulations, priors, values)


def best_seconds(
    make: Callable[[], Callable[[], object]], threads: Sequence[int] = (1,), repeats: int = 15, budget_s: float = 4.0
) -> list[float]:
    """For each number of threads the best time of the function that `make` prepares anew for each repetition; the first
    one warms up. The numbers take turns, so that what else the machine does falls on all of them alike."""
    times: list[list[float]] = [[] for _ in threads]
    started = time.perf_counter()
    while len(times[-1]) < repeats and (len(times[-1]) < 3 or time.perf_counter() - started < budget_s * len(threads)):
        for number, taken in zip(threads, times, strict=True):
            _C.set_num_threads(number)
            run = make()
            begin = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begin)
    return [min(taken[1:]) for taken in times]


def measure(way, trees: int, actions: int, simulations: int = SIMULATIONS, peak: float = 0.0, threads=(1,), repeats=15):
    """Seconds of one search for each number of threads, the block's MiB, and the mean depth of a tree's nodes."""
    priors, values = answers(trees, actions, peak)
    kept: list[TreeBatch] = []

    def make():
        kept.clear()
        kept.append(TreeBatch(trees, simulations + 1, max_actions=actions))
        return lambda: way(kept[0], priors, values, simulations)

    seconds = best_seconds(make, threads, repeats)
    view = kept[0].view(0)
    depth = np.zeros(len(view.parent))
    for node in range(1, len(depth)):
        depth[node] = depth[view.parent[node]] + 1
    return seconds, kept[0].memory()["block"] / 2**20, float(depth[1:].mean())


def add(report: harness.Report, shape, backend: str, way: str, seconds: float, peak_mib=None, **extra) -> None:
    trees, actions = shape
    row = report.add(
        f"{trees} trees x {actions} actions, {SIMULATIONS} sims", backend, way, seconds * 1e3, peak_mib=peak_mib
    )
    row["simulations_per_s"] = round(trees * SIMULATIONS / seconds)
    row.update(extra)
    print(f"{'':<16} {row['simulations_per_s'] / 1e3:,.0f}k simulations/s", flush=True)


def run_mctx(shape) -> Callable[[], object] | None:
    """mctx's muzero_policy over the same answers under jit, or None where it is not installed."""
    try:
        import jax
        import jax.numpy as jnp
        import mctx
    except ImportError:
        return None
    trees, actions = shape
    priors, values = (jnp.asarray(array, jnp.float32) for array in answers(trees, actions))
    logits = jnp.log(priors + 1e-9)

    @jax.jit
    def search(key, logits, values):
        def recurrent(params, key, action, state):
            row = state[:, 0] % ROUNDS
            b = jnp.arange(trees)
            output = mctx.RecurrentFnOutput(
                reward=jnp.zeros(trees), discount=jnp.ones(trees), prior_logits=logits[row, b], value=values[row, b]
            )
            return output, state + 1

        root = mctx.RootFnOutput(prior_logits=logits[0], value=values[0], embedding=jnp.zeros((trees, 1), jnp.int32))
        return mctx.muzero_policy(
            params=(), rng_key=key, root=root, recurrent_fn=recurrent, num_simulations=SIMULATIONS,
            dirichlet_fraction=0.0,
        ).action_weights  # fmt: skip

    key = jax.random.PRNGKey(0)
    return lambda: search(key, logits, values).block_until_ready()


def cost_curves(quick: bool) -> dict[str, list[tuple[float, int, float, float]]]:
    """(x, trees, seconds driven, seconds closed) on one thread, x: the trees, the actions, the mean depth of a node."""

    def point(x, trees, actions, peak=0.0):
        ([slow], _, depth), ([fast], _, _) = (measure(way, trees, actions, peak=peak) for way in (driven, closed))
        return (depth if x is None else x), trees, slow, fast

    trees = (1, 64) if quick else (1, 4, 16, 64, 256, 1024, 4096, 16384)
    actions = (2, 16) if quick else (2, 4, 8, 16, 32, 64, 128, 256, 512)
    peaks = (0.0, 0.9) if quick else (0.0, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95)
    return {
        "trees": [point(n, n, 16) for n in trees],
        "actions": [point(n, 256, n) for n in actions],
        "depth": [point(None, 256, 16, peak) for peak in peaks],
    }


def plot(curves, path: str, device: str) -> None:
    """Three panels of ns per simulation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    labels = {
        "trees": "trees (16 actions)",
        "actions": "actions (256 trees)",
        "depth": "mean depth of a node (256 trees, 16 actions)",
    }
    for panel, (name, points) in zip(panels, curves.items(), strict=True):
        points = sorted(points)
        x = [point[0] for point in points]
        for column, style, label in ((2, "o-", "driven from Python"), (3, "s-", "closed in C++")):
            panel.plot(x, [p[column] / (p[1] * SIMULATIONS) * 1e9 for p in points], style, label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel(labels[name])
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("ns per simulation")
    panels[0].legend()
    figure.suptitle(f"Tree search, {SIMULATIONS} simulations, 1 thread ({device})", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def parse(argv=None) -> argparse.Namespace:
    parser = Parser("search", __doc__)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the rows there, in place of this op's on this device"
    )
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="draw the cost against trees, actions and depth there"
    )
    parser.add_argument("--only", default="", help="only backends whose name contains this")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads, ascending from 1")
    parser.add_argument("--quick", action="store_true", help="small cases, for a check that it runs")
    parser.add_argument("--commit", default=None, help="the commit to name in the rows, where git cannot tell")
    return parser.parse_args(argv)


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    arguments = parse(argv)
    before = _C.num_threads()
    commit = harness.commit_name() if arguments.commit is None else arguments.commit
    name = harness.device_name("cpu").rsplit(",", 1)[0]
    report = harness.Report("search", name, harness.Ceilings(gbs=1, tflops=1), commit)
    shapes = [(1, 16), (8, 16)] if arguments.quick else SHAPES
    for shape in shapes:
        counts = [n for n in arguments.threads if n == 1 or shape[0] > 1]
        for way in (driven, closed):
            named = {n: f"manus_fast {way.__name__}, {n} thread{'s' * (n > 1)}" for n in counts}
            wanted = [n for n in counts if arguments.only in named[n]]
            if not wanted:
                continue
            seconds, mib, depth = measure(way, *shape, threads=wanted, repeats=5 if arguments.quick else 40)
            for n, taken in zip(wanted, seconds, strict=True):
                add(report, shape, named[n], way.__name__, taken, mib,
                    mean_depth=round(depth, 2), speedup=round(seconds[0] / taken, 2))  # fmt: skip
        _C.set_num_threads(1)
        run = run_mctx(shape) if arguments.only in "mctx closed, all cores" else None
        if run is not None:
            add(report, shape, "mctx closed, all cores", "closed", best_seconds(lambda run=run: run, repeats=3)[0])
    for backend, shape, rate in OTHER_RUN:
        if arguments.only in backend and not arguments.quick:
            way = "driven" if "driven" in backend else "closed"
            add(report, shape, backend, way, shape[0] * SIMULATIONS / rate)
    _C.set_num_threads(1)
    if arguments.only in "cost":
        curves = cost_curves(arguments.quick)
        for against, points in curves.items():
            for x, trees, *seconds in points:
                for way, taken in zip(("driven", "closed"), seconds, strict=True):
                    case = f"cost of {against}: {x:.4g} ({trees} trees), {SIMULATIONS} sims"
                    row = report.add(case, f"manus_fast {way}, 1 thread", way, taken * 1e3)
                    row["simulations_per_s"] = round(trees * SIMULATIONS / taken)
        if arguments.plot:
            plot(curves, arguments.plot, name)
    _C.set_num_threads(before)
    report.save(arguments.json)
    return report.rows


if __name__ == "__main__":
    main()
