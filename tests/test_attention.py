"""Packed attention against the same model run row by row with transformers' own attention."""

import copy

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from manus_fast.modeling import packed_hidden, use_packed_attention

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_mha": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Operations this small take longer in two threads than in one, most of all on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name):
    torch.manual_seed(3)
    return MODELS[name]()


def pack(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in lengths]
    ids = torch.cat(rows)
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return rows, ids, positions, cu_seqlens, max(lengths)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[1], [7, 1, 33, 2], [5, 0, 5]])
def test_equals_each_row_alone(name, lengths):
    model = make(name).eval()
    rows, *packed = pack(lengths)
    expected = torch.cat([model.base_model(row[None]).last_hidden_state[0] for row in rows if len(row)])
    use_packed_attention(model)
    use_packed_attention(model)
    torch.testing.assert_close(packed_hidden(model, *packed), expected, rtol=1e-4, atol=1e-5)


def test_gradients_equal_with_and_without_checkpointing():
    reference = make("llama").train()
    rows, *packed = pack([9, 4, 17])
    sum(reference.base_model(row[None]).last_hidden_state.square().sum() for row in rows).backward()
    for checkpointing in (False, True):
        model = make("llama").train()
        use_packed_attention(model)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        packed_hidden(model, *packed).square().sum().backward()
        for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            if q.grad is not None:  # the lm head took no part
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_rows_do_not_leak():
    model = make("llama")
    use_packed_attention(model)
    _, ids, *rest = pack([6, 8, 5])
    before = packed_hidden(model, ids, *rest)
    changed = ids.clone()
    changed[6:14] = (changed[6:14] + 1) % SIZES["vocab_size"]
    after = packed_hidden(model, changed, *rest)
    assert torch.equal(before[:6], after[:6]) and torch.equal(before[14:], after[14:])
    assert not torch.allclose(before[6:14], after[6:14])
    # causal: the last token of a row changes nothing before it
    changed = ids.clone()
    changed[13] = (changed[13] + 1) % SIZES["vocab_size"]
    assert torch.equal(packed_hidden(model, changed, *rest)[:13], before[:13])


def test_bare_decoder_is_accepted():
    model = make("llama")
    _, *packed = pack([3, 4])
    use_packed_attention(model)
    expected = packed_hidden(model, *packed)
    bare = copy.deepcopy(model.model)
    use_packed_attention(bare)
    assert torch.equal(packed_hidden(bare, *packed), expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
        lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    ],
)
def test_refuses_windows(build):
    with pytest.raises(ValueError, match="sliding"):
        use_packed_attention(build())


def test_refuses_other_calls():
    model = make("llama")
    use_packed_attention(model)
    _, ids, positions, cu_seqlens, longest = pack([3, 4])
    with pytest.raises(ValueError, match="attention_plan"):
        model(ids[None])
    with pytest.raises(ValueError, match="int32"):
        packed_hidden(model, ids, positions, cu_seqlens.long(), longest)
    with pytest.raises(ValueError, match="cover 7 tokens, got 6"):
        packed_hidden(model, ids, positions, torch.tensor([0, 3, 6], dtype=torch.int32), longest)
    with pytest.raises(ValueError, match="one shape"):
        packed_hidden(model, ids, positions[:-1], cu_seqlens, longest)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="dropout"):
        packed_hidden(model, ids, positions, cu_seqlens, longest)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_cuda_bf16_equals_rows_alone(name):
    model = make(name).to("cuda", torch.bfloat16)
    rows, *packed = pack([7, 129, 1, 64])
    expected = torch.cat([model.base_model(row[None].cuda()).last_hidden_state[0] for row in rows])
    use_packed_attention(model)
    got = packed_hidden(model, *(x.cuda() if torch.is_tensor(x) else x for x in packed))
    torch.testing.assert_close(got.float(), expected.float(), rtol=5e-2, atol=5e-2)
