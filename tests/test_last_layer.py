"""The last layer computes queries of the wanted tokens alone: the same hidden states, the same gradients."""

import pytest
import torch
from learning import VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.modeling import last_layer
from manus_fast.modeling.attention import PackedRows, planned_hidden, use_packed_attention

LENGTHS = [5, 1, 0, 17, 9]


def model():
    """With heads as wide as the CPU kernel takes."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    made = LlamaForCausalLM(config).float()
    use_packed_attention(made)
    return made


def rows():
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return torch.randint(0, VOCABULARY, (int(cu[-1]),)), positions, PackedRows(cu, max(LENGTHS))


def differentiated(net, hidden):
    net.zero_grad()
    (hidden * torch.linspace(-1, 1, hidden.shape[1])).square().sum().backward()
    return {name: w.grad.clone() for name, w in net.named_parameters() if w.grad is not None}


WANTED = {
    "some": ([3, 7, 8, 20, 31], [4, 5, 22, 31]),  # the two overlap
    "first of each row": ([0, 5, 6, 23], [0]),
    "one": ([12], [12]),
    "all": (list(range(32)), [31]),
}


@pytest.mark.parametrize("name", WANTED)
def test_hidden_states_and_gradients_are_those_of_the_whole_layer(name):
    net, (ids, positions, plan) = model(), rows()
    wanted = [torch.tensor(index) for index in WANTED[name]]
    whole = planned_hidden(net, ids, positions, plan)
    expected = [whole[index] for index in wanted]
    gradients = differentiated(net, torch.cat(expected))
    hidden, found = last_layer.hidden_at(net, ids, positions, plan, *wanted)
    got = [hidden[index] for index in found]
    assert (len(hidden) < len(ids)) == (name != "all")
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    others = differentiated(net, torch.cat(got))
    assert others.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=1e-4, atol=1e-5)
    assert not net.model.layers[-1]._forward_pre_hooks  # nothing is left behind


def test_no_token_wanted_computes_all_and_a_hooked_layer_is_left_alone():
    net, (ids, positions, plan) = model(), rows()
    hidden, (none,) = last_layer.hidden_at(net, ids, positions, plan, torch.tensor([], dtype=torch.int64))
    assert len(hidden) == len(ids) and not len(none)
    seen = []
    handle = net.model.layers[-1].register_forward_hook(lambda module, args, output: seen.append(len(output[0])))
    hidden, _ = last_layer.hidden_at(net, ids, positions, plan, torch.tensor([2]))
    handle.remove()
    assert len(hidden) == len(ids) and seen


def test_a_layer_that_fails_leaves_no_hook(monkeypatch):
    net, (ids, positions, plan) = model(), rows()

    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(last_layer, "packed_attention", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        last_layer.hidden_at(net, ids, positions, plan, torch.tensor([2]))
    assert not net.model.layers[-1]._forward_pre_hooks
