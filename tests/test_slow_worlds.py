"""Worlds that answer late, by hand on a clock of their own."""

import json

import pytest

from benchmarks.slow_worlds import MEASURED, Delay, SlowWorlds
from manus_fast.envs.base import StepResult


class Inner:
    slots = 4

    def __init__(self):
        self.sent, self.closed = [], False

    def send_reset(self, slot, task, seed):
        self.sent.append((slot, StepResult(f"reset {task} {seed}", 0.0, False, False, {})))

    def send_step(self, slot, action):
        self.sent.append((slot, StepResult(action, 0.0, False, False, {})))

    def poll(self, timeout):
        sent, self.sent = self.sent, []
        return sent

    def close(self):
        self.closed = True


@pytest.fixture
def time():
    class Time:
        now = 10.0

        def sleep(self, seconds):
            assert seconds > 0
            self.now += seconds

    return Time()


def test_a_worker_serves_its_slots_one_after_another(time):
    worlds = SlowWorlds(Inner(), Delay(reset=3.0, step=1.0, workers=2), lambda: time.now, time.sleep)
    assert worlds.slots == 4 and worlds.poll(1.0) == []  # nothing was sent: nothing is waited for
    worlds.send_reset(0, "task", 7)
    worlds.send_step(1, "look")
    worlds.send_step(2, "go")  # behind the reset of slot 0, on worker 0
    worlds.send_step(3, "open")  # behind slot 1's step, on worker 1
    assert worlds.poll(0.0) == [] and time.now == 10.0
    answers = []
    while len(answers) < 4:
        answers += [(time.now, slot, result.observation) for slot, result in worlds.poll(5.0)]
    assert answers == [(11.0, 1, "look"), (12.0, 3, "open"), (13.0, 0, "reset task 7"), (14.0, 2, "go")]
    worlds.close()
    assert worlds.inner.closed


def test_a_poll_waits_no_longer_than_it_may(time):
    worlds = SlowWorlds(Inner(), Delay(reset=3.0, step=1.0, workers=1), lambda: time.now, time.sleep)
    worlds.send_step(0, "look")
    assert worlds.poll(0.25) == [] and time.now == 10.25
    time.now = 12.0
    assert [slot for slot, _ in worlds.poll(0.25)] == [0] and time.now == 12.0


def test_the_delay_is_what_was_measured():
    measured = json.loads(MEASURED.read_text())["ms"]["stock"]
    delay = Delay.measured(workers=3)
    assert (delay.reset, delay.step, delay.workers) == (measured["reset"] / 1e3, measured["step"] / 1e3, 3)
    assert Delay.measured().workers >= 1
