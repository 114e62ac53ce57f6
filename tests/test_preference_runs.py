"""The way from a policy to pairs to a better policy, by the commands that a person types; small enough for a test."""

import json
import shutil

import pytest

from manus_fast import cli
from manus_fast.checkpoint import latest, load
from manus_fast.modeling.tiny import make_policy
from manus_fast.rewards.model import RewardModel

CONFIG = "demo_household"
SMALL = ["evaluation.tasks=4", "rollout.slots=16", "environment.max_steps=2", "rollout.max_turn_tokens=6"]
WORDS = (
    "You are in the middle of a room . Looking around see cabinet shelf Your task is to : put Think Act Reply go take"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with an untrained policy and its episodes."""
    folder = tmp_path_factory.mktemp("run")
    make_policy(folder / "model", [WORDS], hidden=32, heads=2, kv_heads=1, intermediate=32)
    words = ["data", "collect", "--config", CONFIG, "--model_path", str(folder / "model"), "--tasks", "6"]
    out = folder / "trajectories.jsonl"
    assert cli.main([*words, "--members", "4", "--temperature", "2.0", "--out", str(out), *SMALL]) == 0
    return folder


@pytest.fixture(scope="module")
def preferences(run):
    """Pairs from the episodes, whose rewards are made to differ as those of a policy that can play do."""
    records = [json.loads(line) for line in (run / "trajectories.jsonl").open()]
    for number, record in enumerate(records):
        record["turns"][-1]["reward"] += number % 4
    (run / "rewarded.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = ["data", "pairs", str(run / "rewarded.jsonl"), "--by", "reward", "--margin", "0.5", "--per_task", "2"]
    assert cli.main([*words, "--out", str(run / "pairs.jsonl")]) == 0
    with (run / "pairs.jsonl").open("a") as file:
        file.write("{}\n")
    return run / "pairs.jsonl"


def test_episodes_are_collected_and_paired(run, preferences, capsys):
    file = run / "trajectories.jsonl"
    records = [json.loads(line) for line in file.open()]
    assert len(records) == 24 and len({r["task"] for r in records}) == 6
    assert cli.main(["data", "pairs", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 0  # nothing succeeds yet
    assert (run / "preferences.jsonl").read_text() == ""
    pairs = [json.loads(line) for line in preferences.open()][:-1]
    assert len(pairs) == 12 and all(pair["margin"] >= 0.5 and pair["tokens"] for pair in pairs)


def test_dpo_trains_saves_and_resumes(run, preferences, tmp_path):

    def train(folder, *more):
        words = ["dpo", "--config", CONFIG, "--model_path", str(run / "model"), "--output_dir", str(folder)]
        words += ["--dataset_name", str(preferences), "--batch_size", "4", "--num_train_epochs", "2"]
        words += ["--learning_rate", "1e-3", "--save_strategy", "steps", "training.save_freq=3", "dpo.eval_every=100"]
        return cli.main([*words, *SMALL, *more])

    def figures(folder):
        return [json.loads(line) for line in (folder / "metrics.jsonl").open()]

    assert train(tmp_path / "whole") == 0
    start, *records = figures(tmp_path / "whole")
    assert start["step"] == 0 and start["dpo/validation"] == 0.0  # played before it learns
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert records[0]["dpo/loss"] == pytest.approx(0.6931472, abs=1e-4) and records[-1]["dpo/margin"] > 0
    assert (tmp_path / "whole" / "model" / "config.json").is_file() and (tmp_path / "whole" / "eval.json").is_file()
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["dpo"]["batch_size"] == 4
    # As if killed after step 3: the rest repeats what the whole run did.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "step-00000006")
    assert load(latest(tmp_path / "cut")).step == 3
    assert train(tmp_path / "cut", "training.resume=true") == 0
    again = [r for r in figures(tmp_path / "cut") if r["step"] > 3][-3:]
    assert [r["dpo/loss"] for r in again] == [r["dpo/loss"] for r in records[3:]]


def test_a_reward_model_trains_and_serves_ppo_and_search(run, preferences, tmp_path, capsys):
    out = tmp_path / "reward"
    words = ["reward-model", "--config", CONFIG, "--model_path", str(run / "model"), "--output_dir", str(out)]
    words += ["--dataset_name", str(preferences), "--batch_size", "4", "--learning_rate", "1e-3"]
    assert cli.main([*words, "reward_model.held_out=0.2", "--save_strategy", "no"]) == 0
    said = capsys.readouterr().out
    assert "outcome head: " in said and "step head: " in said and "2 held-out pairs" in said
    model = RewardModel.load(out)
    assert model.heads == ("outcome", "step")
    records = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    # Nothing is preferred at first: ln 2 of Bradley-Terry and ln 2 of the outcomes, for both heads.
    assert records[0]["reward_model/loss"] == pytest.approx(4 * 0.6931472, abs=1e-4)
    assert records[0]["reward_model/margin"] == 0

    ppo = ["ppo", "--config", CONFIG, "--model_path", str(run / "model"), "--output_dir", str(tmp_path / "ppo")]
    ppo += ["--reward_fn", "reward_model", "--num_rollouts", "4", "--batch_size", "4", "--save_strategy", "no", *SMALL]
    ppo += ["training.total_steps=8", f"reward_model.path={out}"]
    assert cli.main(ppo) == 0
    record = json.loads((tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < record["reward/reward_model"] < 1

    search = ["search", "--config", CONFIG, "--model_path", str(run / "model"), "--output_dir", str(tmp_path / "found")]
    search += ["--tasks", "2", "--reward_model", str(out), "rollout.max_turn_tokens=6", "environment.max_steps=2"]
    assert cli.main([*search, "--strategy", "best_of_n", "search.n=3"]) == 0
    settings = json.loads((tmp_path / "found" / "eval.json").read_text())["settings"]
    assert settings["search"]["judge"] == "model" and settings["search/scored"] >= 2
    assert cli.main([*search, "--strategy", "mcts", "--budget_tokens", "60"]) == 0
    settings = json.loads((tmp_path / "found" / "eval.json").read_text())["settings"]
    assert settings["search"]["value"] == "model" and settings["search/scored"] > 0
    capsys.readouterr()
    assert cli.main([*search, "--strategy", "beam"]) == 2
    assert "--reward_model: expected --strategy best_of_n, tot, got or mcts" in capsys.readouterr().err
    make_policy(tmp_path / "other", [WORDS + " more words"], hidden=32, heads=2, kv_heads=1, intermediate=32)
    ppo[4] = str(tmp_path / "other")
    assert cli.main(ppo) == 2
    assert "expected a reward model of the policy's tokenizer" in capsys.readouterr().err


def test_mistakes(run, tmp_path, capsys):
    words = ["dpo", "--config", CONFIG, "--model_path", str(run / "model"), "--output_dir", str(tmp_path), *SMALL]
    assert cli.main(words) == 2
    assert "data.name: expected a preferences.jsonl to train on" in capsys.readouterr().err
    assert cli.main([*words, "dpo.loss=hinge"]) == 2
    assert "dpo.loss: expected one of" in capsys.readouterr().err
    assert cli.main(["data", "pairs", str(tmp_path / "none.jsonl")]) == 2
    assert "found no file" in capsys.readouterr().err
