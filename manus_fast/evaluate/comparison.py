"""Two models on one panel, task by task: the difference of their success rates and scores, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manus_fast.evaluate.metrics import Report


@dataclass
class Comparison:
    """`b` against `a` over the tasks that both played without failure. Rates and differences are fractions."""

    a: str
    b: str
    tasks: int
    left_out: int
    """Tasks that only one report holds, or that failed for either model."""
    rate_a: float
    rate_b: float
    difference: float
    """rate_b - rate_a."""
    low: float
    high: float
    """Paired bootstrap 95 % interval of the difference."""
    both: int
    only_a: int
    only_b: int
    neither: int
    p_value: float
    """Exact two-sided McNemar test: the chance of so uneven a split of the tasks that only one model solves."""
    per_type: dict[str, tuple[int, float, float]]
    """Task type → (tasks, rate_a, rate_b)."""
    score: Difference
    """Of the environment's own scores; those of success where it has none."""


@dataclass
class Difference:
    """Means of a figure over the common tasks, and the paired bootstrap 95 % interval of b - a."""

    a: float
    b: float
    difference: float
    low: float
    high: float


def compare(a: Report, b: Report, samples: int = 10_000, seed: int = 0) -> Comparison:
    """Compares two reports of one panel.

    Args:
        a: the baseline.
        b: the model in question.
        samples: bootstrap resamples of the tasks.
        seed: of the resampling.

    Raises:
        ValueError: reports of different suites or splits, or without a common valid task.
    """
    if (a.suite, a.split) != (b.suite, b.split):
        raise ValueError(
            f"compare: expected two reports of one suite and split, got {a.suite}/{a.split} and {b.suite}/{b.split}"
        )
    if samples < 1:
        raise ValueError(f"samples: expected an integer >= 1, got {samples}")
    first = {record.id: record for record in a.tasks if record.error is None}
    second = {record.id: record for record in b.tasks if record.error is None}
    common = [record.id for record in a.tasks if record.id in first and record.id in second]
    if not common:
        raise ValueError("compare: expected at least one task that both models played, got none")
    left_out = len({record.id for report in (a, b) for record in report.tasks}) - len(common)
    pairs = [(bool(first[task].success), bool(second[task].success)) for task in common]
    only_a, only_b = pairs.count((True, False)), pairs.count((False, True))
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    n = len(pairs)
    low, high = _bootstrap([y - x for x, y in pairs], samples, seed)
    scores = [(float(first[task].score or 0.0), float(second[task].score or 0.0)) for task in common]
    per_type: dict[str, tuple[int, float, float]] = {}
    for kind in sorted({first[task].type for task in common}):
        chosen = [pair for task, pair in zip(common, pairs, strict=True) if first[task].type == kind]
        size = len(chosen)
        per_type[kind] = (size, sum(x for x, _ in chosen) / size, sum(y for _, y in chosen) / size)
    return Comparison(
        a=a.model,
        b=b.model,
        tasks=n,
        left_out=left_out,
        rate_a=(both + only_a) / n,
        rate_b=(both + only_b) / n,
        difference=(only_b - only_a) / n,
        low=low,
        high=high,
        both=both,
        only_a=only_a,
        only_b=only_b,
        neither=neither,
        p_value=mcnemar(only_a, only_b),
        per_type=per_type,
        score=_difference(scores, samples, seed),
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value that `only_a` and `only_b` are two halves of a fair split (binomial, p = 1/2)."""
    n, k = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, tail / 2 ** (n - 1)) if n else 1.0


def _difference(pairs: Sequence[tuple[float, float]], samples: int, seed: int) -> Difference:
    n = len(pairs)
    a, b = math.fsum(x for x, _ in pairs) / n, math.fsum(y for _, y in pairs) / n
    return Difference(a, b, b - a, *_bootstrap([y - x for x, y in pairs], samples, seed))


def _bootstrap(differences: Sequence[float], samples: int, seed: int) -> tuple[float, float]:
    # Few differences are distinct, so that resampling n tasks is one draw of how often each of them comes up.
    values, counts = np.unique(np.asarray(differences, np.float64), return_counts=True)
    n = len(differences)
    drawn = np.random.default_rng(seed).multinomial(n, counts / n, size=samples)
    low, high = np.quantile(drawn @ values / n, [0.025, 0.975])
    return float(low), float(high)
