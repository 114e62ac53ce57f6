"""The docs keep their word: what they show of configs and commands is what the program takes."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from manus_fast.commands.common import find_config
from manus_fast.learn.advantages import KINDS
from manus_fast.learn.backend import BackendConfig
from manus_fast.learn.curriculum import CurriculumConfig
from manus_fast.learn.dpo import DPOConfig
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.presets import PRESETS
from manus_fast.learn.reward_model import RewardModelConfig
from manus_fast.learn.sft import SFTConfig
from manus_fast.modeling.lora import LoRAConfig
from manus_fast.run_config import Config

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
KEYS = set(Config.__dataclass_fields__)
# Commands whose dotted words are a run's config.
TRAINERS = {"sft", "ppo", "dpo", "reward-model", "expert-iteration", "search", "eval", "info"}


def blocks(page):
    """Texts of a page's code: fenced, or indented by four spaces."""
    text = page.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    indented = re.findall(r"(?:^    .*\n)(?:(?:^    .*)?\n)*", rest, re.M)
    return [*fenced, *(re.sub(r"^    ", "", block, flags=re.M) for block in indented)]


def snippets():
    """Config snippets: each key of the top level with what is indented beneath it."""
    for page in PAGES:
        for block in blocks(page):
            for part in re.split(r"\n(?=[a-z_]+:)", block):
                if part.partition(":")[0] in KEYS:
                    yield pytest.param(part, id=f"{page.stem}: {part.split(chr(10))[0][:40]}")


def commands():
    """Words of each `manus-fast` command line."""
    for page in [*PAGES, ROOT / "README.md"]:
        for block in blocks(page):
            for line in block.replace("\\\n", " ").splitlines():
                if "manus-fast " in line or "manus_fast.cli " in line:
                    words = shlex.split(re.split(r"manus-fast |manus_fast\.cli ", line)[1], comments=True)
                    if words and words[0] in TRAINERS:
                        yield pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")


@pytest.mark.parametrize("snippet", list(snippets()))
def test_configs_that_are_shown_load(snippet, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(snippet)
    (key,) = yaml.safe_load(snippet)
    shown, default = (getattr(config, key) for config in (Config.load(file), Config()))
    assert shown != default


@pytest.mark.parametrize("words", list(commands()))
def test_keys_of_commands_that_are_shown_are_the_configs(words):
    name = words[words.index("--config") + 1] if "--config" in words else None
    overrides = [word for word in words[1:] if re.match(r"[a-z_]+(\.\w+)*=", word)]
    Config.load(None if name in (None, "FILE") else find_config(name, name), overrides)


def test_there_are_some_of_both():
    assert len(list(snippets())) >= 5 and len(list(commands())) >= 10


def test_the_table_of_presets_is_that_of_the_code():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    rows = {cells[0].strip("`"): cells for cells in _rows(text, "| preset |")}
    assert list(rows) == list(PRESETS)
    for name, preset in PRESETS.items():
        row = " ".join(rows[name])
        assert f"`{preset['advantage']}`" in rows[name][1]
        for key in set(preset) - {"advantage", "aggregation", "ratio", "clip", "clip_range", "clip_range_high"}:
            value = preset[key]
            told = str(value).lower() if isinstance(value, (bool, str)) else f"{value:g}"
            assert (f"`{key}`" if value is True else f"`{key}: {told}`") in row, (name, key)
        assert rows[name][2] == preset.get("ratio", "token")
        assert rows[name][4] == preset.get("aggregation", "token-mean")
        low = preset.get("clip_range", 0.2)
        shown = f"{low:g}, {preset.get('clip_range_high', low):g}"
        assert rows[name][3] == ("`cispo`: none, 0.28" if preset.get("clip") == "cispo" else shown)
    kinds = [cells[0].strip("`") for cells in _rows(text, "| `advantage` | of")]
    assert set(kinds) == set(KINDS)


@pytest.mark.parametrize(
    ("block", "pages"),
    [
        (PPOConfig, ["algorithms"]),
        (CurriculumConfig, ["algorithms"]),
        (SFTConfig, ["algorithms"]),
        (DPOConfig, ["algorithms", "preferences"]),
        (RewardModelConfig, ["algorithms", "preferences"]),
        (LoRAConfig, ["lora"]),
        (BackendConfig, ["distributed"]),
    ],
)
def test_every_key_of_learning_is_told_of(block, pages):
    files = [page for page in PAGES if page.stem in pages]
    text = "".join(page.read_text().replace("```", "`") for page in files)
    code = " ".join([*re.findall(r"`[^`]+`", text), *(block for page in files for block in blocks(page))])
    names = [field.name for field in fields(block)]
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


def _rows(text, head):
    table = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
