"""The benchmark of a language model that learns: one process through all its parts, and its figures by hand."""

import json

import pytest
from learning import household_policy

pytest.importorskip("torch")

from benchmarks.bench_alfworld_training import main, reached, run_figures
from benchmarks.slow_worlds import Delay

CONFIG = """
environment: {name: household, max_steps: 2, options: {num_train: 60, num_valid: 4}}
agent: {instructions: Household.}
rollout: {slots: 8, max_turn_tokens: 6, max_traj_tokens: 40, max_length: 512}
data: {demonstrations: 60}
sft: {epochs: 1, batch_size: 4, eval_every: 1000}
ppo: {batch_size: 8}
evaluation: {tasks: 2}
training: {num_rollouts: 8, group_size: 4, learning_rate: 1.0e-3, save_strategy: "no"}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    fast = Delay(reset=0.002, step=0.001, workers=4)
    model = household_policy(folder / "tiny")
    (folder / "config.yaml").write_text(CONFIG.replace("max_steps: 2", "max_steps: 12"))
    given = ["--config", str(folder / "config.yaml"), "--model", str(model), "--out", str(folder / "out")]
    given += ["--variants", "ours", "ahead", "lockstep", "reference", "textworld", "--seconds", "0.01", "--tasks", "3"]
    given += ["--retry", "slow", "training.learning_rate=1.0e-4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Delay, "measured", lambda: fast)
        record = main([*given, "--overrides", "rollout.max_traj_tokens=12", "sft.time_limit=0.3"])
    return folder / "out", record


RUNS = [f"gigpo-{name}" for name in ("ours", "ahead", "lockstep", "reference", "textworld", "slow")]


def test_every_part_is_there_and_told(run):
    out, record = run
    assert json.loads((out / "alfworld_training.json").read_text()) == record
    assert list(record["parts"]) == ["start", "before", "sft", *RUNS]
    for name in ("before", "sft", *RUNS):
        for kind, file in (("panel", f"eval_{name}.json"), ("sampled", f"eval_{name}_sampled.json")):
            panel = record["parts"][name][kind]
            assert panel["split"] == "valid_unseen" and panel["tasks"] == 3 and panel["failed"] == 0
            assert json.loads((out / file).read_text())["summary"]["tasks"] == 3
            assert len((out / f"{file.replace('eval', 'played')}l").read_text().splitlines()) == 3
    for name in RUNS:
        part = record["parts"][name]
        assert sum(part["shares"].values()) == pytest.approx(1.0)
        assert min(part["shares"].values()) > 0.0 and part["episodes"] == 8 * part["iterations"]
        assert (part["algorithm"], part["variant"]) == tuple(name.split("-"))
        assert part["backend"] == ("reference" if name == "gigpo-reference" else "auto")
    assert record["parts"]["gigpo-textworld"]["delay"] == {"reset": 0.002, "step": 0.001, "workers": 4}
    told = json.loads((out / "gigpo-slow" / "config.json").read_text())
    assert told["training"]["learning_rate"] == 1e-4 and record["config"]["training"]["learning_rate"] == 1e-3


def test_variants_begin_from_one_policy_and_sample_the_same(run):
    """What is sampled hangs on names and weights alone: a barrier, late worlds or other kernels change nothing."""
    out, _ = run
    said = []
    for name in ("ours", "lockstep", "textworld"):
        lines = (out / f"gigpo-{name}" / "trajectories.jsonl").read_text().splitlines()[:4]
        said.append([[turn["ids"] for turn in json.loads(line)["turns"]] for line in lines])
    assert said[0] == said[1] == said[2] and len(said[0]) == 4


@pytest.mark.parametrize("retry", [["slow"], ["a=1", "b=2"], ["ours", "b=2"]])
def test_a_retry_has_a_name_and_a_setting(retry, tmp_path):
    with pytest.raises(ValueError, match=r"--retry: expected a new name, then KEY=VALUE, got"):
        main(["--out", str(tmp_path), "--retry", *retry])


def test_a_bench_without_rl_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"--variants: expected a variant or a --retry, got neither"):
        main(["--out", str(tmp_path), "--variants"])


def test_figures_by_hand(tmp_path):
    row = {"train/success": 0.5, "rollout/sampled_tokens": 100, "rollout/engine_seconds": 2.0, "rollout/seconds": 2.5}
    row |= {"rollout/env_seconds": 0.25, "rollout/idle_seconds": 0.25}
    row |= {"update/score_seconds": 1.0, "time/update": 4.0, "time/load": 0.5}
    row |= {"rollout/episodes": 10, "update/tokens": 1000, "train/iteration": 1, "step": 30, "time": 8.0}
    second = {**row, "train/iteration": 2, "step": 70, "time": 18.0, "eval/success": 0.75, "time/evaluate": 3.0}
    first = {**row, "time/evaluate": 2.0}
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in (first, second, {"step": 70, "time": 22.0, "eval/success": 1}))
    )
    found = run_figures(path, seconds=18.0)  # of which 2 went into the evaluation between the iterations
    assert (found["seconds"], found["iterations"], found["episodes"], found["steps"]) == (16.0, 2, 20, 70)
    assert found["shares"] == {
        "generation": 0.25, "environment": 0.03125, "log_prob": 0.125, "update": 0.375, "hand_over": 0.0625,
        "other": 0.15625,
    }  # fmt: skip
    # Of 16 s, 5 went into rollouts, half a second of it idle, 8 into updates and 1 into hand-overs.
    assert (found["host_share"], found["idle_share"]) == (0.1875, 0.15625)
    assert found["trajectories_per_hour"] == 4500
    assert (found["sampled_tokens_per_s"], found["rollout_tokens_per_s"], found["update_tokens_per_s"]) == (50, 40, 250)
    assert found["hand_over_ms"] == 500
    assert [(p["seconds"], p["tokens"], p.get("panel")) for p in found["curve"]] == [
        (8.0, 100, None),
        (18.0, 200, 0.75),
    ]


def test_the_time_to_a_success_wants_several_iterations():
    curve = [{"seconds": float(n), "success": s} for n, s in enumerate([0.9, 0.1, 0.5, 0.6, 0.7, 0.5])]
    assert reached(curve, 0.6) == 4.0 and reached(curve, 0.65) is None
