"""`manus-fast play` with a person's lines piped in: numbers, text, undo, and what it records."""

import io
import json
from collections import Counter

import pytest

from manus_fast import cli
from manus_fast.agent.protocol import Protocol
from manus_fast.commands.play import Completer
from manus_fast.data.load import load_conversations
from manus_fast.envs import make

SMALL = "environment.options={level: 1, receptacles: [5, 6], num_train: 20}"
ENVIRONMENT = make("household", level=1, receptacles=[5, 6], num_train=20)
TASK = ENVIRONMENT.tasks("train")[3]


def solution():
    """The planner's commands for the task, and for each its number in the list that was shown."""
    batch = ENVIRONMENT.make_batch(1)
    _, (info,) = batch.reset([0], [TASK], [0])
    commands = []
    while True:
        (action,), _ = batch.expert([0], "planner")
        commands.append((action, 1 + info["admissible"].index(action)))
        _, _, terminated, _, (info,) = batch.step([0], [action])
        if terminated[0]:
            return commands


COMMANDS = solution()


@pytest.fixture
def play(monkeypatch, capsys):
    def run(lines, *words):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = cli.main(["play", "household", "--task", "3", SMALL, *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_text_and_numbers_play_the_same_game(play):
    for lines in ([action for action, _ in COMMANDS], [number for _, number in COMMANDS]):
        code, shown, _ = play(lines)
        assert code == 0 and f"solved after {len(COMMANDS)} steps" in shown and "(sum 1)" in shown
        assert f"{COMMANDS[0][1]:3d}  {COMMANDS[0][0]}" in shown and TASK.id in shown


def test_undo_goes_back_and_is_not_recorded(play, tmp_path):
    first = COMMANDS[0][0]
    lines = ["undo", "look", "undo", first, "undo", *[action for action, _ in COMMANDS]]
    code, shown, _ = play(lines, "--record", tmp_path / "x.jsonl")
    assert code == 0 and "nothing to take back" in shown and shown.count("taken back") == 2
    assert f"solved after {len(COMMANDS)} steps" in shown
    row = json.loads((tmp_path / "x.jsonl").read_text())
    actions = [Protocol().parse(m["content"]).action for m in row["messages"] if m["role"] == "assistant"]
    assert actions == [action for action, _ in COMMANDS]


def test_a_record_is_what_data_and_sft_take(play, tmp_path, capsys):
    file = tmp_path / "human.jsonl"
    lines = ["sing", "louder and louder"]  # a command that is refused, with its thought
    for action, _ in COMMANDS:
        lines += [action, "because"]
    for number in (1, 2):
        code, shown, _ = play(lines, "--record", file, "--thoughts")
        assert code == 0 and f"demonstration {number} of" in shown
    dropped = Counter()
    items = list(load_conversations(str(file), dropped, Protocol()))
    assert len(items) == 2 and not dropped  # one task twice, and no duplicate id
    replies = [m for m in items[0].messages if m["role"] == "assistant"]
    assert [m["trainable"] for m in replies] == [False] + [True] * len(COMMANDS)
    assert replies[1]["content"] == f"Think: because\nAct: {COMMANDS[0][0]}"
    assert items[0].source == "human" and ENVIRONMENT.instructions.strip() in items[0].messages[0]["content"]
    assert cli.main(["data", "show", str(file)]) == 0
    assert "because" in capsys.readouterr().out


def test_a_game_that_is_not_solved_is_not_recorded(play, tmp_path):
    file = tmp_path / "x.jsonl"
    code, shown, _ = play(["look", "", "99", "rules", "quit"], "--record", file)
    assert code == 0 and "not recorded" in shown and not file.exists()
    assert "expected a number from 1 to" in shown and "You are in a household" in shown
    code, shown, _ = play(["look", "look"], "environment.max_steps=2")
    assert code == 0 and "cut by the step limit after 2 steps" in shown
    code, shown, _ = play([])
    assert code == 0 and "ended before" in shown


def test_mistakes(play, tmp_path):
    assert play([], "--task", "99")[0] == 2  # the later --task wins
    code, _, error = play([], "--record", tmp_path / "none" / "x.jsonl")
    assert code == 2 and "--record: expected a file in a folder that exists" in error
    for name in (tmp_path, "", tmp_path / ("x" * 300)):  # a folder, nothing, a name that no file system takes
        code, _, error = play([], "--record", name)
        assert code == 2 and "--record: expected a file" in error


def test_a_record_goes_on_after_a_line_without_an_end(play, tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    file.write_text('{"half": 1')
    assert "demonstration 2 of" in play([action for action, _ in COMMANDS], "--record", file)[1]
    dropped = Counter()
    assert len(list(load_conversations(str(file), dropped, Protocol()))) == 1 and dropped == {"truncated JSON": 1}


def test_a_shop_is_shown_line_by_line_with_its_rules_and_score(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MANUS_FAST_CACHE", str(tmp_path))
    lines = ["fly", "7", "search[blue]", "3", "click[buy now]"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    small = "environment.options={num_products: 72, num_goals: 1501, nouns: rule}"
    record = tmp_path / "x.jsonl"
    assert cli.main(["play", "webshop", small, "--record", str(record)]) == 0
    shown = capsys.readouterr().out
    assert "search[keywords]: search for products" in shown and "[SEP]" not in shown
    assert "\nInstruction:\nFind me " in shown and "'fly' is no command here" in shown
    assert "expected a command, got 7" in shown and "'search[blue]' is no" not in shown
    assert "over, not solved after 4 steps, score 0\n" in shown


def test_commands_are_completed():
    complete = Completer(["go to desk 1", "go to desk 2", "look"])
    assert [complete("go to", n) for n in range(3)] == ["go to desk 1", "go to desk 2", None]
    assert complete("look", 0) == "look" and complete("x", 0) is None
