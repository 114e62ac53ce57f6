"""`data stats`: figures worked out by hand, the forms of action, and the picture."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manus_fast.agent.protocol import Protocol
from manus_fast.cli import main
from manus_fast.data.normalise import form_of
from manus_fast.data.statistics import Statistics, histogram, spread

FORMS = {
    "Think: a\nAct: look": "Act:",
    "Thought: a\nAction: look": "Action:",
    'Thought: a\nAction: get\nAction Input: {"q": 1}': "Action Input:",
    "a\n```sql\nSELECT 1\n```": "code block",
    "Act: bash\n```bash\nls\n```": "code block",
    '<tool_call>{"name": "f"}</tool_call>': "JSON tool call",
    '{"action": "look"}': "JSON tool call",
    "I am done.": "none",
    "Act: ": "none",
}


@pytest.mark.parametrize("text", FORMS)
def test_forms(text):
    assert form_of(text) == FORMS[text]


def row(identifier, *replies):
    turns = [("human", "h" * 10, None)]
    for reply in replies:
        turns += [("gpt", reply, True), ("human", "h" * 10, None)]
    return {"id": identifier, "conversations": [dict(zip(("from", "value", "loss"), t, strict=True)) for t in turns]}


@pytest.fixture
def dataset(tmp_path):
    rows = [row("os_1", "Think: a\nAct: look"), row("os_2", *["Thought: a\nAction: look"] * 3),
            row("db_1", "a\n```sql\nSELECT 1\n```", "Think: a\nAct: look"), row("db_2", "no"), {"x": 1}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path / "a.jsonl"


def test_figures_by_hand(dataset, capsys):
    assert main(["data", "stats", str(dataset), "--plot", str(dataset.with_suffix(".svg"))]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["conversations"], figures["trainable_replies"]) == (3, 6)
    assert figures["turns"] == {"mean": 2, "min": 1, "median": 2, "p95": 3, "max": 3}
    assert figures["characters"]["min"] == 10 + len("Think: a\nAct: look")
    assert figures["formats"] == {"Action:": 3, "Act:": 2, "code block": 1}
    assert figures["domains"] == {"OS": 2, "DB": 1} and figures["sources"] == {"agent_instruct": 3}
    assert figures["dropped"] == {"another schema": 1, "no action": 1}
    texts = [node.text for node in ElementTree.parse(dataset.with_suffix(".svg")).iter() if node.text]
    for name in (
        "replies a conversation",
        "characters a conversation",
        "domains",
        "OS",
        "DB",
        "code block",
        "no action",
    ):
        assert name in texts
    # Bars are as long as their counts.
    widths = [
        float(n.get("width")) for n in ElementTree.parse(dataset.with_suffix(".svg")).iter() if n.get("height") == "14"
    ]
    assert max(widths) == 190 and 95 in widths  # OS 2, DB 1


def test_a_dataset_without_conversations_has_a_picture_too():
    statistics = Statistics(Protocol())
    assert (
        statistics.to_json()["turns"] == {} and ElementTree.fromstring(statistics.plot("<none> & nothing")) is not None
    )


def test_a_plot_that_cannot_be_written(dataset, capsys):
    for name in ("x.png", str(dataset.parent / "none" / "x.svg")):
        assert main(["data", "stats", str(dataset), "--plot", name]) == 2
        assert "--plot" in capsys.readouterr().err
    (dataset.parent / "folder.svg").mkdir()
    assert main(["data", "stats", str(dataset), "--plot", str(dataset.parent / "folder.svg")]) == 2


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200))
def test_a_histogram_counts_every_value(values):
    bars = histogram(values)
    assert sum(bars.values()) == len(values) and len(bars) <= 10
    spreads = spread(values)
    assert spreads["min"] <= spreads["median"] <= spreads["p95"] <= spreads["max"] == max(values)


def test_a_histogram_by_hand():
    assert histogram([1, 1, 2, 4]) == {"1": 2, "2": 1, "3": 0, "4": 1}
    assert histogram([*range(99), 10_000]) == {f"{n}–{n + 9}": 10 for n in range(0, 90, 10)} | {"90+": 10}
    assert histogram([]) == {}


def pair(chosen, rejected, **more):
    return {"prompt": [{"role": "user", "content": "see"}], "chosen": chosen, "rejected": rejected, **more}


def test_preference_pairs_are_shown_and_counted(tmp_path, capsys, monkeypatch):
    long = [{"role": "assistant", "content": "Act: a"}, {"role": "user", "content": "ok"},
            {"role": "assistant", "content": "Act: b"}]  # fmt: skip
    rows = [pair("Act: look", "Act: jump", source="people"), pair(long, long[:1]), pair("x", "x"), {"chosen": "a"}]
    file = tmp_path / "preferences.jsonl"
    file.write_text("{\n" + "".join(json.dumps(r) + "\n" for r in rows))
    assert main(["data", "stats", str(file)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["pairs"], figures["levels"]) == (2, {"step": 1, "trajectory": 1})
    assert figures["sources"] == {"people": 1, "unnamed": 1}
    assert figures["replies"]["chosen"]["mean"] == 1.5 and figures["replies"]["rejected"]["max"] == 1
    assert figures["characters"]["chosen"] == {"mean": 11.5, "min": 9, "median": 14, "p95": 14, "max": 14}
    assert figures["dropped"] == {"another schema": 1, "chosen equals rejected": 1, "truncated JSON": 1}
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["data", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[32mAct: look" in shown and "\x1b[31mAct: jump" in shown and "people (step)" in shown
    assert main(["data", "stats", str(file), "--plot", str(tmp_path / "x.svg")]) == 0
    texts = [node.text for node in ElementTree.parse(tmp_path / "x.svg").iter() if node.text]
    assert {"2 preference pairs", "characters, rejected", "people", "trajectory", "truncated JSON"} <= set(texts)
