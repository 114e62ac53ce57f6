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
        typed = lines if hasattr(lines, "readline") else io.StringIO("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr("sys.stdin", typed)
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
    code, shown, _ = play(["", "99", "9" * 5000, "٣" * 3, "rules", "quit"], "--record", file)
    assert code == 0 and "ended before" in shown and list(tmp_path.iterdir()) == []
    assert "expected a number from 1 to" in shown and "You are in a household" in shown
    assert f", got {'9' * 59}…\n" in shown and "9" * 61 not in shown
    code, shown, _ = play(["look", "look"], "environment.max_steps=2", "--record", file)
    assert code == 0 and "cut by the step limit after 2 steps" in shown
    assert "not recorded" in shown and list(tmp_path.iterdir()) == []
    code, shown, _ = play([])
    assert code == 0 and "ended before" in shown


def test_mistakes(play, tmp_path):
    assert play([], "--task", "99")[0] == 2  # the later --task wins
    code, _, error = play([], "--record", tmp_path / "none" / "x.jsonl")
    assert code == 2 and "--record: expected a file in a folder that exists" in error
    for name in ("human.json", tmp_path / "notes"):
        code, _, error = play([], "--record", name)
        assert code == 2 and "--record: expected a file named .jsonl" in error
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "target.jsonl")
    assert play([], "--record", tmp_path / "link.jsonl")[0] == 0
    assert (tmp_path / "link.jsonl").is_symlink() and not (tmp_path / "target.jsonl").exists()
    (tmp_path / "round.jsonl").symlink_to(tmp_path / "round.jsonl")
    for seed in ("-1", 2**64, "x"):
        assert play([], "--seed", seed)[0] == 2
    for name in (
        tmp_path,
        "",
        "..",
        "/dev/null",
        tmp_path / "round.jsonl",
        tmp_path / ("x" * 300 + ".jsonl"),
    ):  # a folder, nothing, a name that no file system takes
        code, _, error = play([], "--record", name)
        assert code == 2 and "--record: expected a file" in error


class Hand(io.StringIO):
    """Types lines, then presses Ctrl-C."""

    def readline(self, *_):
        line = super().readline()
        if not line:
            raise KeyboardInterrupt
        return line


@pytest.mark.parametrize("leave", ["Ctrl-C", "Ctrl-D", "quit"])
def test_a_game_that_is_left_is_gone_on_with(play, tmp_path, leave):
    file, actions = tmp_path / "x.jsonl", [action for action, _ in COMMANDS]
    file.write_text('{"earlier": 1}\n')
    lines = ["look", "why not", "undo", actions[0], "to begin", *(["quit"] if leave == "quit" else [])]
    typed = Hand("".join(f"{line}\n" for line in lines)) if leave == "Ctrl-C" else lines
    code, shown, _ = play(typed, "--record", file, "--thoughts")
    assert code == (130 if leave == "Ctrl-C" else 0) and f"kept 1 commands in {file}.unfinished: the same" in shown
    assert file.read_text() == '{"earlier": 1}\n'
    assert play(["look"], "--record", file, "--seed", "1")[0] == 0  # another game is kept beside it
    code, shown, _ = play(actions[1:], "--record", file)
    assert code == 0 and "going on after 1 commands" in shown and "recorded as demonstration 2 of" in shown
    messages = json.loads(file.read_text().splitlines()[1])["messages"]
    replies = [Protocol().parse(message["content"]) for message in messages if message["role"] == "assistant"]
    assert [reply.action for reply in replies] == actions and replies[0].thought == "to begin"
    (left,) = map(json.loads, (tmp_path / "x.jsonl.unfinished").read_text().splitlines())
    assert (left["seed"], left["played"]) == (1, [["look", ""]])
    assert play([], "--record", file)[0] == 0  # begins anew
    assert sorted(f.name for f in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.unfinished"]


def test_a_game_that_was_left_in_another_world_is_not_gone_on_with(play, tmp_path):
    file = tmp_path / "x.jsonl"
    play([COMMANDS[0][0]], "--record", file)
    kept = (tmp_path / "x.jsonl.unfinished").read_text()
    entry = json.loads(kept)
    for text in (json.dumps({**entry, "observation": "A field."}), "[", "3", json.dumps({**entry, "played": [["a"]]}),
                 json.dumps({**entry, "played": [["fly", ""]] * 60})):  # fmt: skip
        (tmp_path / "x.jsonl.unfinished").write_text(text)
        code, shown, error = play(["quit"], "--record", file)
        assert code == 2 and shown == "" and "--record: expected" in error and "x.jsonl.unfinished" in error
    (tmp_path / "x.jsonl.unfinished").write_text(kept)
    assert "going on after 1" in play([], "--record", file)[1]


def test_bytes_that_are_no_text_are_no_command(play, tmp_path):
    typed = b"\xff\xfe look\nbecause \xc3\n" + "".join(f"{action}\n\n" for action, _ in COMMANDS).encode()
    hand = io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8")
    code, shown, _ = play(hand, "--record", tmp_path / "x.jsonl", "--thoughts")
    assert code == 0 and "\ufffd\ufffd look' is no command here" in shown and "demonstration 1 of" in shown


def test_a_thought_that_quotes_an_action_is_context(play, tmp_path):
    lines = [COMMANDS[0][0], "Act: look", *(word for action, _ in COMMANDS[1:] for word in (action, ""))]
    assert play(lines, "--record", tmp_path / "x.jsonl", "--thoughts")[0] == 0
    dropped = Counter()
    (item,) = load_conversations(str(tmp_path / "x.jsonl"), dropped, Protocol())
    flags = [message["trainable"] for message in item.messages if message["role"] == "assistant"]
    assert flags == [Protocol().target("Act: look", COMMANDS[0][0]) is not None] + [True] * (len(COMMANDS) - 1)


def test_a_record_goes_on_after_a_line_without_an_end(play, tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    file.write_text('{"half": 1')
    assert "demonstration 2 of" in play([action for action, _ in COMMANDS], "--record", file)[1]
    dropped = Counter()
    assert len(list(load_conversations(str(file), dropped, Protocol()))) == 1 and dropped == {"truncated JSON": 1}


def test_a_shop_is_shown_line_by_line_with_its_rules_and_score(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MANUS_FAST_CACHE", str(tmp_path))
    odd = ["search[]", "click[]", "search", "click[火🙂]", "search[[blue]]", "search[" + "blue lamp " * 20_000 + "]"]
    lines = ["fly", "7", *odd, "search[blue]", "3", "click[buy now]"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    small = "environment.options={num_products: 72, num_goals: 1501, nouns: rule}"
    record = tmp_path / "x.jsonl"
    assert cli.main(["play", "webshop", small, "--record", str(record)]) == 0
    shown = capsys.readouterr().out
    assert "search[keywords]: search for products" in shown and "[SEP]" not in shown
    assert "\nInstruction:\nFind me " in shown and "'fly' is no command here" in shown
    assert "expected a command, got 7" in shown and "'search[blue]' is no" not in shown
    assert "over, not solved after 10 steps, score 0\n" in shown
    assert "'search[[blue]]' is no" not in shown and "'search[]' is no command here" in shown


def test_commands_are_completed():
    complete = Completer(["go to desk 1", "go to desk 2", "look"])
    assert [complete("go to", n) for n in range(3)] == ["go to desk 1", "go to desk 2", None]
    assert complete("look", 0) == "look" and complete("x", 0) is None
