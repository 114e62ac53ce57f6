"""Episodes that go on across updates: none is lost or older than allowed, and every token knows its policy version."""

import copy

import numpy as np
import pytest
import torch
from learning import tiny_model  # noqa: F401  (one thread)
from test_scheduler import FORMAT, RIGHT, Corridor, LateEnvs, Scripted, always, make_model, rollout, spec
from test_trainer import folder, make, metrics  # noqa: F401  (a fixture)

from manus_fast.agent.trajectory import build_rows
from manus_fast.envs.base import InlineEnvs, failure
from manus_fast.modeling import packed_hidden
from manus_fast.rollout.engines.hf import HFEngine
from manus_fast.rollout.seeds import episode_seed, turn_seed


def iteration(number, count=6, goals=(1, 2, 3)):
    return [
        spec(goal=goals[i % len(goals)], group=i // 2, member=i % 2, seed=episode_seed(0, number, i // 2))
        for i in range(count)
    ]


def names(trajectories):
    return [(t.task, t.seed, t.group, t.member) for t in trajectories]


def asked(specs):
    return [s.name for s in specs]


def test_empty_slots_begin_what_is_asked_for_later():
    engine = Scripted(always(RIGHT))
    play = rollout(engine, slots=4, envs=LateEnvs(Corridor(4)), staleness=1)
    seen, carried, stale = [], 0, 0
    for number in range(4):
        engine.version = number
        done = play.collect(iteration(number), on_done=seen.append, ahead=iteration(number + 1))
        assert names(done) == asked(iteration(number))
        assert all(t.success and len(t.turns) == int(t.task[-1]) for t in done)
        assert {turn.version for t in done for turn in t.turns} <= {number, number - 1}
        old = sum(turn.version < number for t in done for turn in t.turns)
        stats = play.stats
        assert stats.carried > 0 or number == 0
        assert stats.stale_tokens == old * len(FORMAT.reply(RIGHT))
        assert stats.given_tokens == sum(t.sampled_tokens for t in done)
        assert stats.too_old == stats.dropped == stats.invalid == 0
        assert stats.metrics()["rollout/stale_share"] == pytest.approx(stats.stale_tokens / stats.given_tokens)
        carried, stale = carried + stats.carried, stale + old
    assert len(seen) == 24 and carried > 3 and stale > 3 and engine.most <= 4
    begun = len(play._playing) + len(play._kept)
    play.stop()
    # Every turn was asked for once: what went on was not begun again.
    given = sum(len(t.turns) for t in seen)
    assert given <= len(engine.requests) <= given + 3 * begun


def test_without_episodes_ahead_nothing_is_left_under_way():
    engine = Scripted(always(RIGHT))
    play = rollout(engine, slots=4, staleness=3)
    play.collect(iteration(0))
    assert not play._playing and not play._kept and not engine.waiting and play.stats.carried == 0


class Holding(Scripted):
    """Answers none of the requests with the seeds `held`."""

    held = frozenset()

    def poll(self, timeout):
        ready = [r for r in self.waiting if r.seed not in self.held]
        if not ready:
            return []
        self.waiting.remove(ready[0])
        self.waiting.append(ready[0])  # the last is answered
        return super().poll(timeout)


def seeds_of(specs, turn=0):
    return frozenset(turn_seed(s.seed, s.group, s.member, turn) for s in specs)


def test_a_request_that_an_update_interrupts_goes_on():
    engine, later = Holding(always(RIGHT)), spec(goal=2, seed=5, member=1)
    play = rollout(engine, slots=8, staleness=1)
    engine.held = seeds_of([later], turn=1)
    play.collect([spec(goal=9)], ahead=[later])
    (waits,) = engine.waiting
    engine.version, engine.held = 5, frozenset()
    (t,) = play.collect([later])
    assert t.valid and t.success and [turn.version for turn in t.turns] == [4, 5]
    assert play.stats.carried == 1 and not engine.aborted
    assert [r.id for r in engine.requests if r.seed == waits.seed] == [waits.id]
    assert play.stats.turns == 1 and play.stats.stale_tokens == len(t.turns[0].ids)


def test_what_is_older_than_the_bound_is_masked_and_counted():
    engine = Scripted(always(RIGHT))
    play = rollout(engine, slots=12, staleness=1)
    play.collect(iteration(0), ahead=iteration(1))
    engine.version += 2
    done = play.collect(iteration(1))
    old = [t for t in done if not t.valid]
    assert 0 < len(old) == play.stats.too_old == play.stats.invalid
    assert old[0].error == "staleness: expected tokens at most 1 versions old, got 2 versions"
    assert {row.episode for row in build_rows(done)} == {n for n, t in enumerate(done) if t.valid}


def test_what_nobody_asks_for_is_dropped_and_counted():
    engine = Scripted(always(RIGHT))
    play = rollout(engine, slots=12, staleness=1)
    play.collect(iteration(0), ahead=iteration(1))
    begun = len(play._playing) + len(play._kept)
    assert begun > 0
    done = play.collect(iteration(2))
    assert play.stats.dropped == begun and names(done) == asked(iteration(2)) and not play._kept
    done = play.collect(iteration(3))
    assert play.stats.dropped == 0 and play.stats.carried == 0 and all(t.success for t in done)


def test_what_nobody_asks_for_gives_its_slot_back_at_once():
    engine, later = Holding(always(RIGHT)), iteration(1, count=2, goals=(3,))
    play = rollout(engine, slots=3, staleness=1)
    engine.held = seeds_of(later)
    play.collect([spec(goal=2)], ahead=later)
    held = list(engine.waiting)
    assert len(held) == 2
    engine.most = 0
    done = play.collect(iteration(2), ahead=iteration(3, count=2))
    assert all(t.success for t in done) and engine.most == 3  # two would be the most that a kept slot left
    assert engine.aborted == [r.id for r in held] and {r.session for r in held} <= set(engine.ended)
    assert play.stats.dropped == 2 and play.stats.failed == play.stats.retried == 0
    engine.held = frozenset()
    dropped = len([s for s in iteration(3, count=2) if s.name in begun_by(play)])
    again = play.collect(later)  # they are asked for after all: begun anew, and counted no second time
    assert names(again) == asked(later) and all(t.success and len(t.turns) == 3 for t in again)
    assert play.stats.carried == 0 and play.stats.dropped == dropped
    play.collect(later)
    assert play.stats.dropped == 0


def begun_by(play):
    return {episode.spec.name for episode in play._playing.values()} | set(play._kept)


class BusyEnvs(InlineEnvs):
    """Keeps the answers of slots in `busy` until they are taken out of it; takes nothing for a slot without an answer,
    as worlds in worker processes do."""

    def __init__(self, batch):
        super().__init__(batch)
        self.busy, self.held, self.open = set(), [], set()

    def send_reset(self, slot, task, seed):
        assert slot not in self.open
        self.open.add(slot)
        super().send_reset(slot, task, seed)

    def send_step(self, slot, action):
        assert slot not in self.open
        self.open.add(slot)
        super().send_step(slot, action)

    def poll(self, timeout):
        answers = self.held + super().poll(timeout)
        self.held = [answer for answer in answers if answer[0] in self.busy]
        ready = [answer for answer in answers if answer[0] not in self.busy]
        self.open -= {slot for slot, _ in ready}
        return ready


@pytest.mark.parametrize("breaks", [False, True])
def test_a_slot_whose_world_is_busy_is_free_when_it_has_answered(breaks):
    envs = BusyEnvs(Corridor(2))
    play = rollout(Scripted(always(RIGHT)), slots=2, envs=envs, staleness=1)
    envs.busy = {1}
    play.collect([spec(goal=1)], ahead=[spec(goal=3, seed=5)])
    assert play._playing[1].spec.seed == 5
    done = play.collect([spec(goal=1, seed=n) for n in range(3)])
    assert all(t.success for t in done) and play.stats.dropped == 1
    envs.busy = set()
    if breaks:
        envs.held = [(1, failure("the world broke"))]
    done = play.collect([spec(goal=2, seed=n) for n in range(4)])
    assert all(t.success for t in done) and not play._stepping and envs.batch.state[1][0].data["goal"] == 2
    assert play.stats.dropped == play.stats.failed == play.stats.retried == 0


def test_stopping_gives_up_what_is_under_way():
    engine = Scripted(always(RIGHT))
    envs = LateEnvs(Corridor(12))
    play = rollout(engine, slots=12, envs=envs, staleness=1)
    play.collect(iteration(0), ahead=iteration(1))
    play.stop()
    assert not engine.waiting and not play._playing
    done = play.collect(iteration(1))
    assert play.stats.carried == 0 and all(t.success for t in done)


def test_two_rollouts_over_one_engine_keep_their_replies():
    engine, later = Holding(always(RIGHT)), iteration(1, goals=(3,))
    play = rollout(engine, slots=12, staleness=1)
    engine.held = seeds_of(later)
    play.collect(iteration(0, goals=(9,)), ahead=later)
    assert len(engine.waiting) == 6
    engine.held = frozenset()
    other = rollout(engine, slots=12, stray=play.receive)
    measured = other.collect([spec(goal=2, group=9, member=n) for n in range(20)])
    assert all(t.success for t in measured) and len(play._early) == 6
    before = len(engine.requests)
    done = play.collect(later)
    assert all(t.success and len(t.turns) == 3 for t in done)
    assert play.stats.carried == 6 and play.stats.retried == 0 and len(engine.requests) - before == 12


def log_probs_of(model, rows):
    ids = torch.from_numpy(np.concatenate([row.token_ids for row in rows]))
    lengths = [len(row) for row in rows]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        hidden = packed_hidden(model, ids, positions, cu_seqlens, max(lengths))
        scored = model.lm_head(hidden[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], scored.numpy()])


def test_stored_log_probs_are_those_of_each_tokens_own_version():
    models = [make_model()]
    for number in range(1, 3):
        torch.manual_seed(number)
        models.append(copy.deepcopy(models[0]))
        with torch.no_grad():
            for p in models[-1].parameters():
                p.add_(0.02 * torch.randn_like(p))
    engine = HFEngine(copy.deepcopy(models[0]), FORMAT.end_ids, max_slots=8, max_length=600, max_batch_tokens=4096)
    play = rollout(engine, 8, envs=InlineEnvs(Corridor(8)), staleness=2, max_turn_tokens=12)
    begun = 0
    for number, model in enumerate(models):
        if number:
            engine.load(((name, p.detach()) for name, p in model.named_parameters()), number)
        later = [*iteration(number + 1, goals=(3,)), *iteration(number + 2, goals=(3,))]
        done = play.collect(iteration(number, goals=(3,)), ahead=later)
        rows = build_rows(done)
        assert len(rows) == 6 and play.stats.too_old == 0
        stored, mask = (np.concatenate([getattr(row, name) for row in rows]) for name in ("log_prob", "loss_mask"))
        version = np.concatenate(
            [np.full(len(turn.ids), turn.version) if turn.versions is None else turn.versions
             for t in done for turn in t.turns]
        )  # fmt: skip
        assert set(version) <= set(range(number + 1))
        for v in set(version):
            scored = log_probs_of(models[v], rows)[mask]
            assert np.abs(scored - stored[mask])[version == v].max() <= 1e-4
        assert play.stats.stale_tokens == (version < number).sum()
        begun += sum(turn.versions is not None for t in done for turn in t.turns)
    assert len(set(version)) == 3 and begun > 0  # some replies were sampled under two policies


def test_training_within_a_bound(folder, tmp_path):  # noqa: F811
    plain, trainer = make(folder, tmp_path / "plain"), make(folder, tmp_path / "stale", "rollout.staleness=1")
    seen = set()
    for number in range(3):
        expected, played = plain.collect(), trainer.collect()
        same = zip(expected.trajectories, played.trajectories, strict=True)
        assert all((a.task, a.seed, a.group, a.member) == (b.task, b.seed, b.group, b.member) for a, b in same)
        lags = {number - turn.version for t in played.trajectories for turn in t.turns}
        assert lags <= {0, 1} if number else lags == {0}
        seen |= lags
        for one, collected in ((plain, expected), (trainer, played)):
            one.update(collected)
        assert {turn.version for t in expected.trajectories for turn in t.turns} == {number}
        trainer.evaluate()  # over the same engine, in between
    assert seen == {0, 1} and trainer.player.engine.version == 3
    trainer.player.stop()
    trainer.player.stop()
    assert trainer.player._ahead is None


def test_a_resumed_run_begins_anew_what_was_ahead(folder, tmp_path, caplog):  # noqa: F811
    """Nothing of an episode that was under way is in a checkpoint: a run that goes on plays all of its next iteration
    under the checkpoint's weights, as one that begins nothing ahead does."""
    bounded = ("rollout.staleness=1", "training.resume=true")
    cut = make(folder, tmp_path, bounded[0])
    cut.update(cut.collect())
    cut.save()
    assert 0 in {turn.version for t in cut.collect().trajectories for turn in t.turns}
    cut.player.stop()
    plain = make(folder, tmp_path, "training.resume=true").collect().trajectories
    assert not caplog.records
    again = make(folder, tmp_path, *bounded)
    assert "rollout.staleness: episodes that the stopped run had begun ahead are begun anew" in caplog.text
    played = again.collect().trajectories
    assert [(t.task, t.seed, t.group, t.member) for t in played] == [(t.task, t.seed, t.group, t.member) for t in plain]
    for one, other in zip(played, plain, strict=True):
        assert {turn.version for turn in one.turns} == {1}
        for a, b in zip(one.turns, other.turns, strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
    again.player.stop()


def test_a_run_within_a_bound_reports_it(folder, tmp_path):  # noqa: F811
    trainer = make(folder, tmp_path, "rollout.staleness=2", "evaluation.freq=4")
    trainer.run()
    lines = [line for line in metrics(tmp_path) if "rollout/carried" in line]
    assert lines[0]["rollout/carried"] == 0 and all(line["rollout/carried"] > 0 for line in lines[1:])
    assert all(line["rollout/too_old"] == line["train/failed"] == 0 for line in lines)
    assert lines[1]["rollout/stale_share"] > 0
    assert trainer.player._ahead is None


def test_a_single_stage_is_begun_ahead_in_its_own_worlds(folder, tmp_path):  # noqa: F811
    trainer = make(folder, tmp_path, "rollout.staleness=1", "curriculum.rounds=[2]")
    for _ in range(2):
        trainer.update(trainer.collect())
    played = trainer.collect().trajectories
    assert trainer.player.stats.carried > 0 and max(len(t.turns) for t in played) == 2
    trainer.player.stop()


def test_what_cannot_be_begun_ahead_is_refused(folder, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=r"rollout\.staleness: expected 0 with a curriculum of several stages"):
        make(folder, tmp_path, "rollout.staleness=1", "curriculum.rounds=[1, 2]", "curriculum.steps=4")
    trainer = make(folder, tmp_path)
    with pytest.raises(ValueError, match=r"ahead: expected at most rollout\.staleness = 0 iterations, got 1"):
        trainer.player.collect(trainer.tasks[:1], 0, ahead=[trainer.tasks[1:2]])
