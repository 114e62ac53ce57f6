"""How TRL is asked and answered, without TRL."""

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.bench_trl import BatchEngine, trl_fields
from manus_fast.agent.trajectory import Row
from manus_fast.rollout.engine import Request


def request(id, prompt, tokens=4):
    return Request(id=id, prompt_ids=np.asarray(prompt, np.int32), seed=0, max_tokens=tokens, temperature=0.5)


def test_all_that_waits_is_one_call():
    calls = []

    def generate(prompts, tokens, temperature):
        calls.append((prompts, tokens, temperature))
        return [([5, 6, 9], [-0.1, -0.2, -0.3]), ([5, 6, 7, 8], [-0.5] * 4)][: len(prompts)]

    engine = BatchEngine(generate, [9], max_length=64)
    assert engine.poll(0.0) == [] and calls == []
    for asked in (request(1, [1, 2]), request(2, [3], tokens=3), request(3, [4])):
        engine.submit(asked)
    engine.abort(3)
    first, second = engine.poll(0.0)
    assert calls == [([[1, 2], [3]], 4, 0.5)]
    assert (first.id, first.finish_reason, first.ids.tolist()) == (1, "stop", [5, 6, 9])
    assert (second.id, second.finish_reason, second.ids.tolist()) == (2, "length", [5, 6, 7])
    np.testing.assert_allclose(second.log_probs, [-0.5] * 3)
    engine.load([], 7)
    engine.submit(request(4, [1]))
    assert engine.poll(0.0)[0].version == 7


def test_an_episode_begins_at_its_first_sampled_token():
    mask = np.array([0, 0, 1, 1, 0, 1, 0], bool)
    row = Row(
        token_ids=np.arange(10, 17),
        loss_mask=mask,
        turn_id=np.zeros(7, np.int32),
        log_prob=np.where(mask, -0.5, 0.0).astype(np.float32),
        reward=np.zeros(7, np.float32),
        episode=0,
    )
    assert trl_fields([row], [1.5]) == {
        "prompt_ids": [[10, 11]],
        "completion_ids": [[12, 13, 14, 15]],
        "logprobs": [[-0.5, -0.5, 0.0, -0.5]],
        "env_mask": [[1, 1, 0, 1]],
        "episode_reward": [1.5],
    }
    with pytest.raises(ValueError, match="rows: expected one for each of 2 episodes, got 1"):
        trl_fields([row], [1.5, 0.0])
