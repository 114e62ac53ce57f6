"""The user's mistakes at the command line: each is one clear sentence, exit code 2, and nothing is half-written."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from manus_fast import cli
from manus_fast.modeling.tiny import make_policy

SIZES = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 24, "max_length": 1024}
# Small enough for a test to run to its end, were it not for the mistake.
SMALL = [
    "environment.options={level: 1, num_valid: 4}", "environment.max_steps=2", "rollout.max_turn_tokens=4",
    "rollout.slots=4", "evaluation.tasks=2", "training.num_rollouts=4", "training.total_steps=8", "ppo.batch_size=4",
    "sft.epochs=1", "sft.batch_size=2", "data.demonstrations=2", "agent.instructions=Household.",
]  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("models") / "p", ["go to bed 1", "Household."], **SIZES)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def refused(capsys, words, message, out=None):
    """Runs a command line and checks the whole promise; returns the sentence."""
    capsys.readouterr()
    code = cli.main([str(word) for word in words])
    shown = capsys.readouterr()
    assert code == 2, shown.err
    assert shown.err.startswith("manus-fast: ") and shown.err.count("\n") == 1, shown.err
    assert message in shown.err
    assert "Traceback" not in shown.err and shown.out == ""
    assert out is None or not out.exists()
    return shown.err


def words(command, policy, out, *more):
    return [command, f"model.path={policy}", f"training.output_dir={out}", *SMALL, *more]


@pytest.mark.parametrize("command", ["ppo", "sft"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.gama=0.9", "unknown key 'ppo.gama': did you mean 'ppo.gamma'?"),
        ("trainig.seed=1", "unknown key 'trainig': did you mean 'training'?"),
        ("training.seed=abc", "training.seed: expected an integer, got 'abc' (text)"),
        ("training.num_rollouts=true", "training.num_rollouts: expected an integer, got true (true or false)"),
        ("sft.epochs=[3]", "sft.epochs: expected an integer, got a list ([3])"),
        ("training.seed=null", "training.seed: expected an integer, got null"),
        ("model.dtype=int8", "model.dtype: expected one of float32, bfloat16"),
        ("ppo.gamma=2", "ppo.gamma: expected a number in [0, 1], got 2"),
        ("environment.reward_config.step_penalty=0.1", "step_penalty: expected a number <= 0"),
        ("algorithm=ppoo", "algorithm: expected one of ppo, grpo"),
        ("environment.name=nowhere", "environment.name: expected one of"),
        ("environment.split=test", "split: expected one of train, valid_seen, valid_unseen, got 'test'"),
        ("evaluation.split=test", "split: expected one of"),
        ("environment.options={levle: 1}", "environment.options: expected options of household, got 'levle'"),
        ("environment.options={level: 9}", "environment.options.level: expected 1, 2 or 3, got 9"),
        ("environment.options={receptacles: many}", "environment.options.receptacles: expected a count or [low, high]"),
        ("environment.options={task_types: 3}", "environment.options.task_types: expected a list, got 3"),
        ("environment.max_steps=70000", "environment.max_steps: expected at most 65535, got 70000"),
        ("rollout.engine=none", "rollout.engine: expected one of"),
        ("rollout.temperature=-1", "rollout.temperature: expected a number >= 0"),
        ("evaluation.tasks=100000", "panel.limit: expected 1 to 4"),
        ("ppo.value_clip=.nan", "ppo.value_clip: expected a finite number, got nan"),
        ("training.learning_rate=.inf", "training.learning_rate: expected a finite number, got inf"),
        ("sft.weight_decay=.nan", "sft.weight_decay: expected a finite number, got nan"),
        (
            "curriculum={levels: [1, 2], success: 1.5}",
            "curriculum.success: expected null or a share in (0, 1], got 1.5",
        ),
        ("evaluation.temperature=.nan", "evaluation.temperature: expected a finite number, got nan"),
        ("rollout.oversubscription=.inf", "rollout.oversubscription: expected a finite number, got inf"),
        ("training.max_seconds=.nan", "training.max_seconds: expected a finite number, got nan"),
        ("training.seed=-1", "training.seed: expected an integer in [0, 2^63), got -1"),
        ("training.save_trajectories=-1", "training.save_trajectories: expected an integer >= 0, got -1"),
        ("evaluation.freq=0", "evaluation.freq: expected null or an integer >= 1, got 0"),
        ("ppo.norm_length=0", "ppo.norm_length: expected null or a number above 0, got 0"),
        ("environment.options={receptacles: x}", "receptacles: expected a count or [low, high] within 1 … 255"),
        ("environment.options={receptacles: [1, 2, 3]}", "receptacles: expected a count or [low, high]"),
        ("environment.options={objects: [true, 2]}", "objects: expected a count or [low, high] within 1 … 255"),
        ("not-an-override", "override: expected dotted.key=value, got 'not-an-override'"),
    ],
)
def test_config(capsys, policy, out, command, override, message):
    refused(capsys, words(command, policy, out, override), message, out)


@pytest.mark.parametrize("command", ["ppo", "sft"])
def test_config_file(capsys, policy, out, tmp_path, command):
    file = tmp_path / "c.yaml"
    file.write_text("training: {seed: 1\n")
    refused(capsys, [command, "--config", file, f"training.output_dir={out}"], "is not valid YAML in line", out)
    for text, message in (
        ("null: 2\n", "holds what no config can"),
        ("training: {output_dir: '${a'}\n", "holds what no config can"),
        ("training: 3\n", "training: expected a mapping of keys, got 3 (an integer)"),
        ("training: [1, 2]\n", "training: expected a mapping of keys, got a list ([1, 2])"),
    ):
        file.write_text(text)
        refused(capsys, [command, "--config", file, f"training.output_dir={out}"], message, out)
    file.write_text("- a\n")
    refused(capsys, [command, "--config", file, f"training.output_dir={out}"], "to hold a mapping of keys", out)
    refused(capsys, [command, "--config", tmp_path / "none.yaml"], "--config: expected a YAML file", out)


@pytest.mark.parametrize("command", ["ppo", "sft"])
def test_model_folder(capsys, policy, out, tmp_path, command):
    refused(capsys, words(command, "./missing", out), "found no folder at './missing'", out)
    refused(capsys, words(command, '""', out), "model.path: expected a model folder or hub name, got none", out)
    refused(capsys, words(command, tmp_path, out), "which holds no config.json", out)


def damaged(change):
    """A model folder after `change` of its config.json as a dictionary."""

    def apply(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(change(json.loads(file.read_text()))))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged(lambda values: []), "model: cannot load a tokenizer"),
        (damaged(lambda values: {**values, "hidden_size": 32}), "[100, 16] instead of [100, 32] for"),
        (damaged(lambda values: {**values, "hidden_size": "x"}), "expected int, got str"),
        (damaged(lambda values: {**values, "hidden_size": -16}), "model: cannot load a"),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "model: cannot load a tokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "model: cannot load a tokenizer"),
        (lambda folder: os.truncate(folder / "model.safetensors", 900), "model: cannot load a causal language model"),
    ],
)
def test_damaged_model_folder(capsys, policy, out, tmp_path, damage, message):
    copy = shutil.copytree(policy, tmp_path / "copy")
    damage(copy)
    refused(capsys, words("ppo", copy, out), message, out)
    refused(capsys, ["eval", "household", "--model_path", copy, "--limit", "2", "--output_dir", out], message, out)


@pytest.mark.parametrize("command", ["ppo", "sft"])
def test_tokenizer_without_an_end_token(capsys, policy, out, tmp_path, command):
    copy = shutil.copytree(policy, tmp_path / "copy")
    file = copy / "tokenizer_config.json"
    values = json.loads(file.read_text())
    del values["eos_token"]
    file.write_text(json.dumps(values))
    refused(capsys, words(command, copy, out), "names no end-of-sequence token (eos_token)", out)


def test_demonstrations_that_come_to_nothing(capsys, policy, out):
    """No expert solves a task in one step: the data set is empty."""
    words_ = words("sft", policy, out, "environment.max_steps=1")
    refused(capsys, words_, "data.demonstrations: expected at least one episode that the expert wins within 1 step")
    assert not (out / "model").exists() and not (out / "eval.json").exists()


def test_batch_larger_than_what_is_collected(capsys, policy, out):
    refused(capsys, words("ppo", policy, out, "ppo.batch_size=64"), "ppo.batch_size: expected at most", out)


@pytest.mark.parametrize(("command", "key"), [("ppo", "ppo"), ("sft", "sft")])
def test_micro_batches_must_divide(capsys, policy, out, command, key):
    more = [f"{key}.batch_size=4", "training.gradient_accumulation_steps=3", "environment.max_steps=30"]
    more += ["data.demonstrations=6", "training.num_rollouts=8"]
    refused(capsys, words(command, policy, out, *more), "gradient_accumulation_steps")
    assert not (out / "model").exists()


@pytest.mark.parametrize("command", ["ppo", "sft"])
def test_a_place_that_cannot_be_written_to(capsys, policy, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    refused(capsys, words(command, policy, tmp_path / "file"), "expected a folder that can be written to")
    refused(capsys, words(command, policy, tmp_path / "file" / "below"), "expected a folder that can be written to")
    assert (tmp_path / "file").read_text() == "mine"
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o555)
        refused(capsys, words(command, policy, tmp_path / "closed" / "x"), "Permission denied")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["household", "--model_path", "./missing"], "found no folder at './missing'"),
        (["nowhere"], "environment.name: expected one of"),
        (["household", "--split", "test"], "split: expected one of"),
        (["household", "--limit", "0"], "panel.limit: expected 1 to"),
        (["household", "--temperature", "-1"], "--temperature: expected a number >= 0"),
        (["household", "--baseline", "./missing"], "found no folder at './missing'"),
        (["household", "--output_dir", "/dev/null/x"], "expected a folder that can be written to"),
        (["household", "agent.style=prose"], "agent.style: expected one of react, tags, act"),
        (["household", "evaluation.freq=3"], "expected evaluation.split, tasks or temperature, got evaluation.freq"),
        (["household", "evaluation.tasks=0"], "panel.limit: expected 1 to"),
        (["household", "evaluation.split=test"], "split: expected one of"),
        (
            ["household", "ppo.gamma=0.5"],
            "expected overrides of agent, endpoint, environment, evaluation, model, rollou",
        ),
        (["household", "training.seed=3"], "got 'training'; the flags --seed and --output_dir are there"),
    ],
)
def test_eval(capsys, policy, out, more, message):
    model = [] if "--model_path" in more else ["--model_path", policy]
    place = [] if "--output_dir" in more else ["--output_dir", out]
    refused(capsys, ["eval", *more, *model, *place], message, out)


def test_eval_of_a_run_whose_config_cannot_be_read(capsys, policy, out, tmp_path):
    """The model would play with another prompt than it was trained with."""
    run = tmp_path / "run"
    shutil.copytree(policy, run / "model")
    (run / "metrics.jsonl").write_text("")
    more = ["--limit", "2", "--output_dir", out, "environment.max_steps=2", "environment.options={num_valid: 4}"]
    for damage in ("", "{", "\xff", "[" * 100_000):
        (run / "config.json").write_text(damage, encoding="latin-1")
        for model in (run / "model", f"{run}/model/"):
            said = refused(capsys, ["eval", "household", "--model_path", model, *more], "config.json", out)
            assert "cannot be read: it is no JSON" in said and "--config" in said
    (run / "config.json").unlink()  # of a model that was taken elsewhere: the defaults, or what is said
    assert cli.main(["eval", "household", "--model_path", str(run / "model"), *map(str, more)]) == 0


def test_eval_without_a_model(capsys, out):
    refused(capsys, ["eval", "household", "--output_dir", out], "model.path: expected a model folder", out)


def test_what_would_have_run_without_a_mistake(capsys, policy, out, tmp_path):
    """The runs that the refusals above are cut from do go through, and eval reads what they leave."""
    assert cli.main(words("ppo", policy, out)) == 0
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "versions.json", "metrics.jsonl", "eval.json", "model"} <= names
    assert not any("partial" in name or name.startswith(".") for name in names)
    shown = capsys.readouterr()
    assert "success" in shown.out and str(out / "model") in shown.out.replace("\n", "")
    done = cli.main([
        "eval", "household", "--model_path", str(out / "model"), "--baseline", str(policy), "--limit", "3",
        "--output_dir", str(tmp_path / "eval"),
    ])  # fmt: skip
    assert done == 0
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {"eval.json", "eval_baseline.json"}
    report = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert len(report["tasks"]) == 3 and report["split"] == "valid_unseen" and report["suite"] == "household"
    assert "difference" in capsys.readouterr().out
    more = ["evaluation.tasks=2", "evaluation.split=valid_seen", "evaluation.temperature=0.5", "--limit", "3"]
    assert cli.main(["eval", "household", "--model_path", str(out / "model"), *more, "--output_dir", str(out)]) == 0
    report = json.loads((out / "eval.json").read_text())
    assert (len(report["tasks"]), report["split"], report["settings"]["temperature"]) == (2, "valid_seen", 0.5)
    # The run's own config says 2 tasks of valid_seen for its checks: without an override that does not count.
    assert cli.main(["eval", "household", "--model_path", str(out / "model"), "--output_dir", str(out)]) == 0
    assert json.loads((out / "eval.json").read_text())["split"] == "valid_unseen"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--port", "-1"], "--port: expected an integer in [0, 65535], got -1"),
        (["--port", "99999"], "--port: expected an integer in [0, 65535], got 99999"),
        (["--host", ""], "--host: expected an address of this machine, got '', which names none"),
        (["--host", "no such host"], "--host: expected an address of this machine, got 'no such host'"),
        (["--host", "192.0.2.1"], "--host: expected an address of this machine, got '192.0.2.1'"),  # for documents only
    ],
)
def test_serve_where_nobody_can_listen(capsys, more, message):
    """Before the model is even looked for."""
    refused(capsys, ["serve", "./missing", *more], message)


def test_serve_on_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"--port: expected a free port of 127.0.0.1, got {port} (Address already in use)"
        refused(capsys, ["serve", "./missing", "--port", port], message)
    refused(capsys, ["serve", "./missing", "--port", port], "found no folder at './missing'")


@pytest.mark.parametrize("op", ["gae", "household", "data", "search"])
def test_bench(capsys, tmp_path, op):
    see = f"(see manus-fast bench {op} --help)"
    refused(capsys, ["bench", op, "--nope"], f"unrecognized arguments: --nope {see}")
    file = tmp_path / "none" / "x.json"
    message = f"--json: expected a file in a folder that exists, got {str(file)!r} {see}"
    refused(capsys, ["bench", op, "--json", file], message, file.parent)


@pytest.mark.parametrize(
    "words",
    [
        ["search", "--draw"],
        ["search", "--preferences"],
        ["data", "stats", "x.jsonl", "--plot"],
        ["data", "collect", "--out"],
        ["data", "pairs", "x.jsonl", "--out"],
        ["env", "diff", "--output"],
    ],
)
def test_output_files_lie_in_folders_that_exist(capsys, tmp_path, words):
    file = tmp_path / "none" / "x.svg"
    message = f"{words[-1]}: expected a file in a folder that exists, got {str(file)!r}"
    refused(capsys, [*words, file], message, file.parent)
    refused(capsys, [*words, tmp_path], f"{words[-1]}: expected a file in a folder that exists, got {str(tmp_path)!r}")


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["eval", "household", "--model_path"], "--model_path"),
        (["ppo", "--config"], "--config"),
        (["serve"], "model"),
        (["data", "stats"], "DATA"),
        (["compare", "./missing"], "B"),
        (["ppo", "--model_path", "./missing", "--output_dir"], "training.output_dir"),
        (["data", "build", "x.jsonl", "--output_dir"], "--output_dir"),
        (["search", "--draw"], "--draw"),
    ],
)
def test_paths_that_no_file_can_have(capsys, words, name):
    said = refused(capsys, [*words, LONG], f"{name}: expected a path, got 'xxx")
    assert "too long a name (5000)" in said and len(said) < 300
    refused(capsys, [*words, "a\0b"], "expected text without NUL bytes, got 'a\\x00b'")


@pytest.mark.parametrize("override", ['model.path="a\\0b"', 'training.output_dir="a\\0b"', 'data.name="a\\0b"'])
def test_a_nul_byte_that_a_config_spells_out(capsys, policy, out, override):
    name = override.partition("=")[0].replace("model.path", "model")
    message = f"{name}: expected a path, got 'a\\x00b', with a character that no path holds"
    refused(capsys, words("sft", policy, out, override), message, out)


@pytest.mark.parametrize("command", ["sft", "ppo", "dpo", "reward-model"])
def test_no_empty_folder_is_left(capsys, policy, tmp_path, command):
    """Nor those above it that the command made, nor the lock; one that was there stays."""
    junk = tmp_path / "junk.jsonl"
    junk.write_text("{\n")
    mistakes = ["model.path=./missing"]
    if command != "ppo":
        mistakes += [f"data.name={junk}", f"data.name={tmp_path}/none.jsonl"]
    for mistake in mistakes:
        refused(capsys, words(command, policy, tmp_path / "runs" / "a", mistake), ": expected", tmp_path / "runs")
    (tmp_path / "mine").mkdir()
    refused(capsys, words(command, policy, tmp_path / "mine" / "a", mistakes[0]), "found no folder")
    refused(capsys, words(command, policy, tmp_path / "mine", mistakes[0]), "found no folder")
    assert list((tmp_path / "mine").iterdir()) == []


def test_distill_leaves_no_empty_folder(capsys, out, monkeypatch):
    for key in ("OPENAI_API_KEY", "DEEPSEEK_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    refused(capsys, ["data", "distill", "household", "--model_path", "gpt-4o", "--output_dir", out], "gpt-4o", out)


def test_why_the_rows_of_a_dataset_were_skipped_is_in_the_sentence(capsys, policy, out, tmp_path):
    (tmp_path / "junk.jsonl").write_text('{\n{"a": 1}\n')
    more = f"data.name={tmp_path}/junk.jsonl"
    for command in ("sft", "dpo"):
        said = refused(capsys, words(command, policy, out, more), "to train on, got none in", out)
        assert "skipped: 1 (truncated JSON), 1 (another schema)" in said


def test_an_absent_hub_name_is_refused_at_once_and_alone(out):
    """In a process of its own, whose standard error is all that a person would see. Nobody listens at that hub."""
    code = "import sys; from manus_fast.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, "eval", "household", "--model_path", "some/absent", "--output_dir", str(out)]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == "" and not out.exists()
    assert done.stderr.count("\n") == 1
    assert "manus-fast: model: expected a model folder or a hub name, got 'some/absent'" in done.stderr
    assert "the hub cannot be asked" in done.stderr
