"""Whole runs on two ranks: `sft --gpus 2` and `ppo --gpus 2` give the numbers of one process, go on from its
checkpoints and it from theirs, and a rank that is killed leaves a run that can be resumed."""

import contextlib
import io
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from learning import household_policy
from safetensors.torch import load_file

from manus_fast import cli
from manus_fast.checkpoint import latest
from manus_fast.launch import launch
from manus_fast.modeling.load import load_model

HERE = Path(__file__).parent
BASE = [
    "environment.name=household", "environment.options={num_train: 60, num_valid: 4}", "agent.instructions=Household.",
    "rollout.slots=8", "rollout.max_turn_tokens=6", "rollout.max_traj_tokens=40", "rollout.max_length=512",
    "evaluation.tasks=3", "training.keep_checkpoints=9", "training.save_strategy=epoch",
]  # fmt: skip
PPO = [
    *BASE, "environment.max_steps=2", "algorithm=ppo", "ppo.batch_size=4", "ppo.epochs=2", "ppo.kl_coef=0.5",
    "ppo.kl_target=0.001", "ppo.kl_horizon=20", "ppo.ent_coef={start: 0.01, kind: cosine}",
    "training.num_rollouts=4", "training.total_steps=24", "training.learning_rate={start: 3e-4, kind: linear}",
    "curriculum={rounds: [1, 2], steps: 6}", "reward_fn=ranks_rewards:letters",
]  # fmt: skip
SFT = [
    *BASE, "environment.max_steps=30", "data.demonstrations=24", "sft.batch_size=8", "sft.epochs=2", "sft.eval_every=4",
    "sft.learning_rate=1e-3",
]  # fmt: skip
PAIRS = [*BASE, "environment.max_steps=2", "training.gradient_accumulation_steps=2"]
DPO = [*PAIRS, "dpo.batch_size=8", "dpo.epochs=2", "dpo.learning_rate=1e-3", "dpo.sft_coef=0.5"]
REWARD = [*PAIRS, "reward_model.batch_size=8", "reward_model.epochs=2", "reward_model.learning_rate=2e-3"]
CUT = 2  # iterations of a PPO run, after which the other number of ranks goes on


def words(command, folder, out, *more):
    base = {"ppo": PPO, "sft": SFT, "dpo": DPO, "reward-model": REWARD}[command]
    return [command, *base, f"model.path={folder}", f"training.output_dir={out}", *more]


def write_pairs(file):
    """Pairs of two turns whose better side says "look" where the other says "find"."""

    def said(role, text):
        return {"role": role, "content": text}

    def side(words, number):
        return [said("assistant", f"Think: find it\nAct: {words[0]}"), said("user", f"You see {number} ."),
                said("assistant", f"Think: it\nAct: {words[1]}")]  # fmt: skip

    with file.open("w") as lines:
        for number in range(20):
            sides = (side(("look", "look it"), number), side(("find it", "find"), number))
            prompt = [said("user", f"Your task is to : look {number}")]
            pair = {"prompt": prompt, "outcome": [1, 0], "chosen": sides[0], "rejected": sides[1]}
            lines.write(json.dumps(pair) + "\n")


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def cut_copy(run, to, iteration=CUT):
    """A run as it was when this iteration had been saved."""
    shutil.copytree(run, to)
    step = next(record["step"] for record in records(run) if record.get("train/iteration") == iteration)
    kept = [path for path in to.glob("step-*") if int(path.name.split("-")[1]) <= step]
    for path in set(to.glob("step-*")) - set(kept):
        shutil.rmtree(path)
    assert latest(to).name == f"step-{step:08d}" and len(kept) == iteration
    shutil.rmtree(to / "model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs: one/…, by one process; two/…, by two ranks, the last of which was killed; and what was told."""
    root = tmp_path_factory.mktemp("runs")
    folder = household_policy(root / "tiny")
    one, two = root / "one", root / "two"
    write_pairs(root / "pairs.jsonl")
    pairs = ["--dataset_name", str(root / "pairs.jsonl")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), str(HERE)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KILLED_AT", str(root / "killed_at"))
        assert cli.main(words("ppo", folder, one / "ppo")) == 0
        assert cli.main(words("sft", folder, one / "sft")) == 0
        for name in ("dpo", "reward-model"):
            assert cli.main(words(name, folder, one / name, *pairs)) == 0
        for name in ("resumed", "sharded"):
            cut_copy(one / "ppo", two / name)
        lines = [
            words("sft", folder, two / "sft", "--gpus", "2"),
            words("ppo", folder, two / "ppo", "--gpus", "2"),
            words("ppo", folder, two / "resumed", "training.resume=true"),
            words("ppo", folder, two / "sharded", "training.resume=true", "backend={kind: fsdp, zero_stage: 2}"),
            words("sft", folder, two / "sharded_sft", "backend={kind: fsdp, zero_stage: 3}"),
            *(words(name, folder, two / name, "--gpus", "2", *pairs) for name in ("dpo", "reward-model")),
            words("dpo", folder, two / "sharded_dpo", *pairs, "backend={kind: fsdp, zero_stage: 2}"),
            words("ppo", folder, two / "killed", "reward_fn=ranks_rewards:deadly"),
        ]
        (root / "lines.json").write_text(json.dumps(lines))
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            code = launch(2, [str(root / "lines.json")], [sys.executable, str(HERE / "runs_worker.py")])
        (root / "seconds").write_text(str(time.time() - float((root / "killed_at").read_text())))
        cut_copy(two / "ppo", one / "resumed")
        cut_copy(two / "sharded", one / "undivided", CUT + 1)
        for name in ("resumed", "undivided"):
            assert cli.main(words("ppo", folder, one / name, "training.resume=true")) == 0
        again = words("ppo", folder, two / "killed", "reward_fn=ranks_rewards:letters", "training.resume=true")
        left = latest(two / "killed")
        assert cli.main(again) == 0
    return root, code, told.getvalue(), left


SAME = (
    "step", "train/iteration", "train/reward", "policy/loss", "policy/entropy", "policy/ref_kl", "critic/loss",
    "update/kl_coef", "update/ent_coef", "update/learning_rate", "update/grad_norm", "curriculum/stage",
)  # fmt: skip


def same(ours, others, count):
    ours, others = ([r for r in run if "train/iteration" in r] for run in (ours, others))
    assert len(ours) == len(others) >= count
    for a, b in zip(ours, others, strict=True):
        for name in SAME:
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-5), (name, a["train/iteration"])


def test_ppo_on_two_ranks_has_the_figures_of_one_process(runs):
    """Rewards, losses, adaptive KL, schedules and the curriculum's stage, over several iterations."""
    root = runs[0]
    one, two = records(root / "one" / "ppo"), records(root / "two" / "ppo")
    same(two, one, 3)
    steered = [record["update/kl_coef"] for record in one if "update/kl_coef" in record]
    assert len(set(steered)) == len(steered) and {r.get("curriculum/stage") for r in one} >= {1.0, 2.0}
    for out in (root / "one" / "ppo", root / "two" / "ppo"):
        assert len((out / "trajectories.jsonl").read_text().splitlines()) == 4 * len(steered)
        load_model(out / "model")


@pytest.mark.parametrize(
    ("resumed", "whole"),
    [
        ("two/resumed", "one/ppo"),
        ("one/resumed", "two/ppo"),
        ("two/sharded", "one/ppo"),
        ("one/undivided", "one/ppo"),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(runs, resumed, whole):
    """As if it had never been cut: optimizer, adaptive KL, curriculum, order of rows and tasks come back; also where
    two ranks divide the state (ZeRO-2) of a run of one process, and one process goes on with theirs."""
    root = runs[0]
    same(records(root / resumed), records(root / whole), CUT + 1)


@pytest.mark.parametrize("name", ["sft", "sharded_sft"])
def test_sft_on_two_ranks_has_the_figures_of_one_process(runs, name):
    one, two = records(runs[0] / "one" / "sft"), records(runs[0] / "two" / name)
    assert len(one) == len(two) >= 4
    for a, b in zip(two, one, strict=True):
        for figure in ("step", "sft/loss", "sft/grad_norm", "sft/tokens", "sft/epoch"):
            assert a[figure] == pytest.approx(b[figure], rel=2e-3, abs=2e-5), (figure, a["step"])
    assert one[-1]["sft/loss"] < one[0]["sft/loss"]
    summaries = [json.loads((runs[0] / n / "eval.json").read_text())["summary"] for n in ("one/sft", f"two/{name}")]
    assert summaries[0]["success"] == summaries[1]["success"]
    ours, theirs = (load_file(runs[0] / n / "model" / "model.safetensors") for n in (f"two/{name}", "one/sft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[n], theirs[n], atol=2e-3) for n in ours)  # six steps of 1e-3 were made


@pytest.mark.parametrize(("name", "whole"), [("dpo", "dpo"), ("sharded_dpo", "dpo"), ("reward-model", "reward-model")])
def test_pairs_on_two_ranks_have_the_figures_of_one_process(runs, name, whole):
    """Losses, implicit rewards, gradients and validation, step by step."""
    one, two = records(runs[0] / "one" / whole), records(runs[0] / "two" / name)
    block = whole.replace("-", "_")
    assert len(one) == len(two) >= 4
    for ours, theirs in zip(two, one, strict=True):
        compared = [n for n in theirs if n.startswith(f"{block}/") and not n.endswith("/seconds")]
        assert f"{block}/margin" in compared or theirs["step"] == 0  # where it is only validated
        assert ours.keys() == theirs.keys()
        for figure in compared:
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-2, abs=2e-5), (figure, theirs["step"])
    losses = [record[f"{block}/loss"] for record in one if record["step"]]
    assert losses[-1] < losses[0]
    if whole == "reward-model":
        found = [json.loads((runs[0] / where / name / "accuracy.json").read_text()) for where in ("one", "two")]
        assert found[0] == found[1] and found[0]["accuracy"]["outcome"] == 1.0


def test_a_killed_rank_ends_the_run_by_name_and_leaves_it_resumable(runs):
    root, code, told, left = runs
    assert code == 1 and "rank 1 of 2" in told and "was killed by SIGKILL" in told
    assert float((root / "seconds").read_text()) < 30
    state = json.loads((left / "state.json").read_text())["scalars"]
    assert state["counters"]["iteration"] == 1
    same(records(root / "two" / "killed"), records(root / "one" / "ppo"), 3)


def test_gpus_starts_as_many_ranks_of_the_same_command(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "launch", lambda ranks, line: asked.append((ranks, line)) or 7)
    line = ["ppo", "--gpus", "2", "ppo.gamma=0.9"]
    assert cli.main(line) == 7 and asked == [(2, line)]


@pytest.mark.parametrize(("count", "text"), [("0", "expected an integer >= 1, got 0"), ("3", "expected 2, the number")])
def test_counts_that_cannot_be_served_are_refused(monkeypatch, capsys, count, text):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["sft", "--gpus", count]) == 2
    assert text in capsys.readouterr().err


def test_the_launcher_runs_the_command_line_itself(capfd):
    assert launch(2, ["--version"]) == 0
    assert capfd.readouterr().out.strip() == cli.__version__  # rank 0's alone
