"""The README keeps its word: its example runs, its commands exist, and the files that it names are there."""

import re
from pathlib import Path

import pytest

from manus_fast import cli
from manus_fast.settings import __doc__ as settings_text

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def example():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    return code


def test_the_example_is_short():
    assert len([line for line in example().splitlines() if line.strip()]) <= 20


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    """As it stands, but for the amounts of training."""
    code = example()
    for written, smaller in (
        ("data.demonstrations=200", "data.demonstrations=64"),
        ("sft.epochs=2", "sft.epochs=1"),
        ("training.total_steps=4000", "training.total_steps=100"),
        ("limit=100", "limit=24"),
    ):
        assert written in code
        code = code.replace(written, smaller)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    shown = capsys.readouterr().out
    assert "runs/ppo/model Rate(" in shown and "Comparison(" in shown
    assert (tmp_path / "runs" / "ppo" / "model" / "config.json").is_file()


def test_the_commands_that_it_names_exist(capsys):
    assert cli.main(["--help"]) == 0
    known = set(re.findall(r"│ ([\w-]+) ", capsys.readouterr().out))
    named = set(re.findall(r"manus-fast (\w[\w-]*)", README))
    assert named and named <= known


def test_the_make_targets_that_it_names_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)(?= {2,}|;)", text))
    assert {"demo", "test", "build", "lint"} <= named <= targets


def test_the_map_names_what_is_there():
    (block,) = re.findall(r"## Map of the house\n\n```\n(.*?)```", README, re.S)
    inside = block.split("manus_fast/\n")[1].split("configs/")[0]
    folders = set(re.findall(r"\b(\w+)/", inside))
    assert folders == {path.parent.name for path in (ROOT / "manus_fast").glob("*/__init__.py")}
    files = set(re.findall(r"\b(\w+\.py)\b", inside))
    there = {path.name for path in (ROOT / "manus_fast").glob("*.py")} - {"__init__.py"}
    assert files == there


def test_every_environment_variable_is_in_its_table():
    assert set(re.findall(r"^(MANUS_FAST_\w+)", settings_text, re.M)) == set(re.findall(r"`(MANUS_FAST_\w+)`", README))
