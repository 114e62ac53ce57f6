"""Panels, their figures, and the comparison of two models, on hand-made episodes with known answers."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.envs.base import Task
from manus_fast.evaluate import Panel, Report, compare, evaluate, make_panel
from manus_fast.evaluate.comparison import mcnemar
from manus_fast.evaluate.metrics import wilson
from manus_fast.evaluate.panels import spread


@dataclass
class World:
    """An environment of ten tasks of two types."""

    name: str = "world"
    splits: tuple = ("valid", "empty")

    def tasks(self, split):
        return [Task(f"t{i}", "clean" if i % 2 else "heat", split) for i in range(10 if split == "valid" else 0)]


def episode(task, success, steps=2, refused=0, malformed=0, tokens=3, error=None):
    turns = [
        Turn(
            np.zeros(4, np.int32),
            np.zeros(tokens, np.int32),
            np.zeros(tokens, np.float32),
            "stop",
            admissible=i >= refused,
            format_ok=i >= malformed,
        )
        for i in range(steps)
    ]
    return Trajectory(
        f"e-{task.id}", "world", task.id, task.type, task.split, 0, 0, 0, turns, success=success,
        terminated=success, truncated=not success, error=error,
    )  # fmt: skip


def report(model, solved, failed=(), split="valid"):
    panel = make_panel(World(), "valid")
    result = evaluate(
        panel,
        lambda tasks: [episode(t, t.id in solved, error="lost" if t.id in failed else None) for t in tasks],
        model,
    )
    result.split = split
    return result


def test_panel_is_the_split_in_order():
    assert [task.id for task in make_panel(World(), "valid").tasks] == [f"t{i}" for i in range(10)]
    limited = [task.id for task in make_panel(World(), "valid", 4).tasks]
    assert len(set(limited)) == 4 and limited == sorted(limited)
    assert limited == [task.id for task in make_panel(World(), "valid", 4).tasks]


@pytest.mark.parametrize(
    ("n", "k"), [(512, 128), (512, 256), (140, 35), (600, 100), (100_000, 250), (1, 1), (2, 1), (7, 7)]
)
def test_a_limit_spreads_over_the_split_and_over_any_round_of_types(n, k):
    chosen = spread(n, k)
    assert len(set(chosen)) == k and chosen == sorted(chosen) and chosen[0] >= 0 and chosen[-1] < n
    gaps = np.diff([-1, *chosen, n])
    assert gaps.max() <= 2 * n / k + 1
    for types in (2, 3, 4, 5, 6):
        if k >= 30:
            counts = np.bincount(np.array(chosen) % types, minlength=types)
            assert counts.min() >= 0.6 * k / types, (types, counts)


@pytest.mark.parametrize("limit", [0, 11, -1])
def test_panel_limit_out_of_range(limit):
    with pytest.raises(ValueError, match=r"panel.limit: expected 1 to 10"):
        make_panel(World(), "valid", limit)


def test_panel_without_tasks_or_with_a_task_twice():
    with pytest.raises(ValueError, match="at least one task in world/empty"):
        make_panel(World(), "empty")
    with pytest.raises(ValueError, match="distinct task ids"):
        Panel("world", "valid", (Task("a", "x", "valid"), Task("a", "y", "valid")))


def test_report_figures():
    def play(tasks):
        out = []
        for i, task in enumerate(tasks):
            # t0..t3 succeed in 4 turns, one refused; t4..t8 fail in 8 turns, two malformed; t9 is lost.
            if i < 4:
                out.append(episode(task, True, steps=4, refused=1, tokens=5))
            elif i < 9:
                out.append(episode(task, False, steps=8, malformed=2, tokens=2))
            else:
                out.append(episode(task, False, steps=1, refused=1, malformed=1, tokens=7, error="worker lost"))
        return out[::-1]

    result = evaluate(make_panel(World(), "valid"), play, "m")
    assert [record.id for record in result.tasks] == [f"t{i}" for i in range(10)]
    summary = result.summary
    assert (summary.tasks, summary.failed) == (10, 1)
    assert (summary.success.k, summary.success.n) == (4, 9)
    assert summary.success.rate == summary.score == pytest.approx(4 / 9)
    assert (summary.per_type["heat"].k, summary.per_type["heat"].n) == (2, 5)
    assert (summary.per_type["clean"].k, summary.per_type["clean"].n) == (2, 4)
    assert summary.mean_steps == pytest.approx((4 * 4 + 5 * 8) / 9)
    assert summary.mean_steps_success == 4
    assert summary.valid_action_rate == pytest.approx(1 - 4 / 56)
    assert summary.format_rate == pytest.approx(1 - 10 / 56)
    assert summary.truncated_rate == pytest.approx(5 / 9)
    assert summary.tokens == 4 * 4 * 5 + 5 * 8 * 2 + 7
    assert result.tasks[9].success is None and result.tasks[9].score is None


def test_own_score():
    panel = make_panel(World(), "valid")
    result = evaluate(panel, lambda tasks: [episode(t, False) for t in tasks], "m", score=lambda t: 0.25)
    assert result.summary.score == 0.25 and result.summary.success.rate == 0


def scored(model, scores):
    """A report of episodes that have the environment's own scores."""

    def play(tasks):
        return [replace(episode(t, s == 1.0), score=s) for t, s in zip(tasks, scores, strict=True)]

    return evaluate(make_panel(World(), "valid"), play, model)


def test_the_environments_own_score_is_reported_beside_success():
    result = scored("m", [1.0, 0.75, 0.5, 0.25, 0.0] * 2)
    assert result.summary.score == pytest.approx(0.5) and result.summary.success.rate == 0.2
    assert [record.score for record in result.tasks[:5]] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert report("m", {"t1"}).summary.score == 0.1  # without one it is success


def test_scores_are_compared_task_by_task():
    a, b = scored("a", [0.0, 0.5] * 5), scored("b", [0.5, 1.0] * 5)
    score = compare(a, b).score
    # Every task rises by exactly a half, so that no resampling changes the difference.
    assert (score.a, score.b, score.difference, score.low, score.high) == pytest.approx((0.25, 0.75, 0.5, 0.5, 0.5))
    plain = compare(report("a", {"t0"}), report("b", {"t0", "t1", "t2"}))
    assert (plain.score.a, plain.score.b) == (plain.rate_a, plain.rate_b)
    assert (plain.score.low, plain.score.high) == pytest.approx((plain.low, plain.high))
    rises = np.array([0.5, 0.25, -0.25, 0.0, 0.25] * 2)
    result = compare(scored("a", [0.5] * 10), scored("b", list(0.5 + rises)), samples=100_000).score
    means = np.random.default_rng(1).choice(rises, size=(100_000, 10)).mean(1)
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.026)


@pytest.mark.parametrize(
    "play",
    [
        lambda tasks: [episode(task, True) for task in tasks[1:]],
        lambda tasks: [episode(task, True) for task in [*tasks, tasks[0]]],
        lambda tasks: [episode(task, True) for task in [*tasks, Task("other", "heat", "valid")]],
    ],
)
def test_each_task_exactly_once(play):
    with pytest.raises(RuntimeError, match="evaluate:"):
        evaluate(make_panel(World(), "valid"), play, "m")


def test_eval_json_keeps_the_contract_and_reads_back(tmp_path):
    before = report("m", {"t1"}, failed={"t2"})
    before.save(tmp_path / "eval.json")
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]
    record = json.loads((tmp_path / "eval.json").read_text(), parse_constant=pytest.fail)
    assert set(record) >= {"schema", "suite", "split", "model", "tasks", "summary"}
    assert set(record["tasks"][0]) >= {"id", "type", "success", "score", "steps", "tokens"}
    assert Report.load(tmp_path / "eval.json") == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "x"}', '{"schema": "manus_fast.eval.v1"}', "\xff"])
def test_not_an_eval_json(tmp_path, text):
    (tmp_path / "eval.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^eval"):
        Report.load(tmp_path / "eval.json")
    with pytest.raises(ValueError, match="found no file"):
        Report.load(tmp_path / "none.json")


# Closed form for k = 0: the interval is [0, z²/(n+z²)]; the others by hand from the quadratic.
@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (5, 10), (81, 263), (1, 1), (199, 200)])
def test_wilson_ends_solve_its_quadratic(k, n):
    """The ends are where |k/n - p| = z·sqrt(p(1-p)/n), which is how the interval is defined."""
    low, high = wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1
    for end in (low, high):
        assert (k / n - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / n, abs=1e-12)


def test_wilson_known_value_and_bad_input():
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert all(math.isnan(end) for end in wilson(0, 0))
    with pytest.raises(ValueError, match="k: expected"):
        wilson(3, 2)


def test_compare_counts_and_difference():
    a = report("a", {"t0", "t1", "t2"}, failed={"t9"})
    b = report("b", {"t1", "t2", "t3", "t4", "t5"}, failed={"t8"})
    result = compare(a, b)
    assert (result.tasks, result.left_out) == (8, 2)
    assert (result.both, result.only_a, result.only_b, result.neither) == (2, 1, 3, 2)
    assert result.difference == pytest.approx(2 / 8) == result.rate_b - result.rate_a
    assert result.low <= result.difference <= result.high
    assert result.per_type["heat"] == (4, 0.5, 0.5)
    assert result.per_type["clean"] == (4, 0.25, 0.75)
    assert result == compare(a, b)


def test_compare_is_antisymmetric_and_zero_for_equals():
    a, b = report("a", {"t0", "t1"}), report("b", {"t1", "t2", "t3"})
    assert compare(a, b).difference == -compare(b, a).difference
    same = compare(a, report("c", {"t0", "t1"}))
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)


def test_bootstrap_interval_matches_resampling_the_tasks():
    a = report("a", {"t0", "t1", "t2"})
    b = report("b", {"t2", "t3", "t4", "t5", "t6", "t7"})
    differences = np.array([bool(y.success) - bool(x.success) for x, y in zip(a.tasks, b.tasks, strict=True)], float)
    rng = np.random.default_rng(1)
    means = rng.choice(differences, size=(100_000, 10)).mean(1)
    expected = np.quantile(means, [0.025, 0.975])
    result = compare(a, b, samples=100_000)
    assert (result.low, result.high) == pytest.approx(tuple(expected), abs=0.101)  # the means lie on a grid of 0.1


# Two-sided binomial tails by hand: 2·(1)/2^5, 2·(1+9)/2^9, 2·(1+5+10)/2^5.
@pytest.mark.parametrize(("x", "y", "p"), [(0, 5, 0.0625), (1, 8, 20 / 512), (2, 3, 1.0), (4, 4, 1.0), (0, 0, 1.0)])
def test_mcnemar(x, y, p):
    assert mcnemar(x, y) == pytest.approx(p) == mcnemar(y, x)


def test_compare_refuses_other_panels():
    with pytest.raises(ValueError, match="one suite and split"):
        compare(report("a", set()), report("b", set(), split="other"))
    with pytest.raises(ValueError, match="at least one task"):
        compare(report("a", set(), failed={f"t{i}" for i in range(10)}), report("b", set()))
