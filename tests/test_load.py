"""Opening a model folder: what loads, and that each thing that can be wrong with it is one sentence."""

import json
import logging
import shutil

import pytest
import torch

from manus_fast.modeling.load import attention, check_model_path, end_ids, find_model, load_model, load_tokenizer
from manus_fast.modeling.tiny import make_policy

SIZES = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 24, "max_length": 64}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("models") / "p", ["go to bed 1"], **SIZES)


@pytest.fixture
def copy(policy, tmp_path):
    return shutil.copytree(policy, tmp_path / "copy")


def edit(path, **changes):
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loads_in_the_dtype_asked_for(policy, dtype):
    model, tokenizer = load_model(policy, dtype)
    assert model.dtype == getattr(torch, dtype) and tokenizer.eos_token == "<|end|>"
    assert end_ids(model) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("path", ["no/such/folder", "./nowhere", "~/x", "/none", "a//b", ""])
def test_missing_folder(path):
    with pytest.raises(ValueError, match="model: expected a model folder or a hub name, found no folder at"):
        load_model(path)


def test_a_hub_name_is_left_to_the_hub():
    assert check_model_path("owner/model") == "owner/model" and check_model_path("gpt2") == "gpt2"


def test_the_hub_is_asked_once(monkeypatch):
    from huggingface_hub import HfApi

    asked = []
    monkeypatch.setattr(HfApi, "model_info", lambda self, name, timeout: asked.append((name, timeout <= 10)))
    assert find_model("owner/there") == find_model("owner/there") == "owner/there"
    assert asked == [("owner/there", True)]

    def gone(self, name, timeout):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(HfApi, "model_info", gone)
    with pytest.raises(ValueError, match=r"not in the cache, and the hub cannot be asked \(nobody there\)"):
        find_model("owner/away")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(ValueError, match="model: expected a model folder"):
        load_model(tmp_path / "f")


def test_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config.json"):
        load_model(tmp_path)


def test_tokenizer_without_eos(copy):
    edit(copy / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match=r"names no end-of-sequence token \(eos_token\)"):
        load_model(copy)


def test_missing_or_broken_tokenizer(copy):
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="model: cannot load a tokenizer from"):
        load_tokenizer(copy)


def test_missing_weights(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model: cannot load a causal language model from") as caught:
        load_model(copy)
    assert "\n" not in str(caught.value)


def test_cut_weights(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="model: cannot load a causal language model from"):
        load_model(copy)


def test_weights_that_lack_a_tensor(copy):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"got none for 1 of them \(model.norm.weight"):
        load_model(copy)


def test_unknown_model_type(copy):
    edit(copy / "config.json", model_type="nonesuch")
    with pytest.raises(ValueError, match="model: cannot load"):
        load_model(copy)


def test_more_tokens_than_embedding_rows(policy, copy):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens(["further"])
    tokenizer.save_pretrained(copy)
    with pytest.raises(ValueError, match="model: expected an embedding row for each of"):
        load_model(copy)


def test_pad_token_falls_back_to_the_end_token(copy):
    edit(copy / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(copy).pad_token == "<|end|>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, r"model.dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        ({"device": "gpu"}, "device: expected a device as torch names it"),
    ],
)
def test_bad_arguments(policy, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_model(policy, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(policy):
    with pytest.raises(ValueError, match="expected a usable CUDA device"):
        load_model(policy, device="cuda")


def test_flash_attention_without_its_package_is_one_sentence_and_sdpa(policy, monkeypatch, caplog):
    monkeypatch.setattr("manus_fast.modeling.load.importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert attention(True) == "sdpa"
    assert [record.getMessage() for record in caplog.records] == [
        "model.use_flash_attention_2 is set, but the package flash-attn is not installed: using SDPA."
    ]
    monkeypatch.setattr("manus_fast.modeling.load.importlib.util.find_spec", lambda name: object())
    assert attention(True) == "flash_attention_2" and attention(False) == "sdpa"
