"""Loops with barriers that the benchmark compares with: they play the same episodes, and ask when they say they do."""

import numpy as np
import pytest

from benchmarks.bench_rollout_host import Instant
from benchmarks.rollout_games import Case, Games
from benchmarks.rollout_setting import Lockstep, UsualWay
from benchmarks.slow_worlds import Delay, over_slow_worlds
from manus_fast.rollout.scheduler import Rollout

SLOTS = 4


@pytest.fixture(scope="module")
def games():
    return Games(Case(SLOTS, 10, 6, 8192))


class Watched(Instant):
    """Remembers how many requests were there when it was asked for answers; it answers one at a time."""

    def __init__(self, games):
        super().__init__(games, ready=1)
        self.asked = 0
        self.turns: list[int] = []
        """Requests of each turn: how many were waiting when the first of them was answered."""

    def submit(self, request):
        self.asked += 1
        super().submit(request)

    def poll(self, timeout):
        if not self.turns or self._left == 0:
            self.turns.append(len(self._waiting))
            self._left = len(self._waiting)
        self._left -= 1
        return super().poll(timeout)


def play(games, kind):
    rollout = games.rollout(Watched(games), kind)
    trajectories = rollout.collect(games.specs())
    rollout.envs.close()
    return trajectories, rollout


def turns_by_wave(trajectories):
    lengths = [len(t.turns) for t in trajectories]
    return [lengths[start : start + SLOTS] for start in range(0, len(lengths), SLOTS)]


@pytest.mark.parametrize("kind", [Lockstep, UsualWay, over_slow_worlds(Delay(1e-4, 1e-4, 2), UsualWay)])
def test_barriers_change_no_episode(games, kind):
    free, _ = play(games, Rollout)
    held, rollout = play(games, kind)
    for one, other in zip(free, held, strict=True):
        assert one.id == other.id and one.success == other.success
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(one.turns, other.turns, strict=True))
    assert rollout.stats.sampled_tokens == sum(t.sampled_tokens for t in held)


def test_a_turn_of_lockstep_begins_when_all_worlds_have_answered(games):
    trajectories, rollout = play(games, Lockstep)
    expected = [
        sum(turn < length for length in wave) for wave in turns_by_wave(trajectories) for turn in range(max(wave))
    ]
    assert rollout.engine.turns == expected


def test_the_usual_way_replies_for_episodes_that_are_over(games):
    trajectories, rollout = play(games, UsualWay)
    waves = turns_by_wave(trajectories)
    assert any(len(set(wave)) > 1 for wave in waves)  # else nothing goes on
    assert rollout.engine.turns == [len(wave) for wave in waves for _ in range(max(wave))]
    assert rollout.engine.asked == sum(len(wave) * max(wave) for wave in waves)
