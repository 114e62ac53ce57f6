"""Teachers end to end on loopback: they play, a killed run goes on, episodes are distilled, and SFT takes them."""

import json
import math

import pytest

pytest.importorskip("openai")

from loopback import Expert, Fault, completion, endpoint, error

from manus_fast import cli
from manus_fast.agent.messages import MessageContext
from manus_fast.agent.protocol import NO_ACTION, Protocol
from manus_fast.agent.trajectory import Trajectory, Turn, build_rows
from manus_fast.data.distill import distill
from manus_fast.data.load import load_conversations
from manus_fast.evaluate import Report
from manus_fast.player import make_environment
from manus_fast.rollout.engines.openai import BudgetReached
from manus_fast.run_config import Config
from manus_fast.teacher import TeacherPlayer

SMALL = ["environment.options={level: 1, receptacles: [5, 6], num_valid: 4, num_train: 60}", "environment.max_steps=20"]
QUICK = ["endpoint.backoff=0.01", "endpoint.retries=1", "endpoint.timeout=5"]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("MANUS_FAST_OPENAI_API_KEY", "loopback")


def settings(url, *more):
    words = ["model.path=expert", f"endpoint.base_url={url}", "rollout.engine=openai", *SMALL, *QUICK, *more]
    return Config.load(None, words)


ENVIRONMENT = make_environment(settings("http://x"))
TASKS = ENVIRONMENT.tasks("valid_unseen")


def expert(protocol=None):
    return Expert(ENVIRONMENT, [*TASKS, *ENVIRONMENT.tasks("train")], protocol or Protocol(), "planner")


def test_messages_of_a_conversation():
    talk = MessageContext().start("sys", "first")
    head = [{"role": "system", "content": "sys"}, {"role": "user", "content": "first"}]
    assert talk.messages == talk.fresh == head and len(talk.prompt()) == 0
    other = talk.clone()
    talk.add("r0", "u1")
    talk.add("r1", "u2")
    assert [m["content"] for m in talk.messages] == ["sys", "first", "r0", "u1", "r1", "u2"]
    assert talk.fresh == [{"role": "user", "content": "u2"}] and other.messages == head
    short = MessageContext("window", 1).start("", "first")
    short.add("r0", "u1")
    short.add("r1", "u2")
    assert [m["content"] for m in short.messages] == ["first", "r1", "u2"]
    for bad in (("summary", 8), ("window", 0)):
        with pytest.raises(ValueError, match=r"agent\.(context|window): expected"):
            MessageContext(*bad)


def test_a_teacher_plays_through_the_same_turn_loop(tmp_path):
    with endpoint(expert()) as server:
        player = TeacherPlayer(settings(server.url), tmp_path, ENVIRONMENT)
        episodes = player.play(TASKS)
        player.close()
    assert [t.task for t in episodes] == [task.id for task in TASKS]
    assert all(t.valid and t.success and t.terminated for t in episodes)
    turn = episodes[0].turns[1]
    assert turn.format_ok and turn.admissible and turn.finish_reason == "stop" and turn.tokens == 5
    assert turn.messages == [{"role": "user", "content": turn.observation}]
    assert episodes[0].turns[0].messages[0] == {"role": "system", "content": player.system_prompt}
    assert episodes[0].sampled_tokens == 5 * len(episodes[0].turns)
    assert build_rows(episodes) == []  # nothing that policy gradient could take for its own tokens
    # what the endpoint saw is the whole conversation, turn after turn
    last = max(server.bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [m["role"] for m in last] == ["system"] + ["user", "assistant"] * (len(last) // 2 - 1) + ["user"]
    assert Trajectory.from_json(episodes[0].to_json()).turns[1].messages == turn.messages


FAULTS = {
    "429": (error(429, "slow down", retry_after="0.02"), "rate_limited", "429"),
    "500": (error(500), "server_error", "500"),
    "garbage": (Fault(200, b"<html>gateway</html>"), "garbage", "not JSON"),
    "closed stream": (Fault(200, completion("x"), cut=9), "connection", "broke off"),
    "hang": (Fault(200, completion("x"), hang=0.8), "timeout", "within 0.4 s"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_masked_and_counted_never_rewarded_with_zero(tmp_path, name):
    fault, kind, words = FAULTS[name]
    play, broken = expert(), ENVIRONMENT.make_batch(1).reset([0], [TASKS[2]], [0])[0][0]

    def answer(body, number):
        if body["messages"][1]["content"] == broken and len(body["messages"]) > 2:  # from its second turn on
            return fault
        return error(500) if number == 3 else play(body, number)

    with endpoint(answer) as server:
        more = ["endpoint.timeout=0.4"] if name == "hang" else []
        player = TeacherPlayer(settings(server.url, *more), tmp_path, ENVIRONMENT)
        episodes = player.play(TASKS)
        assert [t.valid for t in episodes] == [True, True, False, True]
        assert all(t.success for t in episodes if t.valid) and not episodes[2].success
        assert math.isnan(episodes[2].reward) and words in episodes[2].error
        stats, counts = player.stats, player.engine.counts
        assert (stats.failed, stats.retried, stats.invalid) == (2, 1, 1)
        assert counts[kind] == 4 + (name == "500")  # 2 attempts of 2 tries
        if name != "hang":
            before = len(server.bodies)
            again = player.play(TASKS)  # a failed episode is not kept as finished
            assert len(server.bodies) == before + 4 and not again[2].valid and player.resumed == 3
        player.close()


def test_a_conversation_that_outgrows_the_endpoint_is_cut_and_counts(tmp_path):
    play, long = expert(), ENVIRONMENT.make_batch(1).reset([0], [TASKS[2]], [0])[0][0]
    full = error(400, "This model's maximum context length is 64 tokens.", code="context_length_exceeded")

    def answer(body, number):
        said = body["messages"]
        return full if said[1]["content"] == long and len(said) > 4 else play(body, number)

    with endpoint(answer) as server:
        player = TeacherPlayer(settings(server.url), tmp_path, ENVIRONMENT)
        episodes = player.play(TASKS)
        player.close()
    assert all(t.valid for t in episodes) and [t.success for t in episodes] == [True, True, False, True]
    assert episodes[2].truncated and len(episodes[2].turns) == 2
    assert player.stats.failed == 0 and player.engine.counts["too_long"] == 1
    with endpoint(lambda body, n: full) as server:
        player = TeacherPlayer(settings(server.url), tmp_path / "at once", ENVIRONMENT)
        episodes = player.play(TASKS)
        player.close()
    assert not any(t.valid for t in episodes) and "maximum context length" in episodes[0].error
    assert len(server.bodies) == 4


def test_a_killed_run_goes_on_without_paying_again(tmp_path):
    play = expert()
    whole = tmp_path / "whole"
    with endpoint(play) as server:
        player = TeacherPlayer(settings(server.url), whole, ENVIRONMENT)
        expected = [t.to_json() for t in player.play(TASKS)]
        player.close()
        total = len(server.bodies)
    folder = tmp_path / "killed"

    class Killed(BaseException):
        pass

    def kill(episode):
        if len(player._finished) == 2:
            raise Killed

    with endpoint(play) as server:
        player = TeacherPlayer(settings(server.url), folder, ENVIRONMENT)
        with pytest.raises(Killed):
            player.play(TASKS, on_done=kill)
        player.close()
        paid = len((folder / "replies.jsonl").read_text().splitlines())
        with (folder / "episodes.jsonl").open("a") as file:
            file.write('{"schema": "manus_fa')  # killed while it wrote
        first = len(server.bodies)
        assert first < total
        player = TeacherPlayer(settings(server.url), folder, ENVIRONMENT)
        resumed = player.play(TASKS)
        player.close()
        lost = sum("lost" in json.loads(line) for line in (folder / "replies.jsonl").read_text().splitlines())
        assert player.resumed == 2 and player.engine.counts["replies"] == total - (paid - lost)
    assert [t.to_json() for t in resumed] == expected
    with pytest.raises(ValueError, match="the same temperature, got"):
        TeacherPlayer(settings("http://x/v1"), folder, ENVIRONMENT).play(TASKS, temperature=0.5)


def test_the_cost_limit_keeps_what_is_finished(tmp_path):
    prices = ["endpoint.price_input=0", "endpoint.price_output=1000000", "endpoint.max_tokens=10"]  # 5 dollars a reply
    with endpoint(expert()) as server:
        player = TeacherPlayer(
            settings(server.url, *prices, "endpoint.max_cost=100", "endpoint.concurrency=1"), tmp_path, ENVIRONMENT
        )
        with pytest.raises(BudgetReached):
            player.play(TASKS)
        done = player.finished(TASKS)
        player.close()
        assert 0 < len(done) < 4 and all(t.success for t in done)
        assert 95 <= player.engine.budget.spent == 5 * len(server.bodies) <= 100
        player = TeacherPlayer(settings(server.url, *prices, "endpoint.max_cost=9999"), tmp_path, ENVIRONMENT)
        assert len(player.play(TASKS)) == 4 and player.engine.counts["recalled"] > 0
        player.close()


def test_tags_and_reasoning_do_not_go_together(tmp_path):
    with pytest.raises(ValueError, match=r"agent\.style: expected react or act"):
        TeacherPlayer(settings("http://x/v1", "endpoint.reasoning=true", "agent.style=tags"), tmp_path, ENVIRONMENT)


def test_training_refuses_the_engine():
    from manus_fast.rollout.engines import make_engine

    with pytest.raises(ValueError, match="only eval and data distill can use"):
        make_engine(settings("http://x/v1").rollout, None, ())


def turn(observation, text, protocol, admissible=True):
    parsed = protocol.parse(text)
    return Turn(
        (), (), (), "stop", observation, text=text, thought=parsed.thought, action=parsed.action,
        format_ok=parsed.format_ok, admissible=admissible, messages=[{"role": "user", "content": observation}],
    )  # fmt: skip


def episode(number, turns, **outcome):
    return Trajectory(f"e{number}", "household", "t", "x", "train", 0, number, 0, turns, **outcome)


def test_what_is_distilled_and_what_is_dropped():
    protocol = Protocol()
    good = [
        turn("A room.", "Think: the mug\nmay be here\nAct: go to desk 1", protocol),
        turn("A desk.", "I cannot.", protocol, admissible=False),
        turn("Nothing happens.", "Think: try\nAct: fly", protocol, admissible=False),
        turn("Nothing happens.", "", protocol, admissible=False),
        turn("A desk.", "Think: take it\nAct: take mug 1 from desk 1", protocol),
    ]
    episodes = [
        episode(0, good, success=True, terminated=True),
        episode(1, good[:1], truncated=True),
        episode(2, good[:1], terminated=True),
        episode(3, good[:1], error="engine: status 500: upstream (7)"),
        episode(4, good[1:2], success=True, terminated=True),
    ]
    result = distill(episodes, protocol, "sys", "gpt-4o")
    assert dict(result.dropped) == {
        "cut before the task was solved": 1, "task not solved": 1, "failed: engine: status 500": 1,
        "nothing trainable": 1,
    }  # fmt: skip
    (row,) = result.rows
    assert (row.id, row.source, row.domain) == ("e0", "gpt-4o", "household")
    replies = [(m["content"], m["trainable"]) for m in row.messages if m["role"] == "assistant"]
    assert replies == [
        ("Think: the mug may be here\nAct: go to desk 1", True),
        ("I cannot.", False),
        ("Think: try\nAct: fly", False),
        (NO_ACTION, False),
        ("Think: take it\nAct: take mug 1 from desk 1", True),
    ]
    assert row.messages[0] == {"role": "system", "content": "sys", "trainable": False}
    assert dict(result.untrained) == {"no action": 3, "action not admissible": 1}  # one of them in a dropped episode


def test_distilled_rows_read_back_as_they_are(tmp_path):
    rows = distill([episode(0, [turn("A.", "Think: a\nAct: b", Protocol())], success=True)], Protocol(), "s", "t").rows
    (tmp_path / "x.jsonl").write_text(json.dumps(rows[0].to_json()) + "\n")
    from collections import Counter

    dropped = Counter()
    (item,) = load_conversations(str(tmp_path / "x.jsonl"), dropped, Protocol())
    assert item == rows[0] and not dropped


def test_eval_at_the_command_line(tmp_path, capsys):
    words = ["household", "--engine", "openai", "--model_path", "expert", "--output_dir", str(tmp_path), *SMALL, *QUICK]
    with endpoint(expert()) as server:
        assert cli.main(["eval", *words, f"endpoint.base_url={server.url}"]) == 0
        asked = len(server.bodies)
        assert cli.main(["eval", *words, f"endpoint.base_url={server.url}"]) == 0
        assert len(server.bodies) == asked  # all of it was there
    report = Report.load(tmp_path / "eval.json")
    assert report.model == "expert" and report.summary.success.k == report.summary.tasks == 4
    assert report.summary.tokens == 5 * asked
    assert "4 episodes were there already" in capsys.readouterr().out
    assert cli.main(["eval", *words, "--baseline", "x"]) == 2
    assert "use compare" in capsys.readouterr().err
    with endpoint(lambda body, n: error(401, "no such key")) as server:
        folder = str(tmp_path / "refused")
        words[words.index(str(tmp_path))] = folder
        assert cli.main(["eval", *words, f"endpoint.base_url={server.url}"]) == 2
    assert "expert answers with status 401" in capsys.readouterr().err


def test_distill_then_sft(tmp_path, capsys):
    """The whole road: a teacher plays, its episodes become a file, and `sft` trains a policy on it."""
    from manus_fast.modeling.tiny import make_policy

    play = expert()

    def answer(body, number):  # one episode in three gives up
        first = body["messages"][1]["content"]
        return "Think: no\nAct: look" if sum(first.encode()) % 3 == 0 else play(body, number)

    out = tmp_path / "distilled"
    words = ["household", "--model_path", "expert", "--output_dir", str(out), *SMALL, *QUICK]
    with endpoint(answer) as server:
        assert cli.main(["data", "distill", *words, "--limit", "4", f"endpoint.base_url={server.url}"]) == 0
        asked = len(server.bodies)
        assert cli.main(["data", "distill", *words, "--limit", "8", f"endpoint.base_url={server.url}"]) == 0
    report = json.loads((out / "report.json").read_text())
    rows = (out / "train.jsonl").read_text().splitlines()
    assert report["tasks"] == report["played"] == 8 and report["kept"] == len(rows) > 0
    assert report["kept"] + report["dropped"]["cut before the task was solved"] == 8
    assert len(server.bodies) > asked and report["stopped"] is None
    shown = capsys.readouterr().out
    assert "4 episodes were there already" in shown and "dropped" in shown
    assert cli.main(["data", "show", str(out / "train.jsonl")]) == 0
    assert "expert" in capsys.readouterr().out
    texts = [message["content"] for line in rows for message in json.loads(line)["messages"]]
    make_policy(tmp_path / "tiny", texts, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32)
    assert cli.main([
        "sft", "--model_path", str(tmp_path / "tiny"), "--dataset_name", str(out / "train.jsonl"),
        "--output_dir", str(tmp_path / "sft"), "--num_train_epochs", "1", "--batch_size", "4", *SMALL,
        "evaluation.tasks=2", "environment.max_steps=2",
    ]) == 0  # fmt: skip
    records = (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("sft/loss") for line in records]
    assert any(loss is not None and loss > 0 for loss in losses)
    assert (tmp_path / "sft" / "model" / "config.json").is_file()
