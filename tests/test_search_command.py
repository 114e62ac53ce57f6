"""`manus-fast search` from the command line to its files, with a policy that knows nothing."""

import json

import pytest

from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import Trajectory
from manus_fast.cli import main
from manus_fast.evaluate import Report
from manus_fast.modeling.tiny import make_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    texts = [Protocol().system_prompt("Household."), "go to cabinet 1 You arrive at desk. Nothing happens."]
    shape = {"hidden": 32, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 32}
    return make_policy(tmp_path_factory.mktemp("policy") / "model", texts, seed=0, max_length=1024, **shape)


def test_a_search_writes_episodes_a_report_a_drawing_and_pairs(policy, tmp_path, capsys):
    out, svg, pairs = tmp_path / "run", tmp_path / "tree.svg", tmp_path / "pairs.jsonl"
    words = ["search", "--model_path", str(policy), "--strategy", "dfsdt", "--budget_tokens", "60", "--tasks", "2"]
    words += ["--output_dir", str(out), "--draw", str(svg), "--preferences", str(pairs), "rollout.max_turn_tokens=8"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "dfsdt: " in said and "0 pairs" in said
    episodes = [Trajectory.from_json(json.loads(line)) for line in (out / "trajectories.jsonl").open()]
    report = Report.load(out / "eval.json")
    assert len(episodes) == report.summary.tasks == 2
    assert [e.task for e in episodes] == [record.id for record in report.tasks]
    assert all(e.turns and e.turns[0].node_id is not None for e in episodes)
    assert report.settings["search"]["strategy"] == "dfsdt"
    assert 0 < report.settings["search/tokens"] <= 120
    assert svg.read_text().startswith("<svg ") and pairs.read_text() == ""


def test_a_value_model_is_fitted_by_one_search_and_leads_the_next(policy, tmp_path, capsys):
    folder = tmp_path / "value"
    words = ["search", "--model_path", str(policy), "--output_dir", str(tmp_path), "--tasks", "1"]
    words.append("rollout.max_turn_tokens=6")
    assert main([*words, "--strategy", "best_of_n", "--budget_tokens", "60", "--fit_values", str(folder)]) == 0
    assert main([*words, "--strategy", "mcts", "--budget_tokens", "60", "--value_model", str(folder)]) == 0
    report = Report.load(tmp_path / "eval.json")
    assert report.settings["search"]["value"] == "model" and report.settings["search/scored"] > 0
    assert main([*words, "--value_model", str(tmp_path)]) == 2
    assert "value model: expected a folder with value.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "astar"], "--strategy: expected one of greedy, best_of_n"),
        (["search.value=model"], "search.value: expected reward, rollout or verbal"),
        (["--draw", "nowhere/tree.svg"], "--draw: expected a file in a folder that exists, got 'nowhere/tree.svg'"),
        (["--preferences", "."], "--preferences: expected a file in a folder that exists, got '.'"),
        (["search.proposals=0"], "search.proposals: expected an integer >= 1, got 0"),
    ],
)
def test_mistakes_are_told_in_a_sentence(policy, tmp_path, capsys, words, message):
    assert main(["search", "--model_path", str(policy), "--output_dir", str(tmp_path), "--tasks", "1", *words]) == 2
    assert message in capsys.readouterr().err
