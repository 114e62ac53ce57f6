"""The rollout scheduler over a corridor world: with a scripted engine for its rules, with the hf engine for tokens."""

import math
from collections import deque

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.protocol import NO_ACTION, Protocol
from manus_fast.agent.trajectory import build_rows
from manus_fast.envs.base import InlineEnvs, StepResult, Task, failure
from manus_fast.modeling import packed_hidden
from manus_fast.modeling.tiny import make_tokenizer
from manus_fast.rewards.shaping import RewardConfig, make_shape
from manus_fast.rollout.engine import Completion
from manus_fast.rollout.engines.hf import HFEngine
from manus_fast.rollout.scheduler import EpisodeSpec, Rollout, RolloutConfig
from manus_fast.rollout.seeds import derive, episode_seed, mix64, turn_seed

ACTIONS = ("go left", "go right")
TEXTS = ["You are at 0 of 9. go left or go right? Nothing happens.", "fly no nothing back on and"]
RIGHT = "Think: on\nAct: go right"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Operations this small take longer in two threads than in one, most of all on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Corridor:
    """An EnvBatch: start at 0, reach `task.data["goal"]`. "go left" at 0 does nothing; other words are refused."""

    def __init__(self, slots, admissible=True, breaks=()):
        self.slots, self._admissible = slots, admissible
        self.state = [None] * slots
        self.breaks = dict(breaks)
        """task id -> how many more steps of that task break."""
        self.calls = 0
        self.closed = False

    def _info(self, success=False):
        info = {"success": success}
        if self._admissible:
            info["admissible"] = list(ACTIONS)
        return info

    def reset(self, slots, tasks, seeds):
        for slot, task, seed in zip(slots, tasks, seeds, strict=True):
            self.state[slot] = [task, 0, seed]
        return [f"You are at 0 of {t.data['goal']}." for t in tasks], [self._info() for _ in slots]

    def step(self, slots, actions):
        self.calls += 1
        out = []
        for slot, action in zip(slots, actions, strict=True):
            task, at, _ = state = self.state[slot]
            if self.breaks.get(task.id, 0) > 0:
                self.breaks[task.id] -= 1
                broken = failure("the world broke")
                out.append((broken.observation, broken.reward, broken.terminated, broken.truncated, broken.info))
                continue
            if action not in ACTIONS:
                out.append(("Nothing happens.", 0.0, False, False, self._info()))
                continue
            state[1] = at = max(0, at + (1 if action == "go right" else -1))
            won = at == task.data["goal"]
            out.append((f"You are at {at} of {task.data['goal']}.", float(won), won, False, self._info(won)))
        columns = list(zip(*out, strict=True))
        return [*columns[0:1], *(np.asarray(c) for c in columns[1:4]), columns[4]]

    def close(self):
        self.closed = True


class LateEnvs(InlineEnvs):
    """Answers one slot at a time, the latest first, and not at every poll."""

    def __init__(self, batch):
        super().__init__(batch)
        self._answers = deque()
        self._polls = 0

    def poll(self, timeout):
        self._answers.extend(super().poll(timeout))
        self._polls += 1
        return [self._answers.pop()] if self._answers and self._polls % 3 == 0 else []


class World:
    name, splits, task_types, instructions = "corridor", ("train",), ("walk",), "Walk to the end."

    def __init__(self, max_steps=8):
        self.max_steps = max_steps


TOKENIZER = make_tokenizer([*TEXTS, RIGHT, Protocol().system_prompt(World.instructions), "go left"])
FORMAT = ChatFormat(TOKENIZER)


class Scripted:
    """An engine that answers with `reply(turn, task prompt text) -> (text, finish reason)`, latest request first."""

    version = 4

    def __init__(self, reply, max_length=400):
        self.reply, self.max_length = reply, max_length
        self.requests, self.ended, self.waiting = [], [], []
        self.most = 0
        self.aborted = []

    def submit(self, request):
        self.requests.append(request)
        self.waiting.append(request)
        self.most = max(self.most, len(self.waiting))

    def poll(self, timeout):
        if not self.waiting:
            return []
        request = self.waiting.pop()
        text, reason = self.reply(request)
        ids = FORMAT.reply(text)
        if reason == "length":
            ids = ids[:-1][: request.max_tokens]
        if reason in ("error", "abort"):
            ids = ids[:0]
        error = "out of memory" if reason == "error" else None
        return [Completion(request.id, ids, np.full(len(ids), -0.5, np.float32), reason, self.version, error)]

    def abort(self, id):
        self.aborted.append(id)
        self.waiting = [r for r in self.waiting if r.id != id]

    def end_session(self, session):
        self.ended.append(session)


def spec(goal=3, member=0, group=0, seed=11):
    return EpisodeSpec(Task(f"walk-{goal}", "walk", "train", {"goal": goal}), seed, group, member)


def rollout(engine, slots=4, shape=None, world=None, envs=None, context=None, protocol=None, stray=None, **config):
    envs = envs or InlineEnvs(Corridor(slots))
    config = RolloutConfig(**{"slots": slots, **config})
    context = context or Context(FORMAT)
    return Rollout(engine, envs, world or World(), context, protocol or Protocol(), config, shape, stray=stray)


def always(text, reason="stop"):
    return lambda request: (text, reason)


def test_an_episode_by_hand():
    play = rollout(Scripted(always(RIGHT)), shape=make_shape(RewardConfig(format_bonus=0.5)))
    (t,) = play.collect([spec(goal=2, group=5, member=1, seed=77)])
    assert (t.env, t.task, t.task_type, t.split, t.seed, t.group, t.member) == (
        *("corridor", "walk-2", "walk", "train"),
        *(77, 5, 1),
    )
    assert t.valid and t.success and t.terminated and not t.truncated
    assert [turn.observation for turn in t.turns] == ["You are at 0 of 2.", "You are at 1 of 2."]
    assert t.final_observation == "You are at 2 of 2."
    assert [turn.reward_parts for turn in t.turns] == [
        {"environment": 0.0, "format": 0.5, "step_penalty": -0.01},
        {"environment": 1.0, "format": 0.5, "step_penalty": -0.01},
    ]
    assert t.turns[0].reward == pytest.approx(0.49) and t.reward == pytest.approx(0.49 + 1.49)
    turn = t.turns[1]
    assert (turn.thought, turn.action, turn.format_ok, turn.admissible) == ("on", "go right", True, True)
    assert (turn.finish_reason, turn.version) == ("stop", 4)
    assert TOKENIZER.decode(turn.ids) == RIGHT + "<|end|>"
    # what was sent is the first prompt, the reply as sampled, and the bridge
    expected = np.concatenate([t.turns[0].prompt_ids, t.turns[0].ids, FORMAT.bridge("You are at 1 of 2.", True)])
    np.testing.assert_array_equal(turn.prompt_ids, expected)
    assert TOKENIZER.decode(turn.prompt_ids).endswith("<|user|>You are at 1 of 2.<|end|><|assistant|>")


class ScoredCorridor(Corridor):
    """Tells how much of the way is done, too."""

    def step(self, slots, actions):
        *columns, infos = super().step(slots, actions)
        for slot, info in zip(slots, infos, strict=True):
            task, at, _ = self.state[slot]
            info["score"] = at / task.data["goal"]
        return [*columns, infos]


def test_the_environments_own_score_is_kept():
    envs = InlineEnvs(ScoredCorridor(1))
    one, two = rollout(Scripted(always(RIGHT)), 1, world=World(3), envs=envs).collect([spec(3), spec(4)])
    assert (one.score, one.success, two.score, two.success) == (1.0, True, 0.75, False)
    assert rollout(Scripted(always(RIGHT))).collect([spec(3)])[0].score is None


def test_order_slots_and_refilling():
    engine = Scripted(always(RIGHT))
    specs = [spec(goal=1 + i % 4, member=i) for i in range(23)]
    seen = []
    envs = LateEnvs(Corridor(64))
    play = rollout(engine, slots=5, envs=envs)
    done = play.collect(specs, on_done=seen.append)
    assert [t.member for t in done] == list(range(23)) and sorted(t.member for t in seen) == list(range(23))
    assert [len(t.turns) for t in done] == [1 + i % 4 for i in range(23)]
    assert engine.most <= 5
    assert len(engine.requests) == sum(1 + i % 4 for i in range(23))  # a finished episode never generates
    assert len(set(engine.ended)) == len(engine.ended) == 23
    stats = play.stats
    assert stats.episodes == 23 and stats.turns == len(engine.requests) and stats.invalid == stats.truncated == 0
    assert stats.sampled_tokens == sum(t.sampled_tokens for t in done)
    assert stats.tokens_per_second > 0 and 0 <= stats.idle_share <= 1
    assert play.collect([]) == [] and play.stats.episodes == 0


def test_environments_step_in_batches():
    class AllAtOnce(Scripted):
        def poll(self, timeout):
            return [c for _ in range(len(self.waiting)) for c in super(AllAtOnce, self).poll(timeout)]

    batch = Corridor(8)
    rollout(AllAtOnce(always(RIGHT)), slots=8, envs=InlineEnvs(batch)).collect(
        [spec(goal=3, member=i) for i in range(8)]
    )
    assert batch.calls == 3


def test_step_limit_is_truncation():
    (t,) = rollout(Scripted(always("Think: back\nAct: go left")), world=World(max_steps=3)).collect([spec()])
    assert len(t.turns) == 3 and t.truncated and not t.terminated and not t.success and t.valid


def test_success_at_the_last_step_is_termination():
    (t,) = rollout(Scripted(always(RIGHT)), world=World(max_steps=3)).collect([spec(goal=3)])
    assert t.terminated and not t.truncated


def test_environment_truncation_is_kept():
    class Cut(Corridor):
        def step(self, slots, actions):
            observations, rewards, terminated, _, infos = super().step(slots, actions)
            return observations, rewards, terminated, np.ones(len(slots), bool), infos

    (t,) = rollout(Scripted(always(RIGHT)), envs=InlineEnvs(Cut(2))).collect([spec()])
    assert len(t.turns) == 1 and t.truncated and not t.terminated
    (t,) = rollout(Scripted(always(RIGHT)), envs=InlineEnvs(Cut(2))).collect([spec(goal=1)])
    assert t.terminated and not t.truncated


def test_trajectory_token_limit():
    reply = len(FORMAT.reply(RIGHT))
    engine = Scripted(lambda r: (RIGHT, "stop" if r.max_tokens >= reply else "length"))
    play = rollout(engine, max_turn_tokens=20, max_traj_tokens=2 * reply + 3)
    (t,) = play.collect([spec(goal=9)])
    assert [r.max_tokens for r in engine.requests] == [min(20, 2 * reply + 3), min(20, reply + 3), 3]
    assert t.truncated and not t.terminated and t.sampled_tokens == 2 * reply + 3
    assert [turn.finish_reason for turn in t.turns] == ["stop", "stop", "length"]
    assert play.stats.cut_turns == 1 and play.stats.truncated == 1


def test_engine_room_limits_a_turn_and_ends_an_episode():
    engine = Scripted(always(RIGHT), max_length=110)
    (t,) = rollout(engine, max_turn_tokens=60).collect([spec(goal=9)])
    assert t.truncated and t.valid
    for request in engine.requests:
        assert request.max_tokens == min(60, 110 - len(request.prompt_ids)) >= 1
    small = Scripted(always(RIGHT), max_length=5)
    (t,) = rollout(small).collect([spec()])
    assert not t.valid and "5 tokens" in t.error and not small.requests and math.isnan(t.reward)


@pytest.mark.parametrize("text, action", [("Think: on\nAct: go right", "go right"), ("Think: on and", NO_ACTION)])
@pytest.mark.parametrize("strict", [False, True])
def test_cut_turns(text, action, strict):
    shape = make_shape(RewardConfig(format_bonus=0.5))
    world = World(max_steps=1)
    play = rollout(Scripted(always(text, "length")), shape=shape, world=world, cut_is_format_failure=strict)
    (t,) = play.collect([spec(goal=9)])
    (turn,) = t.turns
    assert turn.finish_reason == "length" and turn.action == action
    complete = action != NO_ACTION
    assert turn.format_ok == (complete or not strict) and turn.admissible == complete
    expected = {"environment": 0.0, "step_penalty": -0.01}
    if strict and complete:
        expected["format"] = 0.5
    if strict and not complete:
        expected["invalid_action"] = -0.1
    assert turn.reward_parts == expected


def test_cut_turn_is_bridged_with_an_end_token():
    (t,) = rollout(Scripted(always(RIGHT, "length"))).collect([spec(goal=2)])
    first, second = t.turns
    after = second.prompt_ids[len(first.prompt_ids) + len(first.ids) :]
    assert first.ids[-1] != FORMAT.end_id and after[0] == FORMAT.end_id
    (row,) = build_rows([t])
    assert not row.loss_mask[len(first.prompt_ids) + len(first.ids)]  # we wrote that token, nobody sampled it


def test_invalid_actions():
    replies = ["Think: on\nAct: fly", "nothing", RIGHT, "Think: on\nAct: fly", "no", "no"]
    engine = Scripted(lambda r: (replies[len(engine.requests) - 1], "stop"))
    (t,) = rollout(engine, max_consecutive_invalid=3, shape=make_shape(RewardConfig())).collect([spec(goal=9)])
    assert [turn.admissible for turn in t.turns] == [False, False, True, False, False, False]
    assert [turn.action for turn in t.turns] == ["fly", NO_ACTION, "go right", "fly", NO_ACTION, NO_ACTION]
    assert [turn.format_ok for turn in t.turns] == [True, False, True, True, False, False]
    assert [turn.reward_parts.get("invalid_action", 0) for turn in t.turns] == [-0.1, -0.1, 0, -0.1, -0.1, -0.1]
    assert t.truncated and not t.terminated


def test_without_a_list_of_admissible_actions():
    envs = InlineEnvs(Corridor(2, admissible=False))
    replies = ["Think: on\nAct: fly", "nothing"]
    engine = Scripted(lambda r: (replies[len(engine.requests) - 1], "stop"))
    (t,) = rollout(engine, envs=envs, world=World(max_steps=2)).collect([spec()])
    assert [turn.admissible for turn in t.turns] == [True, False]


def test_a_failing_world_is_retried_once():
    batch = Corridor(3, breaks={"walk-2": 1})
    play = rollout(Scripted(always(RIGHT)), envs=InlineEnvs(batch), slots=3)
    done = play.collect([spec(goal=g) for g in (1, 2, 3)])
    assert all(t.valid and t.success for t in done) and [len(t.turns) for t in done] == [1, 2, 3]
    assert (play.stats.failed, play.stats.retried, play.stats.invalid) == (1, 1, 0)


def test_a_world_that_fails_twice_is_masked():
    batch = Corridor(3, breaks={"walk-2": 2})
    play = rollout(Scripted(always(RIGHT)), envs=InlineEnvs(batch), slots=3)
    done = play.collect([spec(goal=g) for g in (1, 2, 3)])
    assert [t.valid for t in done] == [True, False, True]
    assert "the world broke" in done[1].error and math.isnan(done[1].reward) and not done[1].success
    assert (play.stats.failed, play.stats.retried, play.stats.invalid) == (2, 1, 1)
    assert {row.episode for row in build_rows(done)} == {0, 2}


def test_a_world_that_fails_at_reset():
    class Dead(InlineEnvs):
        def poll(self, timeout):
            return [
                (slot, StepResult("", math.nan, False, True, {"error": "gone"})) for slot, _ in super().poll(timeout)
            ]

    engine = Scripted(always(RIGHT))
    (t,) = rollout(engine, envs=Dead(Corridor(1))).collect([spec()])
    assert t.error == "environment: gone" and not t.turns and not engine.requests


@pytest.mark.parametrize("reason, words", [("error", "out of memory"), ("abort", "aborted")])
def test_engine_failures(reason, words):
    trouble = iter([reason])
    engine = Scripted(lambda r: (RIGHT, next(trouble, "stop")))
    play = rollout(engine)
    (t,) = play.collect([spec(goal=2)])
    assert t.valid and t.success and play.stats.retried == 1
    assert engine.requests[0].session != engine.requests[1].session
    assert engine.requests[0].seed == engine.requests[1].seed
    (t,) = rollout(Scripted(always(RIGHT, reason))).collect([spec(goal=2)])
    assert not t.valid and words in t.error


def test_an_interrupted_collect_leaves_nothing_generating():
    class Stop(Exception):
        pass

    def reply(request):
        if request is engine.requests[1]:
            raise Stop
        return RIGHT, "stop"

    engine = Scripted(reply)
    play = rollout(engine, slots=3)
    with pytest.raises(Stop):
        play.collect([spec(member=i) for i in range(3)])
    assert engine.requests[0].id in engine.aborted and not engine.waiting


def test_seeds_follow_names():
    engine = Scripted(always(RIGHT))
    rollout(engine, slots=1).collect([spec(goal=2, group=3, member=1, seed=9)])
    assert [r.seed for r in engine.requests] == [turn_seed(9, 3, 1, 0), turn_seed(9, 3, 1, 1)]
    # the mixer against splitmix64's first outputs for seed 0, as published with the algorithm
    assert [mix64(0), mix64(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    names = [(r, i, g, m, t) for r in range(3) for i in range(4) for g in range(4) for m in range(4) for t in range(4)]
    seeds = {turn_seed(episode_seed(r, i, g), g, m, t) for r, i, g, m, t in names}
    assert len(seeds) == len(names) and all(0 <= s < 2**63 for s in seeds)
    assert turn_seed(5, -1, 3, 7) == derive(5, -1, 3, 7) and turn_seed(2**62, 0, 0, 0) == derive(2**62, 0, 0, 0)
    assert derive(1, 2) != derive(2, 1) and derive(-1) == derive(2**64 - 1)


def test_window_context_sends_the_last_turns():
    engine = Scripted(always("Think: back\nAct: go left"))
    (t,) = rollout(engine, context=Context(FORMAT, "window", 2), world=World(max_steps=5)).collect([spec()])
    lengths = [len(r.prompt_ids) for r in engine.requests]
    assert lengths[0] < lengths[1] < lengths[2] == lengths[3] == lengths[4]
    assert len(build_rows([t])) == 3  # turns 0 to 2 extend each other, then the head of the window moves


@pytest.mark.parametrize(
    "options, words",
    [
        ({"slots": 0}, "rollout.slots"),
        ({"max_turn_tokens": 0}, "rollout.max_turn_tokens"),
        ({"temperature": -1}, "rollout.temperature"),
        ({"temperature": math.nan}, "rollout.temperature"),
        ({"top_p": 0}, "rollout.top_p"),
        ({"min_p": 1}, "rollout.min_p"),
        ({"staleness": -1}, "rollout.staleness"),
    ],
)
def test_config_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        RolloutConfig(**options)


@pytest.mark.parametrize(
    "options", [{"step_penalty": 0.01}, {"invalid_action_penalty": 1}, {"success_bonus": math.inf}]
)
def test_reward_config_refuses(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        RewardConfig(**options)


# With a real model. Its head is pulled towards words of the corridor, so that some replies parse.


def make_model():
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.15,
        )
    ).eval()
    return model


def play_with(model, slots, temperature, context, envs=None, max_batch_tokens=4096):
    engine = HFEngine(model, FORMAT.end_ids, max_slots=slots, max_length=600, max_batch_tokens=max_batch_tokens)
    envs = envs or InlineEnvs(Corridor(slots))
    play = rollout(engine, slots, envs=envs, context=context, temperature=temperature, max_turn_tokens=12)
    return play.collect(
        [spec(goal=1 + i % 3, group=i // 4, member=i % 4, seed=episode_seed(0, 0, i // 4)) for i in range(24)]
    )


CONTEXTS = {"full": Context(FORMAT), "window": Context(FORMAT, "window", 2)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("context", CONTEXTS)
def test_same_trajectories_for_any_number_of_slots(temperature, context):
    model, context = make_model(), CONTEXTS[context]
    few = play_with(model, 3, temperature, context, envs=LateEnvs(Corridor(3)), max_batch_tokens=64)
    many = play_with(model, 64, temperature, context)
    for a, b in zip(few, many, strict=True):
        assert len(a.turns) == len(b.turns) > 1
        for x, y in zip(a.turns, b.turns, strict=True):
            np.testing.assert_array_equal(x.prompt_ids, y.prompt_ids)
            np.testing.assert_array_equal(x.ids, y.ids)
            np.testing.assert_allclose(x.log_probs, y.log_probs, atol=1e-5)
    if temperature:
        assert len({tuple(t.turns[0].ids) for t in many}) > 12  # members of a group differ


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("context", CONTEXTS)
def test_scoring_the_stored_ids_gives_the_stored_log_probs(context, temperature):
    model = make_model()
    done = play_with(model, 8, temperature, CONTEXTS[context])
    assert max(len(t.turns) for t in done) > 3
    rows = build_rows(done)
    assert len(rows) == len(done) if context == "full" else len(rows) > len(done)
    ids = torch.from_numpy(np.concatenate([row.token_ids for row in rows]))
    lengths = [len(row) for row in rows]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        hidden = packed_hidden(model, ids, positions, cu_seqlens, max(lengths))
        log_probs = (model.lm_head(hidden[:-1]) / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    scored = np.concatenate([[0.0], log_probs.numpy()])
    mask = np.concatenate([row.loss_mask for row in rows])
    stored = np.concatenate([row.log_prob for row in rows])
    assert mask.sum() == sum(t.sampled_tokens for t in done) > 500
    assert np.abs(scored - stored)[mask].max() <= 1e-4
