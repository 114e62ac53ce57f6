"""Policy gradient on searched trees, on the vault of test_search_strategies: the right turn wins over the left one."""

import json

import numpy as np
import pytest
import torch
from test_expert_iteration import Vaultworld, start  # noqa: F401  (a fixture)
from test_search_strategies import FORMAT, REPLIES, search

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import pack
from manus_fast.player import Player
from manus_fast.run_config import Config
from manus_fast.search_trainer import SearchTrainer, make_trainer
from manus_fast.trainer import Trainer

BASE = [
    "algorithm=grpo",
    "agent.instructions=Open the vault.",
    "rollout.max_turn_tokens=16",
    "rollout.max_traj_tokens=200",
    "rollout.max_length=512",
    "rollout.correction=none",
    "evaluation.split=train",
    "evaluation.tasks=1",
    "ppo.batch_size=16",
    "ppo.share_prefixes=true",
    "ppo.drop_zero_variance=true",
    "training.collect=search",
    "training.num_rollouts=16",
    "training.learning_rate=3e-3",
    "training.total_steps=400",
    "training.save_strategy=no",
    "search.strategy=mcts",
]


@pytest.fixture
def searches(monkeypatch):
    calls = []

    def played(self, chosen, seed=0, config=None, score=None):
        calls.append(([task.id for task in chosen], seed))
        options = {"strategy": "best_of_n", "n": 12, "stop_on_success": False}
        trees, searcher = search([task.data["code"] for task in chosen], **options)
        self.search_stats = searcher.stats
        return trees

    monkeypatch.setattr(Player, "search", played)
    return calls


def make(folder, out, *more):
    config = Config.load(None, [*BASE, f"model.path={folder}", f"training.output_dir={out}", *more])
    return make_trainer(config, environment=Vaultworld())


def log_prob(trainer, text):
    """Of a whole reply in the first situation."""
    conversation = trainer.player.context.start(trainer.player.system_prompt, "start")
    prompt, ids = conversation.prompt().tolist(), FORMAT.reply(text).tolist()
    length, mask = len(prompt) + len(ids), np.arange(len(prompt) + len(ids)) >= len(prompt)
    zeros = np.zeros(length, np.float32)
    row = Row(np.asarray(prompt + ids), mask, np.where(mask, 0, -1).astype(np.int32), zeros, zeros, 0)
    with torch.no_grad():
        return float(trainer.policy.score(pack([row])).log_prob.sum())


def test_what_search_prefers_becomes_likelier(start, tmp_path, searches):  # noqa: F811
    trainer = make(start, tmp_path)
    assert isinstance(trainer, SearchTrainer)
    right, left = REPLIES[1], REPLIES[0]
    before = log_prob(trainer, right) - log_prob(trainer, left)
    trainer.run()
    assert log_prob(trainer, right) - log_prob(trainer, left) > before + 1.0
    assert len(searches) > 1 and len(searches[0][0]) == 2 and searches[0][1] != searches[1][1]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    first = lines[0]
    assert first["search/groups"] >= 2 and first["search/siblings"] >= 2 * first["search/groups"]
    assert first["train/episodes"] == 2 and first["search/solved_rate"] == first["train/success"]
    assert first["update/rows"] < first["search/siblings"]  # situations in which nothing led anywhere are left out
    assert first["update/flops_ratio"] > 1.5 and first["step"] == first["search/steps"] > first["search/siblings"] / 2
    assert trainer.counters.tokens == sum(line.get("search/tokens", 0) for line in lines)


def test_plain_runs_are_plain(start, tmp_path):  # noqa: F811
    words = ["training.collect=play", "ppo.batch_size=4", "training.num_rollouts=8"]
    assert type(make(start, tmp_path, *words)) is Trainer
    with pytest.raises(ValueError, match=r"training.collect: expected play for Trainer, got 'search'"):
        Trainer(Config.load(None, [*BASE, f"model.path={start}", f"training.output_dir={tmp_path}"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm=ppo"],
            "ppo.advantage: expected one of grpo, rloo, gigpo with .* got 'turn'",
        ),
        (["ppo.dynamic_sampling=true"], "ppo.dynamic_sampling: expected false"),
        (["rewards={reward_model: 1}"], "rewards: expected parts of turns alone .* got reward_model"),
        (["search.strategy=greedy"], "search.strategy: expected one that samples"),
        (["search.value=model"], "search.value: expected reward, rollout or verbal"),
        (["search.temperature=0.5"], r"search.temperature: expected rollout.temperature \(1.0\) or null .* got 0.5"),
        (["curriculum.levels=[1, 2]", "curriculum.success=0.5"], "curriculum: expected no stages"),
    ],
)
def test_what_search_cannot_serve_is_refused(start, tmp_path, words, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        make(start, tmp_path, *words)
