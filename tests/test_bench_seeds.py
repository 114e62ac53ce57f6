"""Experiments over several seeds, one after another and side by side."""

import argparse
import os
import time

import pytest

from benchmarks.seeds import add_arguments, over_seeds, side_by_side, split


def where(seed: int) -> tuple[int, set[int]]:
    return seed, os.sched_getaffinity(0)


def asleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_cores_are_split_into_equal_parts():
    assert split([0, 1, 2, 3, 4, 5, 6], 3) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="jobs: expected at most 2, the number of cores, got 3"):
        split([4, 5], 3)


def test_one_job_runs_in_this_process():
    assert list(over_seeds(where, parsed("--seeds", "3", "1"))) == [(3, os.sched_getaffinity(0)), (1, where(1)[1])]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_jobs_keep_the_order_and_hold_to_cores_of_their_own():
    results = list(over_seeds(where, parsed("--seeds", "5", "0", "2", "--jobs", "2")))
    assert [seed for seed, _ in results] == [5, 0, 2]
    assert all(len(cores) == len(os.sched_getaffinity(0)) // 2 for _, cores in results)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_what_is_over_first_comes_first_where_the_order_is_left_open():
    assert list(side_by_side(asleep, [3.0, 0.0], parsed("--jobs", "2"), ordered=False)) == [0.0, 3.0]
