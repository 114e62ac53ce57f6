"""Preference pairs: what a record may look like, what it becomes, and how episodes give some."""

import copy
import json
from collections import Counter

import numpy as np
import pytest

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.trajectory import Trajectory, Turn, build_rows
from manus_fast.data.preferences import (
    Preference,
    decode_rows,
    encode_rows,
    fingerprint,
    load_preferences,
    preference,
    preference_rows,
    save_preferences,
)
from manus_fast.data.rollout_pairs import episode_pairs, load_trajectories
from manus_fast.data.schema import MalformedRow
from manus_fast.modeling.tiny import make_tokenizer

WORDS = "User Assistant System You see a mug . take go to desk 1 look nothing happens again help me open close"
CHAT = ChatFormat(make_tokenizer([WORDS]))
NAME = fingerprint(CHAT.tokenizer)


def user(text):
    return {"role": "user", "content": text}


def agent(text, **more):
    return {"role": "assistant", "content": text, **more}


PROMPT = [user("You see a mug"), agent("look"), user("nothing happens")]
RECORD = {
    "prompt": PROMPT,
    "chosen": [agent("take mug"), user("You take"), agent("go to desk")],
    "rejected": [agent("open desk")],
    "level": "trajectory",
    "source": "test",
}


def trained(row):
    return CHAT.decode(row.token_ids[row.loss_mask])


def test_only_replies_of_a_side_are_trained():
    (pair,) = preference_rows([preference(RECORD)], Context(CHAT), "help me")
    (chosen,), (rejected,) = pair.chosen, pair.rejected
    assert trained(chosen) == "take muggo to desk" and trained(rejected) == "open desk"
    for row in (chosen, rejected):
        assert "help me" in CHAT.tokenizer.decode(row.token_ids)
        ends = np.flatnonzero(row.loss_mask & (np.append(row.turn_id[1:], -1) != row.turn_id))
        assert all(int(row.token_ids[t]) in CHAT.end_ids for t in ends)
    # Both sides begin with the same tokens, up to the first trained one.
    start = int(np.flatnonzero(chosen.loss_mask)[0])
    assert start == int(np.flatnonzero(rejected.loss_mask)[0])
    assert chosen.token_ids[:start].tolist() == rejected.token_ids[:start].tolist()


def test_a_message_may_opt_out_and_a_window_gives_several_rows():
    record = {**RECORD, "chosen": [agent("take mug", trainable=False), user("You take"), agent("go to desk")]}
    (pair,) = preference_rows([preference(record)], Context(CHAT))
    assert trained(pair.chosen[0]) == "go to desk"
    (pair,) = preference_rows([preference(RECORD)], Context(CHAT, "window", 1))
    assert [trained(row) for row in pair.chosen] == ["take mug", "go to desk"]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "You see a mug", "chosen": "take mug", "rejected": "look"},
        {"prompt": [user("You see a mug")], "chosen": [user("You see a mug"), agent("take mug")],
         "rejected": [user("You see a mug"), agent("look")]},
        {"chosen": [user("You see a mug"), agent("take mug")], "rejected": [user("You see a mug"), agent("look")]},
    ],
)  # fmt: skip
def test_forms_that_datasets_use(record):
    item = preference(record)
    assert (item.prompt, item.chosen, item.rejected) == ([user("You see a mug")], [agent("take mug")], [agent("look")])
    assert item.level == "step" and item.source == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chosen": None}, "another schema"),
        ({"prompt": []}, "another schema"),
        ({"prompt": [agent("look")]}, "wrong role order"),
        ({"prompt": [user("a"), agent("look")]}, "wrong role order"),
        ({"chosen": [user("a")]}, "wrong role order"),
        ({"chosen": [agent("a"), user("b")]}, "wrong role order"),
        ({"chosen": [agent("a"), agent("b")]}, "wrong role order"),
        ({"chosen": [{"role": "tool", "content": "a"}]}, "unknown role"),
        ({"chosen": [agent(None)]}, "content is not text"),
        ({"chosen": [agent(" ")]}, "empty turn"),
        ({"chosen": [agent("a" * 200_000)]}, "message too long"),
        ({"chosen": [agent("a", trainable=1)]}, "trainable is not true or false"),
        ({"chosen": [agent("open desk")]}, "chosen equals rejected"),
        ({"level": "token"}, "unknown level"),
        ({"margin": float("nan")}, "margin is not a number"),
        ({"outcome": [1, 2]}, "outcome is not two numbers in [0, 1]"),
        ({"tokens": {"tokenizer": "x", "chosen": [{"ids": [1]}], "rejected": []}}, "malformed tokens"),
        ({"tokens": {"tokenizer": "x", "chosen": [{"ids": [1, 2], "spans": [[0, 1, 0]]}]}}, "malformed tokens"),
        ({"tokens": {"tokenizer": "x", "chosen": [{"ids": [1, 2], "spans": [[1, 3, 0]]}]}}, "malformed tokens"),
        ({"tokens": {"tokenizer": "x", "chosen": [{"ids": [1, "a"], "spans": []}]}}, "malformed tokens"),
    ],
)
def test_malformed_records_are_refused_with_a_reason(change, reason):
    with pytest.raises(MalformedRow) as caught:
        preference({**RECORD, **change})
    assert caught.value.reason == reason


def test_a_file_is_read_and_what_is_skipped_is_counted(tmp_path):
    file = tmp_path / "preferences.jsonl"
    item = preference({**RECORD, "margin": 0.5, "outcome": [1, 0]})
    assert save_preferences([item, item], file) == 2
    with file.open("a") as out:
        out.write('{"prompt": \n' + json.dumps({**RECORD, "level": "x"}) + "\n[]\n")
    dropped = Counter()
    assert list(load_preferences(str(file), dropped)) == [item, item]
    assert dropped == {"truncated JSON": 1, "unknown level": 1, "another schema": 1}
    assert json.loads(file.read_text().splitlines()[0])["outcome"] == [1.0, 0.0]


def test_pairs_that_cannot_be_trained_on_are_counted():
    masked = preference({**RECORD, "chosen": [agent("take mug", trainable=False)]})
    outside = Preference(**vars(preference(RECORD)))
    outside.tokens = {
        "tokenizer": NAME,
        **{s: [{"ids": [1, 10**6], "spans": [[1, 2, 0]]}] for s in ("chosen", "rejected")},
    }
    dropped = Counter()
    assert preference_rows([masked, outside], Context(CHAT), dropped=dropped) == []
    assert preference_rows([preference(RECORD)], Context(CHAT), max_length=5, dropped=dropped) == []
    assert dropped == {
        "a side without a trainable token": 1,
        "token outside the vocabulary": 1,
        "longer than max_length": 1,
    }


def episode(replies, success=True, task="t", prompt="You see a mug", reward=None, **more):
    """An episode as a rollout makes it, the replies sampled token by token (an odd one: words apart)."""
    turns, talk = [], Context(CHAT).start("help me", prompt)
    for number, reply in enumerate(replies):
        ids = CHAT.reply(reply)
        last = number == len(replies) - 1
        value = (1.0 if success else 0.0) if reward is None else reward
        turns.append(
            Turn(
                prompt_ids=talk.prompt(),
                ids=ids,
                log_probs=np.full(len(ids), -1.0, np.float32),
                finish_reason="stop",
                observation=prompt if number == 0 else "You see again",
                text=reply,
                reward=value if last else 0.0,
            )
        )
        talk.add(ids, "You see again")
    return Trajectory("id", "household", task, "", "train", 0, 0, 0, turns, success=success, terminated=True, **more)


GOOD, BAD = episode(["look", "take mug"]), episode(["look", "open desk", "close desk"], success=False)


def test_a_success_is_chosen_over_a_failure_with_the_tokens_that_were_sampled():
    (item,) = episode_pairs([BAD, GOOD], NAME)
    assert (item.level, item.source, item.margin, item.outcome) == ("trajectory", "household", 1.0, (1.0, 0.0))
    assert item.prompt == [user("You see a mug")]
    assert [m["content"] for m in item.chosen] == ["look", "You see again", "take mug"]
    (pair,) = preference_rows([preference(json.loads(json.dumps(item.to_json())))], Context(CHAT), "another system")
    for rows, trajectory in ((pair.chosen, GOOD), (pair.rejected, BAD)):
        (expected,) = build_rows([trajectory])
        (row,) = rows
        for name in ("token_ids", "loss_mask", "turn_id"):
            assert np.array_equal(getattr(row, name), getattr(expected, name))


def test_another_tokenizer_reads_the_text_instead():
    other = ChatFormat(make_tokenizer([WORDS, "more words"]))
    (item,) = episode_pairs([BAD, GOOD], NAME)
    (pair,) = preference_rows([item], Context(other), "help me")
    assert other.decode(pair.chosen[0].token_ids[pair.chosen[0].loss_mask]) == "looktake mug"


def test_a_step_pair_is_the_first_differing_reply():
    (item,) = episode_pairs([BAD, GOOD], NAME, level="step")
    assert item.prompt == [user("You see a mug"), agent("look"), user("You see again")]
    assert (item.chosen, item.rejected, item.level) == ([agent("take mug")], [agent("open desk")], "step")
    (pair,) = preference_rows([item], Context(CHAT))
    assert trained(pair.chosen[0]) == "take mug" and trained(pair.rejected[0]) == "open desk"
    assert pair.chosen[0].turn_id.max() == 1


def test_what_gives_a_pair_and_what_does_not():
    lost, other, elsewhere = (
        episode(["look"], False),
        episode(["open"], False, "u"),
        episode(["go"], False, prompt="a desk"),
    )
    dropped = Counter()
    assert episode_pairs([GOOD, other, elsewhere], NAME, dropped=dropped) == []
    assert dropped == {"task without a pair": 3}
    assert episode_pairs([GOOD, BAD], NAME, margin=1.5) == []
    # Two episodes that say the same as long as both go on give no step to tell them apart.
    dropped = Counter()
    assert episode_pairs([GOOD, lost], NAME, level="step", dropped=dropped) == []
    assert dropped == {"episodes without a differing reply to one prompt": 1}
    slow, fast = episode(["look", "take mug"], reward=0.5), episode(["take mug"], reward=0.9)
    assert episode_pairs([slow, fast], NAME) == []
    (item,) = episode_pairs([slow, fast], NAME, by="reward", margin=0.3)
    assert item.chosen == [agent("take mug")] and item.margin == pytest.approx(0.4) and item.outcome == (1.0, 1.0)


def test_pairs_of_a_task_are_limited_distinct_and_fixed_by_the_seed():
    wins = [episode([word, "take mug"]) for word in ("look", "open", "close", "go")]
    losses = [episode([word], False) for word in ("help", "again", "nothing", "desk")]
    some = episode_pairs([*wins, *losses], NAME, per_task=5, seed=1)
    again = episode_pairs([*wins, *losses], NAME, per_task=5, seed=1)
    assert len(some) == 5 and some == again != episode_pairs([*wins, *losses], NAME, per_task=5, seed=2)
    assert len(episode_pairs([*wins, *losses], NAME, per_task=99)) == 16
    dropped = Counter()
    assert len(episode_pairs([GOOD, copy.deepcopy(GOOD), BAD], NAME, dropped=dropped)) == 1
    assert dropped == {"the same pair again": 1}


def test_trajectories_are_read_and_failed_ones_left_out(tmp_path):
    failed = episode(["look"], False, error="the world broke")
    file = tmp_path / "trajectories.jsonl"
    lines = [json.dumps({"iteration": 3, **t.to_json()}) for t in (GOOD, failed, BAD)]
    file.write_text("\n".join([*lines, "{", '{"schema": "x"}', ""]))
    dropped = Counter()
    assert [t.success for t in load_trajectories(file, dropped)] == [True, False]
    assert dropped == {"failed episode": 1, "no episode of this schema": 2}
    with pytest.raises(ValueError, match="found no file"):
        list(load_trajectories(tmp_path / "none", dropped))


def test_rows_survive_encoding():
    rows = build_rows([GOOD, BAD])
    for row, again in zip(rows, decode_rows(json.loads(json.dumps(encode_rows(rows)))), strict=True):
        assert np.array_equal(row.token_ids, again.token_ids) and np.array_equal(row.turn_id, again.turn_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "token"}, "level: expected one of step, trajectory, got 'token'"),
        ({"by": "length"}, "by: expected one of success, reward, got 'length'"),
        ({"per_task": 0}, "per_task: expected an integer >= 1, got 0"),
        ({"margin": -1.0}, "margin: expected a number >= 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        episode_pairs([], NAME, **options)
