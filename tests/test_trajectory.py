"""Rows out of turns, by hand, and the trajectory record."""

import json
import math

import numpy as np
import pytest

from manus_fast.agent.trajectory import SCHEMA, Trajectory, Turn, build_rows


def turn(prompt, ids, reward=0.0, **options):
    log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
    options = {"finish_reason": "stop", **options}
    return Turn(np.asarray(prompt, np.int32), np.asarray(ids, np.int32), log_probs, reward=reward, **options)


def episode(*turns, **options):
    options = {"terminated": True, "success": True, **options}
    return Trajectory("t/0/0", "corridor", "t", "walk", "train", 5, 0, 0, turns=list(turns), **options)


def test_turns_that_extend_each_other_share_a_row():
    (row,) = build_rows([episode(turn([1, 2], [3, 4], 0.5), turn([1, 2, 3, 4, 9, 9], [5], 2.0))])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5] and row.token_ids.dtype == np.int64
    assert row.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert row.turn_id.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert row.log_prob.tolist() == [0, 0, -0.125, -0.25, 0, 0, -0.125]
    assert row.reward.tolist() == [0, 0, 0, 0.5, 0, 0, 2.0]  # on the last sampled token of each turn
    assert row.terminated and row.episode == 0 and len(row) == 7


def test_a_prompt_that_rewrites_history_forks():
    turns = [turn([1, 2], [3], 1.0), turn([1, 2, 9], [4], 2.0), turn([1, 2, 9, 4, 8], [5], 3.0)]
    rows = build_rows([episode(*turns, terminated=False, truncated=True)])
    assert [r.token_ids.tolist() for r in rows] == [[1, 2, 3], [1, 2, 9, 4, 8, 5]]
    assert [r.turn_id.tolist() for r in rows] == [[-1, -1, 0], [-1, -1, -1, 1, -1, 2]]
    assert [r.terminated for r in rows] == [True, False]  # only the episode's end may be bootstrapped
    assert sum(float(r.reward.sum()) for r in rows) == 6.0


def test_every_sampled_token_is_trained_exactly_once():
    rng = np.random.default_rng(0)
    trajectories = []
    for _ in range(20):
        turns, prompt = [], rng.integers(0, 9, 4)
        for _ in range(rng.integers(1, 7)):
            ids = rng.integers(0, 9, rng.integers(1, 5))
            turns.append(turn(prompt, ids, float(rng.normal())))
            keep = rng.random() < 0.7
            prompt = np.concatenate([prompt, ids, rng.integers(0, 9, 2)]) if keep else rng.integers(0, 9, 5)
        trajectories.append(episode(*turns))
    rows = build_rows(trajectories)
    for index, trajectory in enumerate(trajectories):
        mine = [row for row in rows if row.episode == index]
        assert sum(int(row.loss_mask.sum()) for row in mine) == trajectory.sampled_tokens
        assert sum(float(row.reward.sum()) for row in mine) == pytest.approx(trajectory.reward, abs=1e-5)
        for number, t in enumerate(trajectory.turns):
            (home,) = [row for row in mine if (row.turn_id == number).any()]
            at = home.turn_id == number
            assert home.token_ids[at].tolist() == t.ids.tolist()
            np.testing.assert_array_equal(home.log_prob[at], t.log_probs)
    for row in rows:
        assert not row.loss_mask[0] and not row.reward[~row.loss_mask].any() and not row.log_prob[~row.loss_mask].any()
        np.testing.assert_array_equal(row.turn_id >= 0, row.loss_mask)


def test_reward_of_a_turn_without_tokens_moves_back():
    turns = [turn([1], [2], 1.0), turn([1, 2, 3], [], 0.25), turn([1, 2, 3, 4], [5], 2.0)]
    (row,) = build_rows([episode(*turns)])
    assert row.reward.tolist() == [0, 1.25, 0, 0, 2.0]


def test_invalid_episodes_give_no_rows():
    good = episode(turn([1], [2], 1.0))
    bad = episode(turn([1], [2], 1.0), error="environment: gone")
    assert [row.episode for row in build_rows([bad, good, episode()])] == [1]
    assert not bad.valid and math.isnan(bad.reward) and good.reward == 1.0
    assert build_rows([]) == []


def test_sums():
    t = episode(
        turn([1], [2], 0.9, reward_parts={"env": 1.0, "step": -0.1}),
        turn([1], [2, 3], -0.1, reward_parts={"step": -0.1}),
    )
    assert t.reward_parts == pytest.approx({"env": 1.0, "step": -0.2}) and t.sampled_tokens == 3


def test_the_record_comes_back_and_has_the_contract_keys():
    t = episode(
        turn([1, 2], [3, 4], 0.5, text="a", action="go", version=3, reward_parts={"env": 0.5}, node_id=7, value=0.25),
        turn([5], [6], finish_reason="length", format_ok=False, admissible=False),
        final_observation="The end.",
    )
    record = json.loads(json.dumps(t.to_json(), allow_nan=False))
    assert set(record) == {
        *("schema", "id", "env", "task", "task_type", "split", "seed", "group", "member", "valid", "success", "score"),
        *("reward", "reward_parts", "terminated", "truncated", "error", "final_observation", "turns"),
    }
    assert record["schema"] == SCHEMA and record["reward"] == 0.5 and record["valid"] is True
    back = Trajectory.from_json(record)
    assert back.to_json() == t.to_json()
    for a, b in zip(t.turns, back.turns, strict=True):
        for name in ("prompt_ids", "ids", "log_probs"):
            assert getattr(a, name).dtype == getattr(b, name).dtype
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-6)
    failed = json.loads(json.dumps(episode(error="gone").to_json(), allow_nan=False))
    assert failed["reward"] is None and failed["valid"] is False and not Trajectory.from_json(failed).valid
    with pytest.raises(ValueError, match=r"trajectory\.schema"):
        Trajectory.from_json({**record, "schema": "other"})
