"""Config: what may be written, what comes of it, and that each mistake is one sentence with the key in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from manus_fast.agent.config import AgentConfig
from manus_fast.config import from_mapping, keys, load_config, read_values, save_config, to_dict
from manus_fast.envs.config import EnvironmentConfig, RewardConfig


@dataclass
class Schedule:
    kind: Literal["constant", "cosine"] = "constant"
    value: float = 1e-4


@dataclass
class PPO:
    gamma: float = 0.99
    epochs: int = 4
    clip: bool = True
    entropy: float | Schedule = 0.0


@dataclass
class Root:
    name: str = "run"
    steps: int = 10
    limit: int | None = None
    ppo: PPO = field(default_factory=lambda: PPO(epochs=2))
    search: PPO | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    folder: Path | None = None
    layers: list[int] = field(default_factory=list)
    pair: tuple[float, float] = (0.9, 0.95)
    options: dict[str, Any] = field(default_factory=dict)


def written(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_defaults_alone():
    assert load_config(Root) == Root()


def test_yaml_then_overrides_in_order(tmp_path):
    path = written(tmp_path, "steps: 1e6\nppo: {gamma: 1}\nrewards: {format: 0.5}\nlayers: [1, 2]\nfolder: runs/x\n")
    config = load_config(Root, path, ["ppo.gamma=0.5", "ppo.gamma=0.95", "rewards.success=2", "limit=7", "name=b=c"])
    assert config.steps == 1_000_000 and isinstance(config.steps, int)
    assert config.ppo == PPO(gamma=0.95, epochs=2)  # epochs from the root's own default, not from PPO's
    assert config.rewards == {"format": 0.5, "success": 2.0}
    assert config.limit == 7 and config.layers == [1, 2] and config.folder == Path("runs/x") and config.name == "b=c"


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    assert load_config(Root, written(tmp_path, "ppo: {gamma: 1e-3}"), ["pair=[1e-1,5]"]).pair == (0.1, 5.0)
    assert load_config(Root, written(tmp_path, "ppo: {gamma: 1e-3}")).ppo.gamma == 1e-3


def test_union_with_a_dataclass(tmp_path):
    assert load_config(Root, None, ["ppo.entropy=0.01"]).ppo.entropy == 0.01
    config = load_config(Root, written(tmp_path, "ppo:\n  entropy: {kind: cosine, value: 2}\n"))
    assert config.ppo.entropy == Schedule("cosine", 2.0)


def test_bare_words_that_yaml_takes_for_truth_values():
    @dataclass
    class Saving:
        strategy: Literal["no", "steps"] = "steps"
        switch: Literal["on", "auto"] = "auto"
        flag: Literal[True, "auto"] = "auto"

    assert from_mapping(Saving, {"strategy": False, "switch": True, "flag": True}) == Saving("no", "on", True)
    with pytest.raises(ValueError, match="strategy: expected one of no, steps, got true"):
        from_mapping(Saving, {"strategy": True})


def test_optional_block_and_null(tmp_path):
    assert load_config(Root, written(tmp_path, "search: {epochs: 9}")).search == PPO(epochs=9)
    assert load_config(Root, written(tmp_path, "search: null\nlimit: null")).search is None


def test_values_beneath_the_file(tmp_path):
    beneath = {"ppo": {"gamma": 0.5, "epochs": 7}}
    path = written(tmp_path, "ppo: {epochs: 8}")
    assert load_config(Root, path, ["ppo.clip=false"], beneath).ppo == PPO(gamma=0.5, epochs=8, clip=False)
    assert read_values(path, ["steps=3"]) == {"ppo": {"epochs": 8}, "steps": 3}
    assert read_values() == {}


def test_a_block_given_as_a_value_replaces_what_lies_beneath(tmp_path):
    with pytest.raises(ValueError, match="ppo: expected a mapping of keys, got 3"):
        load_config(Root, written(tmp_path, "ppo: 3"), (), {"ppo": {"gamma": 0.5}})


def test_interpolation(tmp_path):
    assert load_config(Root, written(tmp_path, "steps: 5\nlimit: ${steps}\n")).limit == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ppo: {gama: 0.9}", "unknown key 'ppo.gama': did you mean 'ppo.gamma'?"),
        ("gamma: 0.9", "unknown key 'gamma': did you mean 'ppo.gamma'?"),
        ("stepz: 3", "unknown key 'stepz': did you mean 'steps'?"),
        ("qqq: 3", "unknown key 'qqq': did you mean "),
        ("ppo: {entropy: {kin: cosine}}", "unknown key 'ppo.entropy.kin': did you mean 'ppo.entropy.kind'?"),
        ("steps: true", "steps: expected an integer, got true (true or false)"),
        ("ppo: {clip: 1}", "ppo.clip: expected true or false, got 1 (an integer)"),
        ("steps: 1.5", "steps: expected an integer, got 1.5 (a number)"),
        ("steps: '5'", "steps: expected an integer, got '5' (text)"),
        ("steps: null", "steps: expected an integer, got null"),
        ("steps: [1]", "steps: expected an integer, got a list ([1])"),
        ("name: 5", "name: expected text, got 5 (an integer)"),
        ("limit: x", "limit: expected an integer or null, got 'x' (text)"),
        ("ppo: 3", "ppo: expected a mapping of keys, got 3 (an integer)"),
        ("ppo: null", "ppo: expected a mapping of keys, got null"),
        ("ppo: {gamma: high}", "ppo.gamma: expected a number, got 'high' (text)"),
        ("ppo: {entropy: {kind: linear}}", "ppo.entropy.kind: expected one of constant, cosine, got 'linear' (text)"),
        ("rewards: {a: b}", "rewards.a: expected a number, got 'b' (text)"),
        ("layers: [1, x]", "layers[1]: expected an integer, got 'x' (text)"),
        ("pair: [1]", "pair: expected a list of 2 values, got 1"),
        ("layers: {a: 1}", "layers: expected a list, got a mapping (a)"),
        ("[1, 2]", "to hold a mapping of keys"),
        ("steps: ${nothing}", "nothing"),
        ("steps: [1", "is not valid YAML in line"),
        ("steps: 1\nsteps: 2", "is not valid YAML in line 2"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key_in_it(tmp_path, text, message):
    with pytest.raises(ValueError) as caught:
        load_config(Root, written(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["ppo.gamma", "=3", ".=3", "ppo..gamma=3", "ppo.gamma=[1"])
def test_malformed_override(override):
    with pytest.raises(ValueError, match="expected"):
        load_config(Root, None, [override])


def test_missing_file():
    with pytest.raises(ValueError, match=r"config: expected a YAML file, found none at 'no/such.yaml'"):
        load_config(Root, "no/such.yaml")


def test_empty_file_is_the_defaults(tmp_path):
    assert load_config(Root, written(tmp_path, "# nothing yet\n")) == Root()


def test_the_dump_reads_back_as_the_same_config(tmp_path):
    config = load_config(Root, None, ["ppo.entropy={kind: cosine}", "folder=a/b", "pair=[1,2]", "search={gamma: 0.5}"])
    save_config(config, tmp_path / "config.json")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    values = json.loads((tmp_path / "config.json").read_text())
    assert values == to_dict(config)
    assert from_mapping(Root, values) == config
    assert load_config(Root, tmp_path / "config.json") == config  # JSON is YAML


def test_required_key(tmp_path):
    @dataclass
    class Needs:
        path: str

    with pytest.raises(ValueError, match="path: expected text, got nothing"):
        from_mapping(Needs, {})


def test_keys_lists_every_dotted_key():
    listed = list(keys(Root))
    assert {"ppo.entropy.value", "search.gamma", "rewards"} <= set(listed)
    assert listed.index("name") < listed.index("ppo") < listed.index("ppo.gamma")


@pytest.mark.parametrize("name", ["step_penalty", "invalid_action_penalty"])
def test_a_positive_penalty_is_an_error(name):
    with pytest.raises(ValueError, match=rf"environment.reward_config.{name}: expected a number <= 0"):
        from_mapping(EnvironmentConfig, {"reward_config": {name: 0.1}})
    assert getattr(RewardConfig(**{name: -0.1}), name) == -0.1


def test_reward_config_must_be_finite():
    with pytest.raises(ValueError, match="success_bonus: expected a finite number"):
        RewardConfig(success_bonus=float("nan"))


def test_component_checks():
    with pytest.raises(ValueError, match=r"agent\.window"):
        AgentConfig(window=0)
    with pytest.raises(ValueError, match=r"environment\.max_steps"):
        EnvironmentConfig(max_steps=0)
    with pytest.raises(ValueError, match="context: expected one of full, window, got 'summary'"):
        from_mapping(AgentConfig, {"context": "summary"})
