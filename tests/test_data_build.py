"""`data build`: no task on both sides, what is left out is reported, and files appear whole or not at all."""

import json
import shutil
from collections import Counter
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_fast.agent.protocol import Protocol
from manus_fast.cli import main
from manus_fast.data import build as module
from manus_fast.data.build import BuildConfig, build, is_valid
from manus_fast.data.load import load_conversations
from manus_fast.data.schema import Conversation


def row(identifier, words, task=""):
    turns = [("user", f"see {words}", False), ("assistant", f"Think: {words}\nAct: look", True)]
    messages = [dict(zip(("role", "content", "trainable"), turn, strict=True)) for turn in turns]
    return Conversation(identifier, "human", "household", messages, task).to_json()


def words(n):
    return " ".join(f"w{n}x{k}" for k in range(30))


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=25),
    st.lists(st.integers(0, 6), min_size=1, max_size=25),
    st.floats(0, 0.9),
    st.integers(0, 5),
)
def test_no_task_is_on_both_sides(tmp_path_factory, first, second, share, seed):
    """Conversations of few tasks, spread over two datasets."""
    folder = tmp_path_factory.mktemp("build")
    names = [
        write(folder / f"{name}.jsonl", [row(f"{name}{i}", words(f"{name}{i}"), f"task {t}") for i, t in enumerate(ts)])
        for name, ts in (("a", first), ("b", second))
    ]
    config = BuildConfig(valid=share, seed=seed)
    report = build([(name, 1.0) for name in names], folder / "out", config, Protocol())
    rows = {s: [json.loads(line) for line in (folder / f"out/{s}.jsonl").open()] for s in ("train", "valid")}
    sides = {s: {r["task"] for r in rows[s]} for s in rows}
    assert not sides["train"] & sides["valid"]
    assert (
        len(rows["train"]) + len(rows["valid"]) == report["train"] + report["valid"] == 2 * min(len(first), len(second))
    )
    assert share > 0 or not rows["valid"]


def test_the_share_of_tasks_for_validation():
    share = sum(is_valid(f"task_{n}", 0.2, 0) for n in range(4000)) / 4000
    assert share == pytest.approx(0.2, abs=0.025)  # four standard deviations


def test_the_report_says_what_was_dropped_and_what_it_is_like(tmp_path):
    one = write(tmp_path / "a.jsonl", [row("a1", words(1)), row("a2", words(2)), row("a3", words(2))])
    long = row("b2", words(4))
    long["messages"] *= 3
    two = write(tmp_path / "b.jsonl", [row("b1", words(1)), long, row("b3", "x " * 3000), row("b4", words(5)), {}])
    config = BuildConfig(max_turns=2, max_chars=5000)
    report = build([(one, 1), (two, 1)], tmp_path / "out", config, Protocol())
    first, second = report["sources"][one], report["sources"][two]
    assert first["dropped"] == {"near duplicate": 1} and first["near_duplicates"] == [
        {"id": "a3", "like": f"{one}: a2"}
    ]
    assert second["near_duplicates"] == [{"id": "b1", "like": f"{one}: a1"}]  # over all sources
    assert second["dropped"] == {
        "near duplicate": 1, "too many turns": 1, "conversation too long": 1, "another schema": 1,
    }  # fmt: skip
    assert (first["read"], second["read"], second["used"], report["train"] + report["valid"]) == (2, 1, 1, 2)
    assert json.loads((tmp_path / "out/report.json").read_text()) == report


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_what_was_there(tmp_path, monkeypatch, error):
    source = write(tmp_path / "a.jsonl", [row(f"a{n}", words(n)) for n in range(5)])
    build([(source, 1)], tmp_path / "out", BuildConfig(), Protocol())
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert set(before) == {"train.jsonl", "valid.jsonl", "report.json"}
    calls = []

    def interrupted(item, share, seed):
        calls.append(item)
        if len(calls) == 3:  # two rows are written by now
            raise error
        return False

    monkeypatch.setattr(module, "is_valid", interrupted)
    with pytest.raises(error):
        build([(source, 1)], tmp_path / "out", BuildConfig(seed=1), Protocol())
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    calls.clear()
    with pytest.raises(error):
        build([(source, 1)], tmp_path / "new/out", BuildConfig(seed=1), Protocol())
    assert not (tmp_path / "new").exists()


def test_mistakes_are_one_sentence_and_leave_nothing(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "no.parquet").write_text("not a parquet file")
    good = write(tmp_path / "good.jsonl", [row("a", words(1))])
    other = write(tmp_path / "other.jsonl", [{"prompt": "a", "answer": "b"}] * 2)
    cases = [
        ([str(tmp_path / "none.jsonl")], "which does not exist"),
        ([str(tmp_path / "empty.jsonl")], "got none (it holds no row)"),
        ([other], "got none (2 another schema)"),
        ([str(tmp_path / "no.parquet")], "expected a parquet file" if find_spec("pyarrow") else "the package pyarrow"),
        ([str(tmp_path / "file")], "expected a file named .jsonl"),
        ([f"{good}=0"], "one above 0"),
        ([f"{good}=-1"], "weights >= 0"),
        ([f"{good}=inf"], "finite"),
        ([f"{good}=nan"], "finite"),
        ([good, "--similarity", "0"], "similarity"),
        ([good, "--valid", "1"], "valid"),
    ]
    for arguments, words_ in cases:
        assert main(["data", "build", *arguments, "--output_dir", str(tmp_path / "out")]) == 2, arguments
        error = capsys.readouterr().err
        assert words_ in error and len(error.strip().splitlines()) == 1, error
        assert not (tmp_path / "out").exists()
    assert main(["data", "build", good, "--output_dir", str(tmp_path / "file" / "out")]) == 2
    assert "--output_dir" in capsys.readouterr().err
    assert main(["data", "build", good, "--output_dir", str(tmp_path / "file")]) == 2
    assert main(["data", "build", good, "--output_dir", ""]) == 2


def test_ids_of_two_files_stay_apart_and_their_task_together(tmp_path):
    names = [write(tmp_path / f"{n}.jsonl", [row("os_1", words(n)), row("os_2", words(n + 10))]) for n in (1, 2)]
    build([(name, 1) for name in names], tmp_path / "out", BuildConfig(valid=0), Protocol())
    dropped = Counter()
    items = list(load_conversations(str(tmp_path / "out"), dropped))
    assert not dropped and {item.id for item in items} == {"os_1", "os_1#2", "os_2", "os_2#2"}
    assert {item.task or item.id for item in items} == {"os_1", "os_2"}
    folder = tmp_path / "both"
    folder.mkdir()
    for name in names:
        shutil.copy(name, folder)
    assert len(list(load_conversations(str(folder), dropped))) == 4 and not dropped  # an id once a file


def test_repeated_ids_are_skipped_or_kept(tmp_path):
    name = write(tmp_path / "a.jsonl", [row("maze_1", words(1)), row("maze_1", words(2)), row("maze_1", words(2))])
    report = build([(name, 1)], tmp_path / "out", BuildConfig(), Protocol())
    assert report["sources"][name]["dropped"] == {"duplicate id": 2}
    report = build([(name, 1)], tmp_path / "out", BuildConfig(keep_repeated_ids=True), Protocol())
    assert report["sources"][name]["dropped"] == {"near duplicate": 1}
    items = [
        *load_conversations(f"{tmp_path}/out", Counter()),
        *load_conversations(f"{tmp_path}/out", Counter(), split="valid"),
    ]
    assert {(item.id, item.task or item.id) for item in items} == {("maze_1", "maze_1"), ("maze_1#2", "maze_1")}


def test_rules_that_all_conversations_begin_with_make_no_duplicates(tmp_path):
    rows = []
    for n in range(6):
        item = row(f"maze_{n}", words(n % 5))  # the last one is a copy
        rules = [{"role": "user", "content": "rule " * 30 + " ".join(f"r{k}" for k in range(900)), "trainable": False},
                 {"role": "assistant", "content": "Ok.", "trainable": False}]  # fmt: skip
        rows.append({**item, "messages": rules + item["messages"]})
    name = write(tmp_path / "a.jsonl", rows)
    report = build([(name, 1)], tmp_path / "out", BuildConfig(), Protocol())
    assert report["sources"][name]["near_duplicates"] == [{"id": "maze_5", "like": f"{name}: maze_0"}]
