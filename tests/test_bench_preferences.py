"""The preferences' benchmark: both of its parts, small, and the seeds' records gathered."""

import json
import re

import pytest
from learning import tiny_model  # noqa: F401  (one thread)

from benchmarks.bench_preferences import PARTS, main, merge
from benchmarks.preferences_tables import mean_against, section
from manus_fast.modeling.tiny import make_policy

FOUND = {"difference": 0.05, "low": 0.01, "high": 0.085, "tasks": 400, "only_a": 30, "only_b": 50}


def records(seed, commit="abc", start=0.35):
    """Of both parts, as one seed leaves them."""
    shared = {"commit": commit, "arguments": {"tasks": 500, "n": 4}, "overrides": ["dpo.beta=0.3"]}
    row = {"seed": seed, "seconds": {"start": 1.0}}
    choices = ("best_of_n", "shortest", "oracle")
    dpo = {**row, "dpo_pairs": 700, "success": {"start": 0.35, "dpo": 0.4}, "against_start": {"dpo": FOUND}}
    rewarded = {**row, "pairs": 900, "against_start": dict.fromkeys(choices, FOUND)}
    rewarded["success"] = {"start": start, "mean": 0.3, **dict.fromkeys(choices, 0.4)}
    return {"dpo": {**shared, "row": dpo}, "reward_model": {**shared, "row": rewarded}}


def write(root, *seeds):
    for parts in seeds:
        for part, record in parts.items():
            folder = root / f"seed{record['row']['seed']}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"run_{part}.json").write_text(json.dumps(record))


def test_parts_and_seeds_are_gathered_in_a_table(tmp_path, capsys):
    write(tmp_path, records(0), records(1))
    merge(tmp_path, "run", str(tmp_path / "all.json"))
    cell, told = "40.0, +5.0 (+1.0 to +8.5)", capsys.readouterr().out.splitlines()
    assert told[0] == "| seed | imitation | DPO | reward model's of 4 | shortest of 4 | best of 4 |"
    assert told[3] == f"| 1 | 35.0 | {' | '.join([cell] * 4)} |"
    # A seed's difference has a variance of (80 - 20² / 400) / 400², the mean half of it: 1.96 deviations are 3.1.
    (low, high), *others = re.findall(r"\+5\.0 \(\+(\S+) to \+(\S+)\)", told[4])
    assert (float(low), float(high)) == pytest.approx((1.9, 8.1), abs=0.25) and others == 3 * [(low, high)]
    whole = json.loads((tmp_path / "all.json").read_text())
    assert whole["command"] == "python -m benchmarks.bench_preferences --seeds 0 1 --tasks 500 --n 4 dpo.beta=0.3"
    assert [row["seed"] for row in whole["rows"]] == [0, 1] and "row" not in whole
    assert whole["rows"][0]["success"]["dpo"] == 0.4 and whole["rows"][0]["against_start"]["oracle"] == FOUND
    assert "seed 0" in whole["note"] and whole["rows"][0]["seconds"] == {part: {"start": 1.0} for part in PARTS}


def test_the_interval_of_the_mean_is_over_tasks():
    """Seeds that differ widely among themselves, each without a doubt: no task could have gone otherwise."""
    sure = [{**FOUND, "only_a": 0, "only_b": 400}, {**FOUND, "only_a": 0, "only_b": 0}]
    rows = [{"against_start": {"dpo": found}} for found in sure]
    assert mean_against(rows, "dpo") == "+50.0 (+50.0 to +50.0)"


def test_seeds_that_were_run_differently_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"expected folders seed<n> with run_dpo.json"):
        merge(tmp_path, "run", None)
    write(tmp_path, records(0), records(1, commit="def"))
    with pytest.raises(SystemExit, match=r"expected seeds of one commit"):
        merge(tmp_path, "run", None)
    write(tmp_path, records(1, start=0.36))
    with pytest.raises(SystemExit, match=r"expected all parts of seed 1 to begin alike"):
        merge(tmp_path, "run", None)


def test_both_parts_run_and_leave_their_records(tmp_path, monkeypatch):
    """A policy that knows nothing; its episodes are told to have succeeded by turns."""
    from manus_fast.player import Player

    words = "You are in the middle of a room . Looking around see cabinet Your task is to : put Think Act Household"
    shape = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}
    make_policy(tmp_path / "seed5" / "sft" / "model", [words], max_length=512, **shape)
    collect = Player.collect

    def told(self, *arguments):
        episodes = collect(self, *arguments)
        for number, episode in enumerate(episodes):
            episode.success = number % 2 == 0
        return episodes

    monkeypatch.setattr(Player, "collect", told)
    small = ["environment.max_steps=2", "rollout.max_turn_tokens=4", "rollout.max_traj_tokens=20", "evaluation.tasks=2"]
    small += ["dpo.batch_size=2", "reward_model.batch_size=2", "reward_model.held_out=0", "rollout.temperature=2.0"]
    main(["--seeds", "5", "--out", str(tmp_path), "--tasks", "4", "--n", "2", "--panel", "4", *small])
    found = [
        json.loads((tmp_path / "seed5" / f"run_{part}.json").read_text())["row"] for part in ("dpo", "reward_model")
    ]
    assert found[0]["success"].keys() == {"start", "dpo"} and found[0]["dpo"]["steps"] >= 2
    assert {"start", "best_of_n", "shortest", "oracle", "mean"} <= found[1]["success"].keys()
    merge(tmp_path, "run", None)
    with pytest.raises(SystemExit, match=r"expected folders seed<n> with own_dpo.json in"):
        merge(tmp_path, "own", None, ["dpo"])
    own = ["--rounds", "2", "--parts", "dpo", "--name", "own"]
    main(["--seeds", "5", "--out", str(tmp_path), "--tasks", "4", "--panel", "4", *own, *small])
    merge(tmp_path, "own", str(tmp_path / "own.json"), ["dpo"], "Chosen beforehand.")
    whole = json.loads((tmp_path / "own.json").read_text())
    assert whole["note"] == "Chosen beforehand." and "--rounds 2" in whole["command"]
    (row,) = whole["rows"]
    assert "in 2 rounds" in section(whole)[0] and section(whole)[2].endswith("for these seeds).")
    assert row["success"].keys() == {"start", "round1", "round2", "dpo"} and len(row["rounds"]) == 2
    assert (
        row["success"]["dpo"] == row["success"]["round2"] and row["rounds"][1]["before"] == row["rounds"][0]["success"]
    )
