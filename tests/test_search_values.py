"""A value model from trees: its targets, what it learns, and its file."""

import numpy as np
import pytest
import torch
from test_search_strategies import FORMAT, TOKENIZER, Dice, search
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.learn.search_values import fit_values, load_values, save_values, value_rows
from manus_fast.search.values import prompt_row


@pytest.fixture(scope="module")
def trees():
    options = {"strategy": "beam", "proposals": 30, "breadth": 9, "widen": False, "stop_on_success": False}
    return search(["RL", "RL"], engine=Dice((0.5, 0.5, 0.0)), discount=0.5, **options)[0]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(TOKENIZER), num_key_value_heads=1, eos_token_id=FORMAT.end_id, **shape)
    return LlamaForCausalLM(config).eval()


def test_each_node_has_one_target_the_best_return_from_there(trees):
    rows, targets = value_rows(trees)
    mask = np.concatenate([row.loss_mask for row in rows])
    inner = [node for tree in trees for node in tree.nodes if any(p.child for p in node.proposals)]
    assert mask.sum() == len(inner) == 6 and not targets[~mask].any()
    # Root, after L, after R of the vault RL at discount 1/2: solved by the second turn (1.99), or never (-0.01).
    assert sorted(targets[mask][:3].round(4)) == pytest.approx(sorted([-0.01 + 0.995, -0.01, 1.99]), abs=1e-4)


def test_the_fit_tells_good_situations_from_bad_and_leaves_the_policy_alone(trees, model, tmp_path):
    before = {name: p.clone() for name, p in model.named_parameters()}
    policy = fit_values(model, trees, epochs=150, learning_rate=3e-3, head_scale=1.0)
    assert all(torch.equal(before[name], p) and p.requires_grad for name, p in model.named_parameters())
    nodes = {"".join(n.proposal.action[5] for n in node.path): node for node in trees[0].nodes}
    good, bad = policy.value_of()([prompt_row(nodes["r"]), prompt_row(nodes["l"])])
    assert good == pytest.approx(1.99, abs=0.2) and bad == pytest.approx(-0.01, abs=0.2)
    save_values(policy, tmp_path)
    again = load_values(model, tmp_path).value_of()([prompt_row(nodes["r"])])
    assert again[0] == pytest.approx(good, abs=1e-6)
    options = {"strategy": "tot", "breadth": 1, "proposals": 9, "widen": False, "engine": Dice((0.5, 0.5, 0.0))}
    (led,), _ = search(["RL"], value="model", score=policy.value_of(), **options)
    assert led.played.success


def test_mistakes_are_told(trees, model, tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with value\.safetensors"):
        load_values(model, tmp_path / "nothing")
    with pytest.raises(ValueError, match="trees: expected at least one played turn"):
        fit_values(model, [])
    with pytest.raises(ValueError, match="epochs: expected an integer >= 1"):
        fit_values(model, trees, epochs=0)
