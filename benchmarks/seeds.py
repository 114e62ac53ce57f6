"""One experiment over several seeds or variants, one after another or side by side, each on CPU cores of its own."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")
Result = TypeVar("Result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments `--seeds` and `--jobs`."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time, each on 1/jobs of the cores")
    parser.add_argument("--cores", type=int, nargs="+", default=None, help="which cores; default: all")


def over_seeds(one: Callable[[int], Result], arguments: argparse.Namespace) -> Iterator[Result]:
    """`one(seed)` for each of `arguments.seeds`, in their order: see `side_by_side`."""
    return side_by_side(one, arguments.seeds, arguments)


def side_by_side(
    one: Callable[[Item], Result], items: Sequence[Item], arguments: argparse.Namespace, ordered: bool = True
) -> Iterator[Result]:
    """`one(item)` for each item, in their order, or each as soon as it is there (`ordered=False`).

    With `arguments.jobs` above 1 as many run at a time, in processes of their own. Each is held to an equal part of the
    cores, so that a time limit means the same for all, and `one` and the items must be picklable.

    Raises:
        ValueError: there are fewer cores than jobs.
    """
    if arguments.jobs <= 1:
        yield from map(one, items)
        return
    parts = split(arguments.cores or sorted(os.sched_getaffinity(0)), arguments.jobs)
    context = multiprocessing.get_context("spawn")
    free = context.Queue()
    for part in parts:
        free.put(part)
    with context.Pool(min(arguments.jobs, len(items)), initializer=_hold, initargs=(free,)) as pool:
        yield from (pool.imap if ordered else pool.imap_unordered)(one, items, chunksize=1)


def mean_difference(pairs: Sequence[tuple[int, int, int]], samples: int = 10_000) -> tuple[float, float, float]:
    """The mean over seeds of a difference of success rates, and its paired bootstrap 95 % interval.

    Each seed's tasks are drawn again by themselves: the interval is about these seeds' policies on other tasks, and
    says nothing of other seeds.

    Args:
        pairs: of each seed (tasks that only the first solves, tasks that only the second does, all tasks).
        samples: how often tasks are drawn.
    """
    rng = np.random.default_rng(0)
    mean, drawn = 0.0, np.zeros(samples)
    for lost, won, tasks in pairs:
        counts = rng.multinomial(tasks, [lost / tasks, won / tasks, 1 - (lost + won) / tasks], samples)
        mean += (won - lost) / tasks / len(pairs)
        drawn += (counts[:, 1] - counts[:, 0]) / tasks / len(pairs)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return mean, float(low), float(high)


def split(cores: Sequence[int], jobs: int) -> list[list[int]]:
    """`jobs` equal parts of `cores`, neighbours together; cores that are left over stay idle."""
    each = len(cores) // jobs
    if each == 0:
        raise ValueError(f"jobs: expected at most {len(cores)}, the number of cores, got {jobs}")
    return [list(cores[each * i : each * (i + 1)]) for i in range(jobs)]


def _hold(free: Any) -> None:
    """Holds this process and its threads to the next free part."""
    cores = free.get()
    os.sched_setaffinity(0, cores)
    import torch

    from manus_fast import _C

    torch.set_num_threads(len(cores))
    _C.set_num_threads(len(cores))
