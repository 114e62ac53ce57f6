"""What a collection says of its time."""

import pytest
from test_scheduler import RIGHT, Corridor, Scripted, always, rollout, spec

from manus_fast.envs.base import InlineEnvs


def test_the_engine_is_idle_where_it_has_no_request(monkeypatch):
    """A clock that worlds and the engine move: a world takes 3 s to begin and 1 s a step, a reply 5 s."""
    clock = [0.0]
    monkeypatch.setattr("manus_fast.rollout.scheduler.time.perf_counter", lambda: clock[0])

    class SlowWorlds(InlineEnvs):
        def poll(self, timeout):
            clock[0] += 3.0 * bool(self._resets) + 1.0 * bool(self._steps)
            return super().poll(timeout)

    class SlowEngine(Scripted):
        def poll(self, timeout):
            clock[0] += 5.0
            return super().poll(timeout)

    play = rollout(SlowEngine(always(RIGHT)), slots=1, envs=SlowWorlds(Corridor(1)))
    play.collect([spec(goal=2)])
    stats = play.stats
    assert (stats.seconds, stats.idle_seconds, stats.engine_seconds, stats.env_seconds) == (15.0, 5.0, 10.0, 5.0)
    assert stats.idle_share == pytest.approx(1 / 3) and stats.host_share == pytest.approx(1 / 3)
    # Two slots: while one world is asked, the engine has the other's request.
    play = rollout(SlowEngine(always(RIGHT)), slots=2, envs=SlowWorlds(Corridor(2)))
    play.collect([spec(goal=2), spec(goal=2, member=1)])
    stats = play.stats
    assert stats.engine_seconds == 20.0 and stats.seconds == 20.0 + stats.env_seconds
    assert 3.0 < stats.idle_seconds < stats.env_seconds and stats.metrics()["rollout/idle_share"] == stats.idle_share
