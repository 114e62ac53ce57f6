"""The memory planner against numbers worked out by hand, against a real model, and through the command line."""

import json

import pytest
import torch
from learning import random_rows, tiny_model

from manus_fast import cli
from manus_fast.data.packing import pack
from manus_fast.learn.policy import Policy
from manus_fast.modeling.lora import LoRAConfig
from manus_fast.plan import GIB, SHARE, Load, Remedy, Shape, logits_avoided, parts, remedies

# Qwen2.5-1.5B: 28 layers of 2 * 1536² + 2 * 1536 * 256 (attention) + 1536 + 2 * 256 (biases) + 3 * 1536 * 8960 (MLP)
# + 2 * 1536 (norms) = 46,797,824, an embedding of 151936 * 1536, a last norm: 1,543,714,304, as its model card says.
QWEN = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
# A toy: layers of 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16 + 2 * 8 = 592 weights; 10 * 8 + 2 * 592 + 8 = 1,272.
TOY = Shape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocabulary=10)
P = 1272


def test_parameters_of_known_models():
    shape = Shape.of(QWEN)
    assert shape.layer_parameters == 46_797_824 and shape.parameters == 1_543_714_304
    assert TOY.parameters == P
    smollm2 = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    assert Shape.of(smollm2).parameters == 134_515_008
    assert Shape.of({"text_config": smollm2}).parameters == 134_515_008
    untied = Shape.of({**smollm2, "tie_word_embeddings": False})
    assert untied.parameters == 134_515_008 + 49152 * 576


def test_parts_by_hand_in_bfloat16():
    # A layer keeps for each token: 2 norms * 8 * (4 + 2 + 2) = 128; q, out 2 * 8 * 2 and k, v 2 * 4 * 2 and log-sum-exp
    # 2 * 4 = 56; 4 * 16 * 2 = 128: 312 bytes. The cache: 3 slots * 64 (33 rounded up) * 2 layers * 2 * 4 * 2 bytes.
    load = Load(dtype="bfloat16", tokens=5, slots=3, length=33)
    assert parts(TOY, load) == {
        "weights": 2 * P,
        "gradients": 4 * P + 2 * 80,
        "optimizer": 12 * P,
        "rollout_copy": 0,
        "exchange": 0,
        "activations": 5 * 2 * 312,
        "kv_cache": 3 * 64 * 2 * 2 * 4 * 2,
    }


def test_parts_by_hand_in_float32_with_a_critic_and_a_reference():
    # A separate critic has the trunk's 1,272 weights (the embedding is tied) and a head of 8 + 1.
    load = Load(dtype="float32", tokens=5, slots=1, length=32, critic="separate", reference=True)
    found = parts(TOY, load)
    assert found["weights"] == 4 * (2 * P + 9) + 4 * P
    assert found["gradients"] == 4 * (2 * P + 9) and found["optimizer"] == 8 * (2 * P + 9)
    # 2 * 8 * 12 (norms) + 4 * (16 + 8) + 8 (attention) + 4 * 64 (MLP) = 552, in two trunks of two layers.
    assert found["activations"] == 5 * 2 * 2 * 552
    kept = parts(TOY, Load(dtype="float32", tokens=5, slots=1, length=32, gradient_checkpointing=True))
    assert kept["activations"] == 5 * (2 * 8 * 4 + 552)
    shared = parts(TOY, Load(dtype="float32", tokens=5, slots=1, length=32, critic="shared"))
    assert shared["optimizer"] == 8 * (P + 9)


def test_adapters_train_in_the_weights_place():
    # Rank 3: 2 layers * 3 * (queries 8 + 8, keys and values 8 + 4 each, out 8 + 8, three of 8 + 16) = 768.
    assert TOY.adapter_parameters(3) == 768 and TOY.adapter_parameters(3, ["q_proj", "v_proj"]) == 2 * 3 * (16 + 12)
    load = Load(dtype="bfloat16", tokens=5, slots=1, length=32, adapters=768, reference=True)
    found = parts(TOY, load)
    assert found["weights"] == 2 * (P + 768)  # no reference besides
    assert found["gradients"] == 4 * 768 and found["optimizer"] == 12 * 768
    model = LoRAConfig(3).adapt(tiny_model(tied=False))
    shape = Shape.of({**model.config.to_dict(), "tie_word_embeddings": False})
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.adapter_parameters(3) == trained


def test_ranks_divide_what_the_stage_says():
    whole = parts(TOY, Load(ranks=4))
    assert whole["exchange"] == 4 * P and whole["optimizer"] == 12 * P
    one, two, three = (parts(TOY, Load(ranks=4, zero_stage=stage)) for stage in (1, 2, 3))
    assert one["optimizer"] == two["optimizer"] == three["optimizer"] == 3 * P
    assert one["gradients"] == 5 * P + 160 and two["gradients"] == three["gradients"] == P + 160
    assert one["weights"] == two["weights"] == three["weights"] == 2 * P  # the toy has but two layers
    assert one["exchange"] == 0 and three["rollout_copy"] == 2 * P
    away = parts(TOY, Load(ranks=4, zero_stage=3, offload=True))
    assert away["optimizer"] == 0 and away["gradients"] == 160
    exact = parts(TOY, Load(dtype="float32", ranks=4, zero_stage=1))
    assert exact["optimizer"] == 12 * P // 4  # the masters are no longer the weights that compute
    shape = Shape.of(QWEN)
    three = parts(shape, Load(ranks=4, zero_stage=3))
    assert three["weights"] == 2 * (151936 * 1536 + 1536 + 2 * 46_797_824)


def test_logits_avoided():
    assert logits_avoided(TOY, Load(dtype="bfloat16", tokens=7)) == 7 * 10 * (2 + 4 + 4)
    # 8,192 tokens of Qwen's vocabulary: 8192 * 151936 * 10 = 11.6 GiB
    assert logits_avoided(Shape.of(QWEN), Load(tokens=8192)) / GIB == pytest.approx(11.59, abs=0.01)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_activations_of_a_real_layer(dtype, width):
    """Bytes that autograd saves for a layer of a model, weights not counted, against the estimate. On a CPU rows attend
    one by one, and their outputs are kept once more when they are joined."""

    def kept(layers):
        policy = Policy(tiny_model(layers=layers))
        policy.cast(dtype)
        weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        storages = {}

        def save(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            policy.score(packed)
        return sum(size for size, _ in storages.values())

    packed = pack(random_rows(40, longest=60))
    model = tiny_model()
    shape = Shape.of(model.config.to_dict())
    again = width * shape.heads * shape.head_dim
    measured = (kept(3) - kept(1)) / 2 / packed.tokens - again
    assert shape.layer_activations(width) == pytest.approx(measured, rel=0.01)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_remedies_are_made_until_it_fits():
    shape, load = Shape.of(QWEN), Load(dtype="float32", tokens=32768, slots=64, length=4096)
    before = sum(parts(shape, load).values())
    found = remedies(shape, load, 80 * GIB)
    assert found[0] == Remedy("model.dtype: bfloat16", found[0].saves)
    assert found[1].change == "model.gradient_checkpointing: true"
    assert before - sum(remedy.saves for remedy in found) <= SHARE * 80 * GIB
    assert all(remedy.saves > 0 for remedy in found)
    assert remedies(shape, load, 4096 * GIB) == []
    # 18 bytes a weight do not fit 24 GiB, whatever the micro-batch: ranks have to divide them.
    small = remedies(shape, load, 24 * GIB)
    assert any(remedy.change.startswith("--gpus") for remedy in small)
    assert remedies(shape, load, GIB) is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"n_embd": 8, "model_type": "gpt2"}, r"got no hidden_size \('gpt2'\)"),
        ({**QWEN, "num_experts": 8}, r"a mixture of 8 experts"),
    ],
)
def test_models_that_it_does_not_know(config, text):
    with pytest.raises(ValueError, match=text):
        Shape.of(config)


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, {"zero_stage": 4}, {"tokens": 0}, {"ranks": 0}])
def test_loads_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Load(**wrong)


def test_info_tells_what_a_config_takes(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    line = [
        "info",
        "--config",
        "ppo_household",
        "--model_path",
        str(tmp_path),
        "model.dtype=bfloat16",
        "--memory",
        "80",
    ]
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # 32 rows of 4,096 tokens in one micro-batch, an entropy bonus, a shared critic, no reference.
    assert found["tokens"] == 32 * 4096 and found["parameters"] == 1_543_714_304
    assert found["parts"]["optimizer"] == 12 * (1_543_714_304 + 1537) and not found["fits"]
    assert cli.main(line) == 0
    told = capsys.readouterr().out
    assert "does not fit 80.00 GiB" in told and "model.gradient_checkpointing: true" in told
    assert cli.main([*line, "ppo.max_tokens=8192", "model.gradient_checkpointing=true"]) == 0
    assert "8,192 tokens a micro-batch, on a GPU: fits 80.00 GiB" in capsys.readouterr().out
    assert cli.main([*line, "--for", "dance"]) == 2
    assert cli.main(["info", "ppo.gamma=1"]) == 2
