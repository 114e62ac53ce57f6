"""Every adapter against every kind of malformed row, which is skipped and counted by its reason; our own rollouts."""

import json
from collections import Counter

import pytest

from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import SCHEMA
from manus_fast.cli import main
from manus_fast.data.load import load_conversations
from manus_fast.data.schema import MAX_CONTENT
from manus_fast.data.sources import read_row

REPLY = "Think: buy it\nAct: click[buy now]"
SHAPES = {
    # source: (key of the id, key of the turns, role words, names of role, content and loss, more of the row)
    "agent_instruct": ("id", "conversations", ("human", "gpt"), ("from", "value", "loss"), {}),
    "agent_traj": ("item_id", "conversations", ("human", "gpt"), ("from", "value", "loss"), {}),
    "agent_flan": ("id", "conversation", ("user", "assistant"), ("role", "content", "loss"), {}),
    "openmanus_rl": (
        "item_id",
        "conversations",
        ("human", "gpt"),
        ("from", "value", "loss"),
        {"data_source": "babyai"},
    ),
    "openmanus_rl chat": ("id", "conversations", ("user", "assistant"), ("role", "content", "loss"), {}),
}


def row(shape, identifier="webshop_1", reply=REPLY, change=lambda turns, keys: None):
    name, turns_key, (user, assistant), keys, more = SHAPES[shape]
    words = [(user, "You shop.", None), (assistant, "Ok.", False), (user, "WebShop", None), (assistant, reply, True)]
    turns = [dict(zip(keys, turn, strict=True)) for turn in words]
    change(turns, keys)
    return {name: identifier, turns_key: turns, **more}


CHANGES = {
    "wrong role order": lambda turns, keys: turns.pop(1),
    "missing flag": lambda turns, keys: turns[3].pop(keys[2]),
    "empty turn": lambda turns, keys: turns[2].update({keys[1]: " "}),
    "null content": lambda turns, keys: turns[2].update({keys[1]: None}),
    "content is not text": lambda turns, keys: turns[2].update({keys[1]: ["WebShop"]}),
    "two assistants in a row": lambda turns, keys: turns.pop(2),
    "message too long": lambda turns, keys: turns[2].update({keys[1]: "x" * MAX_CONTENT}),
    "unknown role": lambda turns, keys: turns[2].update({keys[0]: "bard"}),
    "nothing trainable": lambda turns, keys: turns[3].update({keys[2]: False}),
    "another schema": lambda turns, keys: turns.__setitem__(2, "text"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_adapter_counts_every_malformed_row(tmp_path, shape):
    good, expected = row(shape, "good_1"), Counter()
    lines = []
    for number, (reason, change) in enumerate(CHANGES.items()):
        lines.append(json.dumps(row(shape, f"bad_{number}", change=change)).encode())
        expected[reason] += 1
    lines += [json.dumps(row(shape, "no_1", reply="I am done.")).encode(), json.dumps(good).encode()[:-9]]
    lines += [json.dumps(good).encode().replace(b"shop.", b"\xff\xfe"), *[json.dumps(good).encode()] * 2]
    expected.update({"no action": 1, "truncated JSON": 1, "invalid UTF-8": 1, "duplicate id": 1})
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    dropped = Counter()
    (item,) = load_conversations(str(tmp_path / "a.jsonl"), dropped, Protocol())
    assert item.id == "good_1" and item.source == shape.split()[0] and dropped == expected


TURN = {"observation": "WebShop", "text": REPLY, "finish_reason": "stop", "format_ok": True, "admissible": True}


def test_the_longest_message_is_read_and_the_row_after_a_bad_one(tmp_path):
    longest = row("agent_instruct", "os_1", change=lambda turns, keys: turns[2].update(value="x" * (MAX_CONTENT - 1)))
    longer = row("agent_instruct", "os_2", change=CHANGES["message too long"])
    rows = [longest, longer, row("agent_instruct", "os_3")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    dropped = Counter()
    items = list(load_conversations(str(tmp_path / "a.jsonl"), dropped, Protocol()))
    assert [item.id for item in items] == ["os_1", "os_3"] and dropped == {"message too long": 1}


def episode(**changes):
    bad = {**TURN, "text": "hm", "format_ok": False}
    return {"schema": SCHEMA, "id": "a-1", "env": "webshop", "task": "webshop/3", "valid": True, "success": True,
            "turns": [TURN, bad, TURN]} | changes  # fmt: skip


def test_solved_rollouts_are_conversations():
    item = read_row(episode())
    assert (item.id, item.source, item.domain, item.task) == ("a-1", "rollouts", "e-commerce", "webshop/3")
    assert [m["trainable"] for m in item.messages] == [False, True, False, False, False, True]
    assert read_row(episode(id="a-2")).task == item.task  # both on one side of a split


@pytest.mark.parametrize(
    "change, reason",
    [({"valid": False}, "failed episode"), ({"success": False}, "unsolved episode"),
     ({"turns": [{}]}, "another schema"), ({"task": None}, "another schema"),
     ({"turns": []}, "nothing trainable"), ({"id": None}, "missing id"), ({"turns": None}, "another schema"),
     ({"turns": [TURN | {"observation": None}]}, "null content"),
     ({"turns": [TURN | {"text": 3}]}, "content is not text"),
     ({"turns": [TURN | {"observation": "\n"}]}, "empty turn"), ({"turns": [TURN | {"text": ""}]}, "empty turn"),
     ({"turns": [TURN | {"observation": "x" * MAX_CONTENT}]}, "message too long"),
     ({"turns": [TURN | {"observation": "\ud83d"}]}, "invalid UTF-8"),
     ({"turns": [TURN | {"text": "Think: buy it"}]}, "no action"), ({"turns": ["text"]}, "another schema"),
     ({"turns": [TURN | {"admissible": None}]}, "nothing trainable")],
)  # fmt: skip
def test_other_rollouts_are_counted(tmp_path, change, reason):
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(episode(**change)) + "\n")
    dropped = Counter()
    assert not list(load_conversations(str(tmp_path / "trajectories.jsonl"), dropped, Protocol()))
    assert dropped == {reason: 1}


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_datasets_by_split(monkeypatch, capsys, streaming):
    """As AgentInstruct is published: splits by domain, and none that is called train."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, streaming):
        asked.append((name, streaming))
        if name != "owner/set":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        splits = {k: datasets.Dataset.from_list([row("agent_instruct", f"{k}_1")]) for k in ("os", "db")}
        if streaming:
            return datasets.IterableDatasetDict({k: v.to_iterable_dataset() for k, v in splits.items()})
        return datasets.DatasetDict(splits)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def ids(name, **more):
        dropped = Counter()
        found = [item.id for item in load_conversations(name, dropped, Protocol(), streaming=streaming, **more)]
        assert not dropped
        return found

    assert ids("owner/set") == ["os_1", "db_1"] and asked[-1] == ("owner/set", streaming)
    assert ids("owner/set:db") == ids("owner/set", split="db") == ["db_1"]
    with pytest.raises(ValueError, match="expected one of the splits os, db of 'owner/set', got 'kg'"):
        ids("owner/set:kg")
    with pytest.raises(ValueError, match=r"got 'owner/none' .*doesn't exist on the Hub"):
        ids("owner/none")
    assert main(["data", "stats", "owner/set:os", *(["--streaming"] if streaming else [])]) == 0
    assert json.loads(capsys.readouterr().out)["domains"] == {"OS": 1} and asked[-1][1] is streaming
