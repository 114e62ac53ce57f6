"""What breaks while episodes are played costs the episode at fault and no other: it is tried once more, then masked and
counted."""

import math
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch
from faulty_world import FaultyCorridor
from test_scheduler import FORMAT, RIGHT, Corridor, Scripted, World, always, make_model, rollout, spec

from manus_fast.agent.trajectory import build_rows
from manus_fast.envs.base import InlineEnvs, Task, failure
from manus_fast.envs.pool import WorkerPool
from manus_fast.rollout.engine import Completion, empty_completion
from manus_fast.rollout.engines.hf import HFEngine
from manus_fast.rollout.scheduler import EpisodeSpec, RolloutConfig
from manus_fast.rollout.seeds import episode_seed, turn_seed


def test_worlds_that_hang_and_workers_that_die():
    names = ["walk", "hang", "walk", "die", "walk", "walk", "walk", "walk"]
    specs = [EpisodeSpec(Task(f"{name}-{i}", "walk", "train", {"goal": 4}), 0, i, 0) for i, name in enumerate(names)]
    envs = WorkerPool(FaultyCorridor, slots=4, step_timeout=0.5)
    began = time.monotonic()
    try:
        play = rollout(Scripted(always(RIGHT)), envs=envs)
        done = play.collect(specs)
    finally:
        envs.close()
    assert time.monotonic() - began < 30  # not the minute that the world would have taken
    assert [t.valid for t in done] == [not name.startswith(("hang", "die")) for name in names]
    assert "ran longer than 0.5 s" in done[1].error and math.isnan(done[1].reward) and not done[1].success
    assert done[3].error.startswith("environment: ") and math.isnan(done[3].reward)
    assert all(t.success and len(t.turns) == 4 for t in done if t.valid)
    stats = play.stats
    assert (stats.episodes, stats.failed, stats.retried, stats.invalid) == (8, 4, 2, 2)
    assert {row.episode for row in build_rows(done)} == {0, 2, 4, 5, 6, 7}


class Deaf(Scripted):
    """An engine that does not hear of aborts and breaks down at one of its polls."""

    def __init__(self, reply, breaks_at):
        super().__init__(reply)
        self.polls, self.breaks_at = 0, breaks_at

    def abort(self, id):
        self.aborted.append(id)

    def poll(self, timeout):
        self.polls += 1
        if self.polls == self.breaks_at:
            raise RuntimeError("engine: 3 steps in a row failed")
        return super().poll(timeout)


@pytest.mark.parametrize("breaks_at", [1, 4, 9])
def test_a_collection_after_one_that_broke_takes_nothing_of_it(breaks_at):
    batch = Corridor(3)
    engine = Deaf(always("Think: back\nAct: go left"), breaks_at)
    play = rollout(engine, slots=3, envs=InlineEnvs(batch))
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        play.collect([spec(member=i) for i in range(6)])
    before = len(engine.requests)
    open_sessions = {r.session for r in engine.requests} - set(engine.ended)
    assert not open_sessions  # no cache is kept for an episode that will not go on
    engine.reply = always(RIGHT)
    for later in (play, rollout(engine, slots=3, envs=InlineEnvs(Corridor(3)))):
        done = later.collect([spec(goal=g, member=g) for g in (1, 2, 3, 2)])
        assert [len(t.turns) for t in done] == [1, 2, 3, 2] and all(t.success for t in done)
        assert [t.turns[0].observation for t in done] == [f"You are at 0 of {g}." for g in (1, 2, 3, 2)]
        assert later.stats.turns == 8 and later.stats.failed == 0
    assert len(engine.requests) - before == 16
    assert len({r.id for r in engine.requests}) == len(engine.requests)


def test_an_engine_that_fails_some_requests_loses_those_episodes_only():
    engine = Scripted(lambda request: (RIGHT, "error" if request.seed in broken else "stop"))
    broken = set()
    play = rollout(engine, slots=4)
    specs = [spec(goal=2, group=i, seed=i) for i in range(8)]
    play.collect(specs[3:4])
    broken = {engine.requests[-1].seed}  # the second turn of one episode, at every attempt
    done = play.collect(specs)
    assert [t.valid for t in done] == [i != 3 for i in range(8)] and done[3].error == "engine: out of memory"
    assert (play.stats.failed, play.stats.retried, play.stats.invalid) == (2, 1, 1)


# With a real engine: what one episode meets changes no token of another.

SPECS = [spec(goal=9, group=i // 4, member=i % 4, seed=episode_seed(0, 0, i // 4)) for i in range(12)]
AT_FAULT = 5


def play_for_real(disturb=None):
    """(episodes, stats) of the hf engine; `disturb(engine)` is called before each of its polls."""
    engine = HFEngine(make_model(), FORMAT.end_ids, max_slots=4, max_length=600)
    whole = engine.poll

    def poll(timeout):
        if disturb is not None:
            disturb(engine)
        return whole(timeout)

    engine.poll = poll
    play = rollout(engine, slots=4, max_turn_tokens=8, world=World(max_steps=4))
    return play.collect(SPECS), play.stats


@pytest.fixture(scope="module")
def undisturbed():
    episodes, stats = play_for_real()
    assert stats.failed == 0 and {len(t.turns) for t in episodes} == {4}
    return episodes


def same_tokens(a, b):
    return len(a.turns) == len(b.turns) and all(
        np.array_equal(x.prompt_ids, y.prompt_ids) and np.array_equal(x.ids, y.ids)
        for x, y in zip(a.turns, b.turns, strict=True)
    )


@pytest.mark.parametrize("fault", ["aborted", "not finite"])
def test_a_request_that_fails_costs_its_episode_alone(undisturbed, fault):
    at_fault = SPECS[AT_FAULT]
    seed = turn_seed(at_fault.seed, at_fault.group, at_fault.member, 2)  # its third turn, at both attempts

    def disturb(engine):
        for request in [r for r in [*engine._requests, *engine._queue] if r is not None and r.seed == seed]:
            if fault == "aborted":
                engine.abort(request.id)
            else:
                engine._temperature[engine._seed == seed] = math.nan

    episodes, stats = play_for_real(disturb)
    assert [t.valid for t in episodes] == [i != AT_FAULT for i in range(12)]
    lost = episodes[AT_FAULT]
    assert fault in lost.error or "finite" in lost.error
    assert math.isnan(lost.reward) and not lost.success and len(lost.turns) == 2
    assert (stats.failed, stats.retried, stats.invalid) == (2, 1, 1)
    assert all(same_tokens(a, b) for a, b in zip(episodes, undisturbed, strict=True) if a.valid)
    assert {row.episode for row in build_rows(episodes)} == {i for i in range(12) if i != AT_FAULT}


@pytest.mark.parametrize("in_a_row", [1, 2])
def test_an_engine_without_memory_for_a_step_loses_no_episode(undisturbed, in_a_row):
    steps = []

    def broken(*_):
        raise torch.OutOfMemoryError("no memory left")

    def disturb(engine):
        steps.append(int(engine._busy.sum()))
        if len(steps) == 30 or (in_a_row == 1 and len(steps) % 7 == 0):
            engine._sample = broken  # where the logits of all tokens are made
        elif len(steps) != 31 or in_a_row == 1:
            engine.__dict__.pop("_sample", None)

    episodes, stats = play_for_real(disturb)
    assert len(steps) > 60 and steps[30] >= 2
    assert stats.failed == stats.retried == (0 if in_a_row == 1 else steps[30]) and stats.invalid == 0
    assert all(same_tokens(a, b) for a, b in zip(episodes, undisturbed, strict=True))


class Unruly(Scripted):
    """An engine that answers in any order, some at a time, and fails some requests in every way there is."""

    def __init__(self, draw, rate):
        super().__init__(always(RIGHT))
        self.draw, self.rate, self.faults = draw, rate, []

    def poll(self, timeout):
        completions = []
        for request in self.draw.sample(self.waiting, self.draw.randint(0, len(self.waiting))):
            self.waiting.remove(request)
            fault = self.draw.random() < self.rate and self.draw.choice(["error", "abort", "too long"])
            done = Completion(
                request.id, FORMAT.reply(RIGHT), np.zeros(len(FORMAT.reply(RIGHT)), np.float32), "stop", 4
            )
            if fault:
                self.faults.append((request.session, fault))
                done = empty_completion(request.id, "abort" if fault == "abort" else "error", 4, fault)
                done.too_long = fault == "too long"
            completions.append(done)
        return completions


class UnrulyEnvs(InlineEnvs):
    """Worlds that answer in any order, late, and fail some resets and steps."""

    def __init__(self, batch, draw, rate):
        super().__init__(batch)
        self.draw, self.rate, self.faults, self.late = draw, rate, 0, []
        self.attempts = Counter()

    def send_reset(self, slot, task, seed):
        self.attempts[seed] += 1
        super().send_reset(slot, task, seed)

    def poll(self, timeout):
        for slot, result in super().poll(timeout):
            if self.draw.random() < self.rate:
                self.faults += 1
                result = failure("the world broke")
            self.late.append((slot, result))
        ready = self.draw.sample(self.late, self.draw.randint(0, len(self.late)))
        self.late = [one for one in self.late if not any(one is other for other in ready)]
        return ready


def test_whatever_fails_every_episode_comes_back_once_and_is_masked_only_after_two_faults():
    for seed in range(400):
        draw = random.Random(seed)
        slots, rate = draw.randint(1, 6), draw.choice([0.0, 0.05, 0.3, 0.8])
        engine, envs = Unruly(draw, rate), UnrulyEnvs(Corridor(slots), draw, rate / 2)
        play = rollout(engine, slots=slots, envs=envs)
        specs = [spec(goal=draw.randint(1, 4), member=i, seed=i) for i in range(draw.randint(1, 14))]
        ended = []
        done = play.collect(specs, on_done=ended.append)
        assert [(t.task, t.member) for t in done] == [(one.task.id, one.member) for one in specs]
        assert sorted(map(id, ended)) == sorted(map(id, done))
        assert not engine.waiting and not play._playing and not play._asked and not envs.late
        assert len(engine.ended) == len(set(engine.ended)) and {r.session for r in engine.requests} <= set(engine.ended)
        stats, cut = play.stats, [fault for _, fault in engine.faults if fault == "too long"]
        assert stats.failed == envs.faults + len(engine.faults) - len(cut)
        masked = [t for t in done if not t.valid]
        at_once = [t for t in masked if t.error.startswith("prompt: ")]
        assert stats.invalid == len(masked) and stats.failed == stats.retried + len(masked) - len(at_once)
        assert stats.retried == sum(envs.attempts.values()) - len(specs)
        assert (
            all(envs.attempts[t.member] == 2 for t in masked if t not in at_once) and max(envs.attempts.values()) <= 2
        )
        assert stats.truncated == sum(t.truncated for t in done) == len(cut) - len(at_once)
        for one, t in zip(specs, done, strict=True):
            assert math.isnan(t.reward) == (not t.valid)
            assert not t.valid or t.truncated or (t.success and len(t.turns) == one.task.data["goal"])
            assert [turn.observation for turn in t.turns] == [
                f"You are at {at} of {one.task.data['goal']}." for at in range(len(t.turns))
            ]


def test_oversubscribed_slots_keep_the_engine_busy_while_worlds_are_slow():
    class Slow(InlineEnvs):
        """Each answer is there at the fourth poll after it was asked for."""

        def __init__(self, batch):
            super().__init__(batch)
            self.clock, self.late = 0, []

        def poll(self, timeout):
            self.clock += 1
            self.late += [(self.clock + 3, answer) for answer in super().poll(timeout)]
            ready = [answer for due, answer in self.late if due <= self.clock]
            self.late = [(due, answer) for due, answer in self.late if due > self.clock]
            return ready

    def waits(oversubscription):
        engine, idle = Scripted(always(RIGHT)), []
        whole = engine.poll

        def poll(timeout):
            idle.append(not engine.waiting)
            return whole(timeout)

        engine.poll = poll
        envs = Slow(Corridor(8))
        play = rollout(engine, slots=2, envs=envs, oversubscription=oversubscription, world=World(max_steps=8))
        done = play.collect([spec(goal=4, member=i) for i in range(12)])
        assert all(t.success and len(t.turns) == 4 for t in done) and [t.member for t in done] == list(range(12))
        return envs.clock

    assert waits(3.0) < 0.6 * waits(1.0)
    assert RolloutConfig(slots=3, oversubscription=1.5).episodes == 5
    with pytest.raises(ValueError, match=r"rollout\.oversubscription: expected a number >= 1, got 0.5"):
        RolloutConfig(oversubscription=0.5)


def test_versions_of_tokens_are_kept_with_their_turn():
    class Updated(Scripted):
        def poll(self, timeout):
            completions = super().poll(timeout)
            for completion in completions:
                completion.versions = np.arange(len(completion.ids), dtype=np.int32)
            return completions

    (t,) = rollout(Updated(always(RIGHT))).collect([spec(goal=1)])
    np.testing.assert_array_equal(t.turns[0].versions, range(len(t.turns[0].ids)))
    again = type(t).from_json(t.to_json())
    np.testing.assert_array_equal(again.turns[0].versions, t.turns[0].versions)
