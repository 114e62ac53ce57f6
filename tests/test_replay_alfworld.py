"""Episodes that are played again in another engine, from made-up ones."""

import gzip
import json

import numpy as np

from benchmarks import alfworld_tables
from benchmarks.replay_alfworld import digest, losses, main, played, read_played, replay, write_played
from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.envs.base import Task
from manus_fast.evaluate import Report, TaskRecord, summarize


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


def test_two_panels_are_compared_game_by_game(tmp_path):
    """Solved by both: t0; by the native one alone: t1, t2; by neither: t3. McNemar of 2 to 0: 2 · 1/4."""
    files = []
    for name, solved in (("native", [1, 1, 1, 0]), ("textworld", [1, 0, 0, 0])):
        episodes = [episode(["go"], bool(won)) for won in solved]
        records = [TaskRecord.of(Task(f"t{n}", "k", "s"), one) for n, one in enumerate(episodes)]
        Report("alfworld", "s", "m", records, summarize(records)).save(tmp_path / f"{name}.json")
        files.append(str(tmp_path / f"{name}.json"))
    rows = main(["--live", "gigpo", *files, "--json", str(tmp_path / "x.json")])
    assert json.loads((tmp_path / "alfworld_live.json").read_text()) == rows
    assert alfworld_tables.lived(rows)[-2] == "| gigpo | 4 | 75.0 | 25.0 | 1 | 2 | 0 | 0.50 |"


def test_lost_games_are_told_by_how_they_ended():
    """Of the last 20 commands: all 20 given before; 10 refused; 9 given before, 8 refused."""
    fresh = [f"look at {n}" for n in range(20)]
    circling = played(episode([*fresh, *fresh[:20]], False))
    refused = played(episode(fresh, False))
    refused["answers"][:10] = [digest("Nothing happens.")] * 10
    other = played(episode([*fresh[:9], *fresh[:9], *fresh[9:]], False))
    other["answers"][-8:] = [digest("Nothing happens.")] * 8
    found = losses([circling, refused, other, played(episode(fresh, True))], {"t": Task("t", "heat", "s")})
    assert found == {"heat": {"games": 4, "circles": 1, "refused": 1, "otherwise": 1}}
    lines = alfworld_tables.losses([{"policy": "gigpo", "losses": found}])
    assert lines[-2] == "| gigpo | heat | 4 | 3 | 1 | 1 | 1 |"


def test_a_runs_own_trajectories_serve_too(tmp_path):
    trajectory = episode(["go", "win"], True)
    lines = json.dumps({"iteration": 3, **trajectory.to_json()}) + "\n" + json.dumps(played(trajectory)) + "\n"
    (tmp_path / "trajectories.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert read_played(tmp_path / "trajectories.jsonl.gz") == [played(trajectory)] * 2
