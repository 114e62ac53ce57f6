"""Expert iteration on the vault of test_search_strategies: a policy that knows nothing imitates what search opened."""

import itertools
import json

import numpy as np
import pytest
import torch
from learning import tiny_model  # noqa: F401  (one thread)
from safetensors.torch import load_file
from test_search_strategies import REPLIES, TEXTS, Dice, Vault, search, tasks

from manus_fast.agent.trajectory import Trajectory
from manus_fast.cli import main
from manus_fast.evaluate import Report
from manus_fast.expert_iteration import ExpertIteration, Round
from manus_fast.learn.expert_iteration import imitation_rows, solved_episodes
from manus_fast.modeling.load import load_model
from manus_fast.modeling.tiny import make_policy
from manus_fast.player import Player
from manus_fast.run_config import Config

BASE = [
    "agent.instructions=Open the vault.",
    "rollout.max_turn_tokens=16",
    "rollout.max_traj_tokens=200",
    "rollout.max_length=512",
    "rollout.temperature=1.0",
    "evaluation.split=train",
    "evaluation.tasks=2",
    "expert_iteration.tasks=4",
    "search.strategy=best_of_n",
    "search.budget_tokens=400",
    "sft.epochs=12",
    "sft.batch_size=4",
    "sft.learning_rate=1e-2",
    "sft.patience=null",
    "sft.eval_every=1000",
    "training.save_strategy=epoch",
    "training.keep_checkpoints=9",
]


class Vaultworld(Vault):
    def tasks(self, split):
        return tasks(*["RL"] * 20)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    shape = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}
    return make_policy(tmp_path_factory.mktemp("start") / "model", TEXTS, seed=0, max_length=512, **shape)


@pytest.fixture
def searches(monkeypatch):
    """The tasks and seeds of every search, each of which the dice of test_search_strategies play."""
    calls = []

    def played(self, chosen, seed=0, config=None, score=None):
        calls.append(([task.id for task in chosen], seed, config, score))
        trees, searcher = search([task.data["code"] for task in chosen], strategy="best_of_n", n=12)
        self.search_stats = searcher.stats
        return trees

    monkeypatch.setattr(Player, "search", played)
    return calls


def make(start, out, *more):
    config = Config.load(None, [*BASE, f"model.path={start}", f"training.output_dir={out}", *more])
    return ExpertIteration(config, environment=Vaultworld())


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_rounds_of_search_and_imitation_teach_what_search_found(start, tmp_path, searches):
    out = tmp_path / "run"
    run = make(start, out, "sft.epochs=40")
    rounds = list(run.rounds())
    assert [(r.number, r.tasks) for r in rounds] == [(1, 4), (2, 4)]
    assert all(0 < r.solved <= 4 and r.episodes == r.solved and r.tokens > 0 for r in rounds)
    assert rounds[1].rows == rounds[0].rows + rounds[1].episodes  # earlier rounds' episodes stay
    assert not set(searches[0][0]) & set(searches[1][0]) and searches[0][1] != searches[1][1]
    assert Report.load(out / "eval_before.json").summary.success.k == 0
    assert Report.load(out / "eval.json").summary.success.rate == rounds[1].success == 1.0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [0, 1, 2] and lines[2]["eval/success"] == 1.0
    assert lines[1]["search/solved_rate"] == rounds[0].solved / 4 and lines[1]["sft/rows"] == rounds[0].rows
    episodes = [Trajectory.from_json(json.loads(line)) for line in (out / "round1" / "trajectories.jsonl").open()]
    assert len(episodes) == rounds[0].episodes and all(episode.success for episode in episodes)
    load_model(out / "model")


def test_a_run_goes_on_from_its_last_round_or_from_its_search(start, tmp_path, searches, monkeypatch):
    whole, cut, short = tmp_path / "whole", tmp_path / "cut", ["sft.epochs=2", "evaluation.tasks=1"]
    list(make(start, whole, *short).rounds())
    first = list(make(start, cut, *short, "expert_iteration.rounds=1").rounds())
    asked = len(searches)

    from manus_fast import expert_iteration

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(expert_iteration, "imitation_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            list(make(start, cut, *short, "training.resume=true").rounds())
    assert len(searches) == asked + 1 and (cut / "round2" / "search.json").is_file()
    run = make(start, cut, *short, "training.resume=true")
    assert run.done == first
    (second,) = run.rounds()
    assert len(searches) == asked + 1 and second.number == 2  # what was searched is not searched again
    wanted, got = weights(whole), weights(cut)
    assert wanted.keys() == got.keys() and all(torch.equal(wanted[name], got[name]) for name in wanted)
    steps = [json.loads(line)["step"] for line in (cut / "metrics.jsonl").open()]
    assert steps == [0, 1, 2]
    over = make(start, cut, *short, "training.resume=true")
    assert over.run().summary.success.rate == second.success and [r.number for r in over.done] == [1, 2]


def test_options_of_a_round(start, tmp_path, searches):
    options = ["expert_iteration.restart=true", "expert_iteration.replay=false", "expert_iteration.fit_values=true"]
    seen = []

    run = make(start, tmp_path, *options, "sft.epochs=1", "search.strategy=mcts")
    first = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for done in run.rounds():
        seen.append(done)
    assert seen[1].rows == seen[1].episodes
    moved = max(float((p.detach() - first[name]).abs().max()) for name, p in run.model.named_parameters())
    assert 0 < moved <= 1e-2 * (seen[1].sft_steps + 1e-3)  # Adam's steps from the first weights, not from round 1's
    (_, _, config, score), (_, _, later, values) = searches
    assert config.value == "rollout" and score is None and later.value == "model" and callable(values)


def test_adapters_are_merged_after_each_round(start, tmp_path, searches):
    """Each round trains new ones upon the weights so far, which are those of a plain model."""
    pytest.importorskip("peft")
    run = make(start, tmp_path, "model.lora={rank: 2, export: adapter}", "sft.epochs=1", "evaluation.tasks=1")
    states = [{name: p.detach().clone() for name, p in run.model.named_parameters()}]
    for _ in run.rounds():
        states.append({name: p.detach().clone() for name, p in run.model.named_parameters()})
    assert len(states) == 3 and states[0].keys() == states[1].keys() == states[2].keys()
    for before, after in itertools.pairwise(states):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {name for name in before if name.endswith("proj.weight")}
        changes = [after[name] - before[name] for name in moved]
        assert max(int(torch.linalg.matrix_rank(change, rtol=1e-4)) for change in changes) == 2
    kept = weights(tmp_path)
    assert all(torch.equal(weight, states[2][name]) for name, weight in kept.items())


def test_two_rounds_number_their_nodes_alike_and_keep_all_their_turns():
    trees, _ = search(["RL", "LR"], strategy="best_of_n", n=30)
    episodes = solved_episodes(trees)
    assert len(episodes) == 2 and [e.turns[0].node_id for e in episodes] == [e.turns[0].node_id for e in episodes]
    once, twice = imitation_rows([episodes]), imitation_rows([episodes, episodes])
    assert sum(r.loss_mask.sum() for r in twice) == 2 * sum(r.loss_mask.sum() for r in once)
    assert [r.episode for r in twice] == [0, 1, 2, 3] and [r.group for r in twice] == [0, 1, 2, 3]


def test_several_solved_episodes_of_a_tree_share_their_turns():
    options = {"strategy": "beam", "proposals": 60, "breadth": 40, "widen": False, "stop_on_success": False}
    (tree,), _ = search(["RL"], engine=Dice((0.4, 0.4, 0.2)), discount=0.9, prune_repeats=False, **options)
    best, second, third = solved_episodes([tree], keep=3)
    assert len(best.turns) == 2 and len(second.turns) >= 3  # the one without a wait earns more
    assert [e.member for e in (best, second, third)] == [0, 1, 2] and len({e.group for e in (best, second)}) == 1
    rows = imitation_rows([[best, second, third]])
    turns = {turn.node_id: len(turn.ids) for e in (best, second, third) for turn in e.turns}
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(turns.values())
    assert len(solved_episodes([tree])) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["expert_iteration.rounds=0"], "expert_iteration.rounds: expected an integer >= 1, got 0"),
        (["expert_iteration.tasks=11"], "expert_iteration.tasks: expected at most the 20 tasks of train over all 2"),
        (["search.value=model"], "search.value: expected reward, rollout or verbal for the first round"),
        (["expert_iteration.keep=2"], "search.stop_on_success: expected false with expert_iteration.keep 2"),
    ],
)
def test_mistakes_are_told_before_anything_is_searched(start, tmp_path, searches, words, message):
    with pytest.raises(ValueError, match=message):
        make(start, tmp_path / "run", *words)
    assert not searches


def test_a_round_without_a_solved_task_says_so(start, tmp_path, monkeypatch):
    trees, searcher = search(["LLLLLLLL"], strategy="greedy", engine=Dice((0.0, 0.0, 1.0)))

    def nothing(self, *_, **__):
        self.search_stats = searcher.stats
        return trees

    monkeypatch.setattr(Player, "search", nothing)
    with pytest.raises(ValueError, match=r"expert_iteration.tasks: expected at least one that search solves"):
        list(make(start, tmp_path).rounds())


def test_the_command_plays_the_household_world(tmp_path, capsys, monkeypatch):
    """A policy that knows nothing solves nothing, so the first episode of each tree is declared solved."""
    found = Player.search

    def declared(self, *arguments, **options):
        trees = found(self, *arguments, **options)
        for tree in trees:
            leaf = max(tree.nodes, key=lambda node: node.depth)
            leaf.success, tree.solution = True, leaf
        return trees

    monkeypatch.setattr(Player, "search", declared)
    texts = ["Household. You arrive at desk 1. Nothing happens.", *REPLIES]
    shape = {"hidden": 32, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 32}
    policy, out = make_policy(tmp_path / "policy", texts, seed=0, max_length=1024, **shape), tmp_path / "run"
    words = ["expert-iteration", "--model_path", str(policy), "--output_dir", str(out), "--tasks", "3", "--rounds", "1"]
    words += ["--budget_tokens", "30", "--num_train_epochs", "1", "--strategy", "best_of_n", "sft.batch_size=2"]
    words += ["rollout.max_turn_tokens=6", "environment.max_steps=3", "evaluation.tasks=2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "round 1: search solved 3 of 3 tasks, 3 new episodes, 3 rows imitated" in said
    assert "difference" in said and "the model is in" in said
    scalars = json.loads((out / "step-00000001" / "state.json").read_text())["scalars"]
    assert Round(**scalars["expert_iteration_rounds"][0]).solved == 3
    assert np.isfinite([json.loads(line)["time"] for line in (out / "metrics.jsonl").open()]).all()
    assert main([*words, "--strategy", "astar"]) == 2
    assert "--strategy: expected one of" in capsys.readouterr().err
