"""DPO in rounds on a policy's own episodes; the policy knows nothing, so which of its episodes succeed is made up."""

import json
import shutil

import pytest
import torch
from learning import household_policy, tiny_model  # noqa: F401  (one thread)
from safetensors.torch import load_file

from manus_fast import cli
from manus_fast.evaluate import Report
from manus_fast.player import Player
from manus_fast.preference import PreferenceTune
from manus_fast.preference_rounds import PreferenceRounds
from manus_fast.run_config import Config

BASE = [
    "environment.name=household", "environment.options={num_train: 40, num_valid: 4}", "environment.max_steps=2",
    "agent.instructions=Household.", "rollout.slots=16", "rollout.max_turn_tokens=6", "rollout.max_traj_tokens=40",
    "rollout.max_length=512", "rollout.temperature=2.0", "evaluation.tasks=2", "training.keep_checkpoints=9",
    "dpo.rounds=2", "dpo.tasks=6", "dpo.members=4", "dpo.per_task=1", "dpo.batch_size=3", "dpo.learning_rate=1e-2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return household_policy(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def collected(monkeypatch):
    """The tasks of every collection, whose episodes succeed by turns; the second of each task failed to be played."""
    calls, collect = [], Player.collect

    def told(self, tasks, *arguments):
        calls.append([task.id for task in tasks])
        episodes = collect(self, tasks, *arguments)
        for number, episode in enumerate(episodes):
            episode.success = number % 2 == 0
            episode.error = "broken" if number % 4 == 1 else None
        return episodes

    monkeypatch.setattr(Player, "collect", told)
    return calls


def make(folder, out, *more):
    return PreferenceRounds(Config.load(None, [*BASE, f"model.path={folder}", f"training.output_dir={out}", *more]))


def lines(file):
    return [json.loads(line) for line in file.open()]


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_each_round_plays_other_tasks_and_measures_from_the_policy_it_began_with(folder, tmp_path, collected):
    run = make(folder, tmp_path)
    rounds = list(run.rounds())
    assert [(r.number, r.episodes, r.sampled_success, r.kept) for r in rounds] == [
        (1, 24, 0.5, True),
        (2, 24, 0.5, True),
    ]
    assert [len(tasks) for tasks in collected] == [6, 6] and not set(collected[0]) & set(collected[1])
    for done in rounds:
        records = lines(tmp_path / f"round{done.number}" / "metrics.jsonl")
        assert records[0]["dpo/preference_loss"] == pytest.approx(0.6931472, abs=1e-5)  # policy and reference are one
        assert records[-1]["dpo/margin"] != 0 and len(records) == done.dpo_steps
        pairs = lines(tmp_path / f"round{done.number}" / "preferences.jsonl")
        assert len(pairs) == done.pairs >= 3 and all(pair["outcome"] == [1.0, 0.0] for pair in pairs)
        assert {pair["task"] for pair in pairs} <= set(collected[done.number - 1])
    played = json.loads((tmp_path / "round1" / "played.json").read_text())
    assert played["failed"] == 6 and played["pairs"] == rounds[0].pairs
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert not same(weights(tmp_path / "round1"), weights(tmp_path))
    assert same(weights(tmp_path / "round2"), weights(tmp_path))
    assert Report.load(tmp_path / "eval.json").summary.success.n == 2


def test_a_run_goes_on_from_its_last_round_or_from_its_pairs(folder, tmp_path, collected, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    list(make(folder, whole).rounds())
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "step-00000002")
    shutil.rmtree(cut / "round2")
    first = len(collected)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreferenceTune, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            make(folder, cut, "training.resume=true").run()
    assert len(collected) == first + 1
    run = make(folder, cut, "training.resume=true")
    (second,) = run.rounds()
    assert second.number == 2 and len(collected) == first + 1  # what was played is not played again
    assert same(weights(whole), weights(cut))


def test_a_round_that_plays_worse_is_taken_back(folder, tmp_path, collected, monkeypatch):
    play, plays = Player.play, []

    def better_at_first(self, tasks, *arguments):
        episodes = play(self, tasks, *arguments)
        for episode in episodes:
            episode.success = not plays
        plays.append(self)
        return episodes

    monkeypatch.setattr(Player, "play", better_at_first)
    run = make(folder, tmp_path, "dpo.rounds=1", "training.save_strategy=no")
    begun = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    (done,) = run.rounds()
    assert (done.before, done.success, done.kept) == (1.0, 0.0, False)
    assert same(begun, run.model.state_dict()) and run.report.summary.success.rate == 1.0
    assert not same(weights(tmp_path), weights(tmp_path / "round1"))
    assert lines(tmp_path / "metrics.jsonl")[-1]["eval/success"] == 1.0


def test_adapters_are_merged_and_one_engine_plays_all_rounds(folder, tmp_path, collected):
    pytest.importorskip("peft")
    run = make(folder, tmp_path, "model.lora={rank: 2}", "training.save_strategy=no")
    engine, begun = run.player.engine, {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.run()
    assert run.player.engine is engine and begun.keys() == run.model.state_dict().keys()
    moved = {name for name, tensor in run.model.state_dict().items() if not torch.equal(tensor, begun[name])}
    assert moved and all(name.endswith("proj.weight") for name in moved)
    assert lines(tmp_path / "round2" / "metrics.jsonl")[0]["dpo/preference_loss"] == pytest.approx(0.6931472, abs=1e-5)


def test_the_command_and_mistakes(folder, tmp_path, collected, capsys, monkeypatch):
    words = ["dpo", *BASE, "--model_path", str(folder), "--output_dir", str(tmp_path / "run"), "dpo.rounds=1"]
    assert cli.main([*words, "dpo.batch_size=32", "--save_strategy", "no"]) == 0  # more than there are pairs
    said = capsys.readouterr().out
    assert "round 1: " in said and " pairs of 24 episodes, 1 steps; success 0.0 % to 0.0 %" in said
    for more, message in (
        (["--dataset_name", "pairs.jsonl"], "data.name: expected null with dpo.rounds"),
        (["dpo.tasks=41"], "dpo.tasks: expected at most the 40 tasks of train over all 1 rounds, got 41 a round"),
        (["dpo.rounds=0"], "dpo.rounds: expected null or an integer >= 1, got 0"),
        (["dpo.members=1"], "dpo.members: expected an integer >= 2, got 1"),
    ):
        assert cli.main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(words) == 2
    assert (
        "dpo.tasks: expected at least one task with a success and a failure, got none of 6" in capsys.readouterr().err
    )
