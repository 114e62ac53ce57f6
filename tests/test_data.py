"""Datasets as conversations: each published shape, each kind of malformed row, mixing, and what is trained on."""

import json
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_fast.agent.context import ChatFormat
from manus_fast.agent.protocol import Protocol
from manus_fast.cli import main
from manus_fast.data.build import BuildConfig, build
from manus_fast.data.load import load_conversations
from manus_fast.data.normalise import read_reply
from manus_fast.data.react import message_rows
from manus_fast.data.schema import MAX_CONTENT, MalformedRow
from manus_fast.data.sources import read_row
from manus_fast.modeling.tiny import make_tokenizer

REPLY = "Think: buy it\nAct: click[buy now]"


def traj(identifier="webshop_1", reply=REPLY, **changes):
    turns = [("human", "You shop.", None), ("gpt", "Ok.", False), ("human", "WebShop [SEP] Search", None),
             ("gpt", reply, True)]  # fmt: skip
    row = {"item_id": identifier, "conversations": [{"from": f, "value": v, "loss": loss} for f, v, loss in turns]}
    return row | changes


def chat(*turns, **more):
    return {"id": "os_1", "conversation": [{"role": r, "content": c, "loss": f} for r, c, f in turns], **more}


def write(path, rows):
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))
    return str(path)


def test_each_published_shape():
    item = read_row(traj())
    assert (item.source, item.domain, item.id) == ("agent_traj", "e-commerce", "webshop_1")
    assert [m["role"] for m in item.messages] == ["user", "assistant", "user", "assistant"]
    assert [m["trainable"] for m in item.messages] == [False, False, False, True]
    instruct = read_row({"id": "db_3", "conversations": traj()["conversations"]})
    assert (instruct.source, instruct.domain) == ("agent_instruct", "DB")
    flan = read_row(chat(("system", "s", False), ("user", "u", False), ("assistant", REPLY, True)))
    assert (flan.source, flan.domain, flan.messages[2]["trainable"]) == ("agent_flan", "OS", True)
    merged = read_row(traj(data_source="babyai", reward_model=None))
    assert (merged.source, merged.domain) == ("openmanus_rl", "household")
    plain = [{"role": "user", "content": "u"}, {"role": "assistant", "content": REPLY}]
    assert read_row({"id": "x", "conversations": plain}).messages[1]["trainable"]


@pytest.mark.parametrize(
    "text, thought, action",
    [
        (REPLY, "buy it", "click[buy now]"),
        ("Thought:\nI need\nit.\n\nAction:\nclick[a]", "I need it.", "click[a]"),
        ('Thought: t\nAction: get\nAction Input: {\n "q": 1}', "t", 'get {"q": 1}'),
        ("Think: t\n\nAct: bash\n\n```bash\nls -l\n```", "t", "bash[ls -l]"),
        ("I look.\n```sql\nSELECT 1\nFROM t;\n```", "I look.", "sql[SELECT 1 FROM t;]"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", 'f {"a": 1}'),
        ('{"thought": "t", "action": "look"}', "t", "look"),
    ],
)
def test_every_form_of_action(text, thought, action):
    assert read_reply(text) == (thought, action)


MARK = re.compile(r"(?:^|\n)\s*(?:Act|Action|ACTION)\s*:[ \t]*")
PIECES = [
    "Act:",
    "Action:",
    "ACTION :",
    "Act",
    "Think:",
    "Thought: ",
    " ",
    "\n",
    "\t",
    "a",
    "click[x]",
    "\u2028",
    "Actor: ",
]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_marks_are_where_a_pattern_over_lines_finds_them(text):
    marks = list(MARK.finditer(text))
    after = text[marks[-1].end() :].strip() if marks else ""
    if len(after.splitlines()) == 1:
        thought = re.sub(r"^\s*(?:Think|Thought)\s*:\s*", "", text[: marks[0].start()])
        assert read_reply(text) == (" ".join(thought.split()), after)
    else:
        with pytest.raises(MalformedRow, match="lines" if after else "no action"):
            read_reply(text)


def test_half_a_character_is_no_text():
    with pytest.raises(MalformedRow, match="invalid UTF-8"):
        read_row(json.loads(json.dumps(traj(reply="Think: é \\ud83d\nAct: look")).replace("\\\\u", "\\u")))
    assert read_row(traj(reply="Think: é 买 🙂\nAct: look")).messages[3]["content"].startswith("Think: é 买 🙂")


def bad_turns(change):
    row = traj()
    change(row["conversations"])
    return row


MALFORMED = {
    "wrong role order": bad_turns(lambda t: t.pop(1)),
    "missing flag": bad_turns(lambda t: t[3].pop("loss")),
    "empty turn": bad_turns(lambda t: t[2].update(value=" \n")),
    "null content": bad_turns(lambda t: t[2].update(value=None)),
    "two assistants in a row": bad_turns(lambda t: t.pop(2)),
    "no action": traj(reply="I am done."),
    "truncated JSON": b'{"item_id": "a", "conversa\n',
    "message too long": bad_turns(lambda t: t[2].update(value="x" * MAX_CONTENT)),
    "invalid UTF-8": b'{"item_id": "\xff\xfe"}\n',
    "another schema": {"prompt": "a", "answer": "b"},
    "nothing trainable": bad_turns(lambda t: t[3].update(loss=False)),
    "unknown role": bad_turns(lambda t: t[0].update({"from": "bard"})),
    "action of several lines": traj(reply="Act: bash\n```bash\nls\npwd\n```"),
    "missing id": traj(identifier=None),
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_a_malformed_row_is_skipped_and_counted(tmp_path, reason):
    path = write(tmp_path / "a.jsonl", [MALFORMED[reason], traj("good_1")])
    dropped = Counter()
    assert [item.id for item in load_conversations(path, dropped, Protocol())] == ["good_1"]
    assert dropped == {reason: 1}


def test_duplicate_ids_and_another_parquet_schema(tmp_path):
    dropped = Counter()
    assert len(list(load_conversations(write(tmp_path / "a.jsonl", [traj(), traj()]), dropped))) == 1
    assert dropped == {"duplicate id": 1}
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    dropped.clear()
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}, {"text": "b"}]), tmp_path / "b.parquet")
    assert list(load_conversations(str(tmp_path / "b.parquet"), dropped)) == []
    assert dropped == {"another schema": 2}
    parquet.write_table(pyarrow.Table.from_pylist([traj(data_source="maze")]), tmp_path / "c.parquet")
    assert next(iter(load_conversations(str(tmp_path / "c.parquet"), dropped))).domain == "game"


def test_build_mixes_drops_copies_and_splits_by_task(tmp_path):
    words = [" ".join(f"w{n}x{k}" for k in range(40)) for n in range(60)]
    one = [traj(f"webshop_{n}", f"Think: {words[n]}\nAct: click[{n}]") for n in range(40)]
    copies = [traj(f"copy_{n}", f"Think: {words[n]}\nAct: click[{n}]") for n in range(5)]
    two = [traj(f"maze_{n}", f"Think: {words[n]}\nAct: go {n}", data_source="maze") for n in range(40, 60)]
    paths = write(tmp_path / "a.jsonl", one + copies), write(tmp_path / "b.jsonl", two)
    report = build([(paths[0], 1.0), (paths[1], 1.0)], tmp_path / "out", BuildConfig(valid=0.3), Protocol())
    assert report["sources"][paths[0]]["dropped"] == {"near duplicate": 5}
    assert [report["sources"][p]["used"] for p in paths] == [20, 20]
    rows = {s: [json.loads(x) for x in (tmp_path / f"out/{s}.jsonl").open()] for s in ("train", "valid")}
    assert len(rows["train"]) + len(rows["valid"]) == 40 and rows["train"] and rows["valid"]
    assert not {r["id"] for r in rows["train"]} & {r["id"] for r in rows["valid"]}
    dropped = Counter()
    again = list(load_conversations(str(tmp_path / "out"), dropped, Protocol()))
    assert [vars(item) for item in again] == rows["train"] and not dropped


def test_commands(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [traj(), traj("b", reply="no")])
    assert main(["data", "stats", path]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == {"no action": 1}
    assert main(["data", "show", path]) == 0 and "click[buy now]" in capsys.readouterr().out
    assert main(["data", "build", f"{path}=2", "--output_dir", str(tmp_path / "o"), "--valid", "0"]) == 0
    shown = capsys.readouterr().out
    assert f"{path}: 1 of 1 used, weight 2\n  left out 1: no action\n1 in {tmp_path}/o/train.jsonl, 0 in" in shown
    capsys.readouterr()
    assert main(["data", "build", f"{path}=x", "--output_dir", str(tmp_path / "o")]) == 2
    assert "expected DATA or DATA=WEIGHT, got" in capsys.readouterr().err
    assert main(["data", "build", str(path), "--output_dir", str(tmp_path / "p"), "--style", "prose"]) == 2
    assert "--style: expected one of react, tags, act or none, got 'prose'" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
    for words, named in (([str(path), "--valid", "1.5"], "--valid: expected a share"), (["nowhere"], "DATA: expected"),
                         ([str(path), "--max_turns", "0"], "--max_turns: expected an integer")):  # fmt: skip
        assert main(["data", "build", *words, "--output_dir", str(tmp_path / "p")]) == 2
        assert named in capsys.readouterr().err and not (tmp_path / "p").exists()
    assert main(["data", "stats", str(tmp_path / "none.jsonl")]) == 2


def test_show_writes_control_characters_out(tmp_path, capsys):
    row = traj("a\x1b[2J", reply="Think: [bold]é\x1b]0;x\x07\u202e\nAct: look\tup")
    assert main(["data", "show", write(tmp_path / "a.jsonl", [row])]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown
    assert "Think: [bold]é\\x1b]0;x\\x07\\u202e" in shown and "a\\x1b[2J" in shown
    assert main(["data", "show", write(tmp_path / "b.jsonl", [])]) == 2
    assert "expected a conversation or a preference pair in" in capsys.readouterr().err
    assert main(["data", "show", str(tmp_path / "b.jsonl"), "--limit", "0"]) == 2


def test_show_marks_what_is_trained_on_and_finds_an_id(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [traj(), traj("webshop_2", "Think: other\nAct: click[x]"), traj("webshop_3")])
    assert main(["data", "show", path, "--id", "webshop_2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("agent_traj webshop_2 (e-commerce)\nuser: You shop.\nassistant: Ok.\n")
    assert "\nassistant*: Think: other\nAct: click[x]\n1 of 2 replies are trained on; 58 characters in all\n" in shown
    assert main(["data", "show", path, "--limit", "2"]) == 0
    assert capsys.readouterr().out.count("\n\nagent_traj webshop_2") == 1
    assert main(["data", "show", path, "--id", "x"]) == 2
    assert f"--id: expected the id of a conversation in {path!r}, got 'x'" in capsys.readouterr().err
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b", "outcome": [1, 0.25]}]
    name = write(tmp_path / "p.jsonl", pairs)
    assert main(["data", "show", name]) == 0
    expected = "pair (step)\nprompt\nuser: p\nchosen, came to 1\nassistant*: a\nrejected, came to 0.25\nassistant*: b\n"
    assert capsys.readouterr().out == expected
    assert main(["data", "show", name, "--id", "x"]) == 2
    (tmp_path / "none.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "a"}\n')
    assert main(["data", "show", str(tmp_path / "none.jsonl")]) == 2
    shown = capsys.readouterr().err
    assert "skipped 1: chosen equals rejected\n" in shown and "a preference pair in" in shown


WORDS = ["look", "click[buy", "now]", "mug", "7", "Think:", "Act:", "the", ",", "User", "Assistant", "System", ":"]
TOKENIZER = make_tokenizer([" ".join(WORDS), "User:\nAssistant:\nSystem:\n", *WORDS])
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=4))
def test_trained_tokens_are_the_trainable_replies_and_their_end_tokens(turns):
    tokenizer = TOKENIZER
    messages = []
    for user, reply, trainable in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply, "trainable": trainable}]
    chat_format = ChatFormat(tokenizer)
    (row,) = message_rows(chat_format, messages)
    end = tokenizer.decode([chat_format.end_id])
    trained = [int(i) for i in row.token_ids[row.loss_mask]]
    assert tokenizer.decode(trained) == "".join(reply + end for _, reply, trainable in turns if trainable)


def test_malformed_rows_are_value_errors():
    with pytest.raises(MalformedRow, match="another schema"):
        read_row([1])
