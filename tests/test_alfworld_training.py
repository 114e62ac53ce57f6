"""Training on ALFWorld's games with the shipped configs: SFT, then PPO with either engine, past whatever goes wrong.

A policy of a few thousand weights plays a few turns. Needs torch as well as the package alfworld.
"""

import json
import logging
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("torch")

from manus_fast.demo import make_small_policy
from manus_fast.envs.alfworld.games import make_games
from manus_fast.envs.alfworld.panels import find_root, find_tasks
from manus_fast.envs.pool import WorkerPool
from manus_fast.finetune import FineTune
from manus_fast.player import make_environment
from manus_fast.run_config import Config
from manus_fast.trainer import Trainer

pytestmark = pytest.mark.alfworld
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SMALL = [
    "model.dtype=float32",
    "model.gradient_checkpointing=false",
    "environment.max_steps=3",
    "rollout.engine=hf",
    "rollout.max_turn_tokens=40",
    "rollout.max_traj_tokens=200",
    "rollout.max_length=2048",
    "ppo.batch_size=4",
    "evaluation.tasks=2",
    "training.rollout_workers=1",
    "training.num_rollouts=4",
    "training.learning_rate=1e-3",
    "training.save_strategy=no",
]


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("games")
    make_games(path, {"train": 4, "valid_seen": 2, "valid_unseen": 2}, seed=41)
    return path


@pytest.fixture
def data(games, tmp_path):
    """A copy of the games, to be spoilt at will."""
    return Path(shutil.copytree(games, tmp_path / "data"))


@pytest.fixture(scope="module")
def model(games, tmp_path_factory):
    """A policy that has seen a few demonstrations: it mostly gives commands, if not good ones."""
    folder = tmp_path_factory.mktemp("model")
    settings = [
        *SMALL,
        f"environment.options.data_path={games}",
        "environment.backend=native",
        "environment.max_steps=50",
    ]
    settings += ["data.demonstrations=4", "sft.epochs=40", "sft.batch_size=2", "sft.learning_rate=3e-3"]
    settings += [f"model.path={folder / 'new'}", f"training.output_dir={folder / 'sft'}"]
    config = Config.load(CONFIGS / "sft_alfworld.yaml", settings)
    environment = make_environment(config)
    shape = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}
    make_small_policy(config, environment, folder / "new", shape=shape)
    FineTune(config, environment=environment).run()
    return folder / "sft" / "model"


def train(model, data, out, *more):
    """Runs the shipped config at a small size; returns the records of its iterations and its episodes."""
    settings = [f"model.path={model}", f"environment.options.data_path={data}", f"training.output_dir={out}"]
    Trainer(Config.load(CONFIGS / "ppo_alfworld.yaml", [*SMALL, *settings, *more])).run()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    episodes = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return [record for record in records if "policy/loss" in record], episodes


def test_the_shipped_config_trains_alike_with_either_engine(model, data, tmp_path):
    """One episode at a time, so that both runs sample from the same batches: word for word the same."""
    runs: dict[str, tuple] = {}
    for backend in ("native", "textworld"):
        more = (f"environment.backend={backend}", "training.total_steps=24", "rollout.slots=1")
        runs[backend] = train(model, data, tmp_path / backend, *more)
    iterations, episodes = runs["native"]
    assert len(iterations) >= 2 and all(math.isfinite(record["policy/loss"]) for record in iterations)
    assert not any(record["train/failed"] for record in iterations) and len(episodes) >= 8
    said = [[(turn["prompt_ids"], turn["ids"], turn["observation"]) for turn in e["turns"]] for e in episodes]
    others = runs["textworld"][1]
    assert said == [[(turn["prompt_ids"], turn["ids"], turn["observation"]) for turn in e["turns"]] for e in others]
    assert [e["reward"] for e in episodes] == [e["reward"] for e in others] and len({e["task"] for e in episodes}) == 4


def test_training_goes_on_past_a_cut_file_an_unknown_goal_and_a_killed_worker(
    model, data, tmp_path, monkeypatch, caplog
):
    root = find_root(data)
    tasks = find_tasks(root, "train")
    paths = [root / task.data["game"] for task in tasks]
    text = paths[0].read_text()
    paths[0].write_text(text[: len(text) // 2])
    game = json.loads(paths[1].read_text())
    goal = "(:goal (and (forall (?r - receptacle) (not (opened ?r))))))"
    game["pddl_problem"] = re.sub(r"\(:goal.*", goal, game["pddl_problem"], flags=re.DOTALL)
    paths[1].write_text(json.dumps(game))

    with caplog.at_level(logging.WARNING, "manus_fast"):
        iterations, episodes = train(
            model, data, tmp_path / "native", "environment.backend=native", "training.total_steps=24"
        )
    assert f"{paths[0]} is no whole game: its episodes will fail" in caplog.text
    # Episodes of the games that cannot be played are masked, the others train.
    assert {e["task"] for e in episodes if not e["valid"]} == {tasks[0].id, tasks[1].id}
    assert {e["task"] for e in episodes if e["valid"]} == {tasks[2].id, tasks[3].id}
    assert sum(record["train/failed"] for record in iterations) == sum(not e["valid"] for e in episodes)
    assert len(iterations) >= 2 and all(math.isfinite(record["policy/loss"]) for record in iterations)
    errors = " ".join({episode["error"] for episode in episodes if not episode["valid"]})
    assert "expected JSON" in errors and "goal: expected one of ALFWorld's six" in errors

    calls = []
    send_step = WorkerPool.send_step

    def killing(self, slot, action):
        send_step(self, slot, action)
        calls.append(action)
        if len(calls) == 2:
            os.kill(self._home[slot].process.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerPool, "send_step", killing)
    pools = []
    monkeypatch.setattr(WorkerPool, "close", lambda self, close=WorkerPool.close: (pools.append(self), close(self)))
    iterations, episodes = train(
        model, data, tmp_path / "textworld", "environment.backend=textworld", "training.total_steps=24"
    )
    # The real engine plays any goal, so that one game is masked; the episode of the killed worker was played again.
    assert sum(pool.restarts for pool in pools) == 1 and sum(record["rollout/retried"] for record in iterations) >= 1
    assert {e["task"] for e in episodes if not e["valid"]} == {tasks[0].id}
    assert {e["task"] for e in episodes if e["valid"]} == {task.id for task in tasks[1:]}
    # A second try of the broken game may have been what the killed worker held.
    errors = [episode["error"] for episode in episodes if not episode["valid"]]
    assert all("expected JSON" in error or "the worker died" in error for error in errors), errors
    assert sum("the worker died" in error for error in errors) <= 1 and len(errors) >= 2
    assert len(iterations) >= 2 and all(math.isfinite(record["policy/loss"]) for record in iterations)
