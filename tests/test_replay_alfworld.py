"""Episodes that are played again in another engine, from made-up ones."""

import json

import numpy as np

from benchmarks.replay_alfworld import digest, played, replay, write_played
from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.envs.base import Task


def episode(commands, success, **fields):
    """In a world that answers a command with itself in capitals."""
    ids = np.zeros(1, np.int32)
    seen = ["hello", *map(str.upper, commands)]
    trajectory = Trajectory(id="x", env="e", task="t", task_type="k", split="s", seed=0, group=0, member=0, **fields)
    for text, command in zip(seen, commands, strict=False):
        turn = Turn(prompt_ids=ids, ids=ids, log_probs=np.zeros(1, np.float32), finish_reason="stop")
        turn.observation, turn.action = text, command
        trajectory.turns.append(turn)
    trajectory.final_observation, trajectory.success = seen[-1], success
    return trajectory


class World:
    def __init__(self, begin="hello", odd=None):
        self.begin, self.odd = begin, odd

    def reset(self, task, seed):
        assert task.id == "t"
        return self.begin, {"success": False}

    def step(self, action):
        text = "no" if action == self.odd else action.upper()
        return text, 0.0, False, False, {"success": action == "win"}


def test_a_faithful_engine_answers_alike(tmp_path):
    file = tmp_path / "played_x.jsonl"
    write_played(file, [episode(["go", "win"], True), episode(["go"], False), episode(["go"], False, error="lost")])
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(episodes) == 2  # what broke was not played to its end
    assert episodes[0]["commands"] == ["go", "win"] and episodes[0]["answers"] == [digest("GO"), digest("WIN")]
    found = replay(episodes, {"t": Task("t", "k", "s")}, World())
    assert found == {"games": 2, "steps": 3, "different_answers": 0, "different_outcomes": 0, "success": 0.5,
                     "success_native": 0.5}  # fmt: skip


def test_every_difference_counts():
    episodes = [played(episode(["go", "win"], True)), played(episode(["win"], False))]
    found = replay(episodes, {"t": Task("t", "k", "s")}, World("hi", odd="go"))
    assert (found["different_answers"], found["different_outcomes"]) == (3, 1)
    assert (found["success"], found["success_native"]) == (1.0, 0.5)
