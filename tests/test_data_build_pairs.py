"""`data build` on preference pairs, and pairs in the shapes that datasets publish."""

import json
from collections import Counter

import pytest

from manus_fast.agent.protocol import Protocol
from manus_fast.cli import main
from manus_fast.data.build import BuildConfig, build
from manus_fast.data.load import load_conversations
from manus_fast.data.preferences import Preference, load_preferences, preference
from manus_fast.data.schema import MAX_CONTENT, MalformedRow


def words(n):
    return " ".join(f"w{n}x{k}" for k in range(30))


def pair(prompt, chosen="Think: a\nAct: go", rejected="Think: b\nAct: stop", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def write(path, rows):
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))
    return str(path)


def built(out):
    rows = {s: [json.loads(line) for line in (out / f"{s}.jsonl").open()] for s in ("train", "valid")}
    return rows["train"], rows["valid"]


def test_pairs_are_mixed_rewritten_and_split_by_task(tmp_path):
    """Pairs of one first message stay together, whatever follows it; so do those that name one task."""
    one = [pair(words(n), f"Thought: {words(100 + n)}\nAction: go {n}") for n in range(40)]
    deeper = [
        pair(
            [
                {"role": "user", "content": words(n)},
                {"role": "assistant", "content": "I look around."},
                {"role": "user", "content": words(200 + n)},
            ]
        )
        for n in range(40)
    ]
    named = [pair(words(300 + n), task=f"household/{n % 4}") for n in range(20)]
    a, b = write(tmp_path / "a.jsonl", one + deeper), write(tmp_path / "b.jsonl", named)
    report = build([(a, 4), (b, 1)], tmp_path / "out", BuildConfig(valid=0.4), Protocol())
    assert [report["sources"][name]["used"] for name in (a, b)] == [80, 20]
    train, valid = built(tmp_path / "out")
    assert len(train) == report["train"] and len(valid) == report["valid"] and len(train) + len(valid) == 100
    sides = [{row.get("task") or row["prompt"][0]["content"] for row in rows} for rows in (train, valid)]
    assert all(sides) and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 44
    rewritten = {row["chosen"][0]["content"] for row in train + valid}
    assert f"Think: {words(103)}\nAct: go 3" in rewritten
    assert all(row["prompt"][1]["content"] == "I look around." for row in train + valid if len(row["prompt"]) > 1)
    dropped = Counter()
    again = [item.to_json() for item in load_preferences(str(tmp_path / "out"), dropped)]
    assert again == train and not dropped


def test_pairs_are_near_duplicates_where_situation_and_both_sides_are(tmp_path):
    long = " ".join(words(n) for n in range(20))
    rows = [
        pair(long),
        pair(long + " indeed"),  # one word of 600
        pair(long, rejected="Think: b\nAct: wait"),  # another rejected reply
        pair(long, "Think: b\nAct: stop", "Think: a\nAct: go"),  # the other way round
        pair(words(50)),  # another situation
    ]
    name = write(tmp_path / "a.jsonl", rows)
    report = build([(name, 1)], tmp_path / "out", BuildConfig(), Protocol())
    assert report["sources"][name]["near_duplicates"] == [{"id": "pair 2", "like": f"{name}: pair 1"}]
    assert report["sources"][name]["read"] == 4


def test_dropped_pairs_are_counted_by_reason(tmp_path):
    many = [{"role": r, "content": "Act: go"} for r in ("assistant", "user", "assistant")]
    rows = [
        pair(words(1)),
        pair(words(2), "I would rather talk."),
        pair(words(3), "Think: x\nAct: go", "Thought: x\nAction: go"),  # two ways of writing one reply
        pair(words(4), many),
        pair("x " * 3000),
        pair(words(5), chosen=None),
        {"prompt": "p", "chosen": "c"},
        b'{"prompt": "a", "cho\n',
        b'{"prompt": "\xff", "chosen": "a", "rejected": "b"}\n',
    ]
    name = write(tmp_path / "a.jsonl", rows)
    report = build([(name, 1)], tmp_path / "out", BuildConfig(max_turns=1, max_chars=5000), Protocol())
    assert report["sources"][name]["dropped"] == {
        "no action": 1, "chosen equals rejected": 1, "too many turns": 1, "conversation too long": 1,
        "another schema": 2, "truncated JSON": 1, "invalid UTF-8": 1,
    }  # fmt: skip
    assert report["train"] + report["valid"] == 1


def test_sampled_tokens_keep_their_text(tmp_path):
    rows = {"ids": [1, 2, 3], "spans": [[1, 3, 0]]}
    tokens = {"tokenizer": "t", "chosen": [rows], "rejected": [{**rows, "ids": [1, 2, 4]}]}
    item = preference(pair(words(1), "Thought: a\nAction: go", "mumble", tokens=tokens))
    name = write(tmp_path / "a.jsonl", [item.to_json()])
    build([(name, 1)], tmp_path / "out", BuildConfig(valid=0), Protocol())
    assert built(tmp_path / "out")[0] == [item.to_json()]


def test_chat_pairs_and_chosen_sides_on_the_command_line(tmp_path, capsys):
    chat = write(tmp_path / "chat.jsonl", [pair(words(n), f"Sure, {words(50 + n)}", "No.") for n in range(3)])
    acting = write(tmp_path / "acting.jsonl", [pair(words(n), f"Thought: {words(n)}\nAction: go") for n in range(3)])
    plain = {
        "id": "a",
        "messages": [{"role": "user", "content": words(9)}, {"role": "assistant", "content": "Act: go"}],
    }
    conversations = write(tmp_path / "conversations.jsonl", [plain])
    out = str(tmp_path / "out")

    assert main(["data", "build", chat, "--output_dir", out]) == 2
    error = capsys.readouterr().err
    assert "got none (3 no action; --style none keeps replies as they are)" in error
    assert main(["data", "build", chat, "--output_dir", out, "--style", "none", "--valid", "0"]) == 0
    assert {row["rejected"][0]["content"] for row in built(tmp_path / "out")[0]} == {"No."}

    assert main(["data", "build", acting, conversations, "--output_dir", out]) == 2
    error = capsys.readouterr().err
    assert f"got pairs in {acting!r} and none in {conversations!r} (--chosen" in error
    assert main(["data", "build", f"{acting}=3", conversations, "--output_dir", out, "--chosen", "--valid", "0"]) == 0
    dropped = Counter()
    items = list(load_conversations(out, dropped, Protocol()))
    assert {item.id for item in items} == {"a", "acting_1", "acting_2", "acting_3"} and not dropped
    first = next(item for item in items if item.id == "acting_2")
    assert (first.source, first.task) == ("acting", words(1))
    assert first.messages == [
        {"role": "user", "content": words(1), "trainable": False},
        {"role": "assistant", "content": f"Think: {words(1)}\nAct: go", "trainable": True},
    ]


USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "good"), ("assistant", "bad")))


@pytest.mark.parametrize(
    "record, prompt",
    [
        ({"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"}, [USER]),
        ({"question": "q", "chosen": "good", "rejected": "bad"}, [USER]),
        ({"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
         [{"role": "system", "content": "s"}, USER]),
        ({"system": "", "question": "q", "chosen": "good", "rejected": "bad"}, [USER]),
        ({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}, [USER]),
        ({"instruction": "q", "input": "x", "chosen": "good", "rejected": "bad"},
         [{"role": "user", "content": "q\nx"}]),
        ({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
          "rejected": {"from": "gpt", "value": "bad"}}, [USER]),
        ({"prompt": "q", "prompt_id": "1", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
         [USER]),
    ],
)  # fmt: skip
def test_published_shapes(record, prompt):
    assert preference(record) == Preference(prompt, [GOOD], [BAD], "step")


def test_a_dialogue_of_several_turns():
    begin = "\n\nHuman: Hi there.\n\nAssistant: Hello.\n\nTell me more.\n\nHuman: Well: Assistant: no\n\nAssistant:"
    item = preference({"chosen": f"{begin} yes", "rejected": f"{begin} no"})
    assert [m["content"] for m in item.prompt] == ["Hi there.", "Hello.\n\nTell me more.", "Well: Assistant: no"]
    assert (item.chosen[0]["content"], item.rejected[0]["content"]) == ("yes", "no")


BEGIN = "\n\nHuman: q\n\nAssistant:"
SHARE = {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
         "rejected": {"from": "gpt", "value": "bad"}}  # fmt: skip


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"chosen": BEGIN, "rejected": f"{BEGIN} bad"}, "empty turn"),
        ({"chosen": f"{BEGIN} good", "rejected": f"{BEGIN} good"}, "chosen equals rejected"),
        ({"chosen": f"{BEGIN} a\n\nHuman: b\n\nAssistant: c", "rejected": f"{BEGIN} a"}, "a side without a reply"),
        ({"chosen": f"{BEGIN} a\n\nHuman: b", "rejected": f"{BEGIN} b"}, "wrong role order"),
        ({"question": None, "chosen": "good", "rejected": "bad"}, "content is not text"),
        ({"question": "", "chosen": "good", "rejected": "bad"}, "empty turn"),
        ({"question": "x" * MAX_CONTENT, "chosen": "good", "rejected": "bad"}, "message too long"),
        ({"question": "q", "system": 3, "chosen": "good", "rejected": "bad"}, "content is not text"),
        ({**SHARE, "chosen": "good"}, "another schema"),
        ({**SHARE, "conversations": None}, "another schema"),
        ({**SHARE, "rejected": {"from": "bard", "value": "x"}}, "unknown role"),
        ({**SHARE, "rejected": {"from": ["gpt"], "value": "x"}}, "unknown role"),
        ({**SHARE, "rejected": {"from": "gpt", "value": None}}, "content is not text"),
        ({"prompt": "q", "chosen": "\ud83d", "rejected": "bad"}, "invalid UTF-8"),
        ({"prompt": "q", "chosen": "good", "rejected": "bad", "task": 3}, "task is not text"),
    ],
)
def test_malformed_published_pairs(record, reason):
    with pytest.raises(MalformedRow) as error:
        preference(record)
    assert error.value.reason == reason


def test_hub_pairs(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"chosen": f"{BEGIN} Act: {words(n)}", "rejected": f"{BEGIN} Act: no {n}"} for n in range(4)]
    splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, streaming: datasets.DatasetDict(splits))
    report = build([("owner/pairs", 1)], tmp_path / "out", BuildConfig(valid=0), Protocol())
    assert report["train"] == 4 and built(tmp_path / "out")[0][0]["chosen"][0]["content"].startswith("Think: \nAct: ")
    assert build([("owner/pairs:test", 1)], tmp_path / "out", BuildConfig(valid=0), Protocol())["train"] == 1
