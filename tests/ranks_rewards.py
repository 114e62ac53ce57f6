"""Reward functions for test_ranks_runs.py: `--reward_fn ranks_rewards:letters`."""

import itertools
import os
import signal
import time
from pathlib import Path

_calls = itertools.count(1)


def letters(trajectory):
    """The share of vowels among what was sampled: something that even a policy that knows nothing differs in."""
    text = "".join(turn.action for turn in trajectory.turns)
    return sum(letter in "aeiou" for letter in text) / (1 + len(text))


def deadly(trajectory):
    """`letters`, until rank 1 has judged an iteration's two episodes; then that rank is killed, at the time in
    `KILLED_AT`."""
    if os.environ.get("RANK") == "1" and next(_calls) == 3:
        Path(os.environ["KILLED_AT"]).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(trajectory)
