"""The learning curves' benchmark: its picture and its parts, from made-up curves; one run of it, small."""

import json

import pytest
from learning import tiny_model  # noqa: F401  (one thread)

from benchmarks import bench_curves
from benchmarks.bench_curves import main
from benchmarks.curves_tables import section
from manus_fast.errors import UserError


def record(*seeds, algorithms=("ppo", "grpo"), commit="abc"):
    """Of ten tasks imitation solves the first three, the others five and as many as the seed's number, from the second
    on; one task fails to be played."""
    runs = []
    for seed in seeds:
        panel = [[0, 0.3], [1000 + seed, 0.5], [2000, 0.6]]
        run = {"seed": seed, "steps": 2000, "panel": panel, "unseen": 0.5 + seed / 10}
        run["solved"] = "0" + "1" * (5 + seed) + "0" * (3 - seed) + "-"
        runs += [{"algorithm": name, **run} for name in algorithms]
        runs.append({"algorithm": "sft", "seed": seed, "unseen": 0.3, "solved": "1110000000"})
    return {"command": f"run {seeds}", "commit": commit, "torch": "2", "cpus": 4, "cores": 2, "runs": runs}


def written(folder, **records):
    for name, made in records.items():
        (folder / f"{name}.json").write_text(json.dumps(made))
    return [str(folder / f"{name}.json") for name in records]


def test_parts_are_joined_and_every_seed_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = written(tmp_path, a=record(2, 1), b=record(0))
    out = tmp_path / "all.json"
    main(["--from", *files, "--json", str(out), "--plot", str(tmp_path / "curves.svg")])
    whole = json.loads(out.read_text())
    assert [(run["seed"], run["algorithm"]) for run in whole["runs"][:3]] == [(0, "grpo"), (0, "ppo"), (0, "sft")]
    assert len(whole["runs"]) == 9 and whole["command"] == "run (2, 1); run (0,)"
    assert whole["mean_unseen"] == pytest.approx({"sft": 0.3, "ppo": 0.6, "grpo": 0.6})
    assert list(whole["mean_unseen"]) == ["sft", "ppo", "grpo"] and "     ppo   60.0" in capsys.readouterr().out
    first, _, third, mean = section(whole)[-4:]
    # Of nine tasks that both played, imitation alone solves one, the other alone three and the seed's number.
    assert first.startswith("| 0 | 30.0 | 50.0, +22.2 (") and third.startswith("| 2 | 30.0 | 70.0, +44.4 (")
    assert mean.startswith("| mean | 30.0 | 60.0, +33.3 (+") and first.endswith("| 2, 2 |")
    assert "each run on 2 of 4 CPU cores" in "\n".join(section(whole))
    assert section(whole)[0].startswith("![") and "the 10 tasks of valid_unseen" in "\n".join(section(whole))
    text = (tmp_path / "curves.svg").read_text()
    assert "<svg" in text and text.count('id="line2d_') > 8  # eight curves, and the ticks


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--from: expected files of one commit"):
        main(["--from", *written(tmp_path, a=record(0), b=record(1, commit="def"))])
    other = record(0)
    other["runs"][0]["unseen"] = 0.1
    with pytest.raises(SystemExit, match=r"expected each run once, got two of ppo with seed 0"):
        main(["--from", *written(tmp_path, a=record(0), b=other)])


def test_an_interrupted_command_leaves_the_runs_that_were_over(tmp_path, monkeypatch):
    out = tmp_path / "made.json"

    def one_run(arguments, item):
        seed, name = item
        if name == "grpo":
            raise KeyboardInterrupt
        return {"seed": seed, "algorithm": name, "unseen": seed / 10}

    monkeypatch.setattr(bench_curves, "one_run", one_run)
    with pytest.raises(KeyboardInterrupt):
        main(["--seeds", "5", "3", "--start", "given", "--json", str(out), "--algorithms", "ppo", "grpo"])
    made = json.loads(out.read_text())
    assert [(run["seed"], run["algorithm"]) for run in made["runs"]] == [(3, "ppo"), (5, "ppo")]
    assert made["mean_unseen"] == {"ppo": pytest.approx(0.4)} and made["cores"] >= 1


def test_runs_begin_from_the_policies_of_a_folder(tmp_path):
    from manus_fast.modeling.tiny import make_policy

    words = "You are in the middle of a room . Looking around see cabinet Your task is to : put Think Act Household"
    shape = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}
    make_policy(tmp_path / "start" / "seed5" / "sft" / "model", [words], max_length=512, **shape)
    small = ["environment.max_steps=2", "rollout.max_turn_tokens=4", "rollout.max_traj_tokens=20", "evaluation.tasks=2"]
    small += ["environment.options.num_valid_unseen=2", "training.num_rollouts=8", "ppo.batch_size=8"]
    words = ["--start", str(tmp_path / "start"), "--output_dir", str(tmp_path / "out"), "--freq", "1"]
    words += ["--seeds", "5", "--algorithms", "grpo", "--seconds", "0.01", "--json", str(tmp_path / "made.json")]
    main([*words, *small, "--set", "grpo", "training.num_rollouts=16"])
    made = json.loads((tmp_path / "made.json").read_text())
    assert [(run["seed"], run["algorithm"]) for run in made["runs"]] == [(5, "grpo"), (5, "sft")]
    assert made["runs"][0]["panel"][0] == [0, 0.0] and len(made["runs"][0]["train"]) >= 1
    assert made["mean_unseen"] == {"sft": 0.0, "grpo": 0.0} and "--start FOLDER --seconds 0.01" in made["command"]
    assert [run["solved"] for run in made["runs"]] == ["00", "00"]
    assert made["command"].endswith("--set grpo training.num_rollouts=16")
    config = json.loads((tmp_path / "out" / "seed5" / "grpo" / "config.json").read_text())
    assert config["training"]["num_rollouts"] == 16 and config["ppo"]["batch_size"] == 8
    with pytest.raises(UserError, match="--set: expected one of grpo, then KEY=VALUE, got ppo"):
        main([*words, "--set", "ppo", "ppo.epochs=2"])
