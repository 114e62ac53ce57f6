import copy
import functools

import pytest
import torch
from learning import VOCABULARY, random_rows, tiny_model

from manus_fast.data.packing import pack
from manus_fast.learn import policy as module
from manus_fast.learn.policy import Policy, Reference


def padded(model, rows, temperature=1.0):
    """Log-probabilities, entropies and hidden states [R, T, ...] by a plain forward pass over right-padded rows."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    seen = torch.zeros(len(rows), longest, dtype=torch.int64)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.from_numpy(row.token_ids)
        seen[r, : len(row)] = 1
    output = model(input_ids=ids, attention_mask=seen, output_hidden_states=True)
    log_probs = torch.log_softmax(output.logits / temperature, -1)
    picked = log_probs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)[:, :-1]
    return picked, entropy, output.hidden_states[-1]


@pytest.mark.parametrize(("tied", "temperature"), [(True, 1.0), (False, 0.7)])
def test_scores_equal_a_padded_forward_pass(tied, temperature):
    model = tiny_model(tied=tied)
    rows = random_rows(6)
    expected, entropies, hidden = padded(model, rows, temperature)
    policy = Policy(model, critic="shared")
    policy.value_head.weight.data.normal_(0.0, 0.3)
    policy.value_head.bias.data.fill_(0.1)
    packed = pack(rows)
    output = policy.score(packed, entropy=True, value=True, temperature=temperature)
    values = policy.value_head(hidden).squeeze(-1)
    for r, row in enumerate(rows):
        start = int(packed.cu_seqlens[r])
        for t in range(len(row)):
            got = [x[start + t].item() for x in (output.log_prob, output.entropy, output.value)]
            want = [0.0, 0.0, 0.0]
            if row.loss_mask[t]:
                want = [x[r, t - 1].item() for x in (expected, entropies, values)]
            assert got == pytest.approx(want, abs=2e-5)
        assert output.last_value[r].item() == pytest.approx(values[r, len(row) - 1].item(), abs=2e-5)


def test_stored_log_probs_are_reproduced_under_the_sampling_weights():
    """Sampling token by token with growing prefixes, then scoring the ids in one packed pass."""
    model = tiny_model()
    rows = random_rows(3)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    torch.manual_seed(0)
    for row in rows:
        for t in range(len(row)):
            if row.loss_mask[t]:
                logits = plain(input_ids=torch.from_numpy(row.token_ids[None, :t])).logits[0, -1]
                row.token_ids[t] = torch.multinomial(logits.softmax(-1), 1).item()
                row.log_prob[t] = logits.log_softmax(-1)[row.token_ids[t]].item()
    packed = pack(rows)
    gap = (Policy(model).score_all(packed).log_prob - packed.rollout_log_prob).abs().max()
    assert gap <= 1e-4


def test_rows_do_not_see_each_other():
    policy, rows = Policy(tiny_model()), random_rows(4)
    together = policy.score_all(pack(rows)).log_prob
    apart = torch.cat([policy.score_all(pack([row])).log_prob for row in rows])
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=0)


def test_only_trained_positions_reach_the_head(monkeypatch):
    widths = []

    def spy(hidden, weight, target, **options):
        widths.append((len(hidden), len(weight)))
        return module_linear(hidden, weight, target, **options)

    module_linear = module.linear_logprob
    monkeypatch.setattr(module, "linear_logprob", spy)
    packed = pack(random_rows(5))
    Policy(tiny_model()).score(packed)
    assert widths == [(packed.trainable_tokens, VOCABULARY)]


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_gradient_checkpointing_changes_nothing(critic):
    rows, gradients = random_rows(3), []
    for checkpointing in (False, True):
        policy = Policy(tiny_model().eval(), critic=critic, gradient_checkpointing=checkpointing)
        policy.value_head.weight.data.fill_(0.1)
        layer, calls = policy.model.model.layers[0].input_layernorm, []
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        output = policy.score(pack(rows), entropy=True, value=True)
        assert not policy.model.training and len(calls) == 1
        (output.log_prob.sum() + output.entropy.sum() + output.value.square().sum()).backward()
        assert len(calls) == 1 + checkpointing, "computed again in the backward pass, and only then"
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4)


def test_layers_share_one_compiled_code(monkeypatch):
    """Compiled layers give the same scores and gradients for every number of tokens, and are traced once for all."""
    compiled = functools.partial(module.attention.compile_layers, backend="eager")
    monkeypatch.setattr(module.attention, "compile_layers", compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = torch._dynamo.utils.counters["stats"]
    plain, fast = Policy(tiny_model(layers=4)), Policy(tiny_model(layers=4), compile_layers=True)
    seen = []
    for number in (3, 5, 8):
        packed = pack(random_rows(number, seed=number))
        results = []
        for policy in (plain, fast):
            policy.score(packed).log_prob.sum().backward()
            results.append([policy.score(packed).log_prob.detach(), *(p.grad for p in policy.parameters())])
            policy.zero_grad()
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
        seen.append(graphs["unique_graphs"])
    assert 0 < seen[0] <= 6 and seen[-1] == seen[0]
    reference = Reference(fast)
    torch.testing.assert_close(reference.log_prob(packed), results[0][0], atol=1e-5, rtol=1e-4)


def test_scoring_in_packs_equals_scoring_at_once():
    policy = Policy(tiny_model(), critic="shared")
    policy.value_head.weight.data.fill_(0.1)
    packed = pack(random_rows(9))
    whole = policy.score_all(packed, entropy=True, value=True)
    parts = policy.score_all(packed, entropy=True, value=True, max_rows=2, max_tokens=60)
    for name in ("log_prob", "entropy", "value", "last_value"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), atol=2e-5, rtol=0)


def test_a_fresh_critic_predicts_zero_and_a_separate_one_leaves_the_policy_alone():
    policy = Policy(tiny_model(), critic="separate")
    output = policy.score(pack(random_rows(3)), value=True)
    assert output.value.abs().max() == 0
    policy.value_head.weight.data.fill_(0.1)
    policy.score(pack(random_rows(3)), value=True).value.sum().backward()
    assert all(p.grad is None for p in policy.model.parameters())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.critic.parameters())


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_values_alone_are_those_that_come_with_the_scores(critic, monkeypatch):
    policy = Policy(tiny_model(), critic=critic)
    torch.nn.init.normal_(policy.value_head.weight)
    packed = pack(random_rows(6))
    both = policy.score_all(packed, value=True, max_rows=4)
    if critic == "separate":  # no pass through the policy
        monkeypatch.setattr(policy.model, "forward", None)
        monkeypatch.setattr(policy.model.base_model, "forward", None)
    alone = policy.score_all(packed, log_prob=False, value=True, max_rows=4)
    assert alone.log_prob is None and alone.entropy is None
    assert torch.equal(alone.value, both.value) and torch.equal(alone.last_value, both.last_value)
    for asked in ({"log_prob": False}, {"log_prob": False, "value": True, "entropy": True}):
        with pytest.raises(ValueError, match="log_prob: expected True"):
            policy.score(packed, **asked)


def test_rows_without_trainable_tokens_score_to_zero():
    rows = random_rows(2)
    for row in rows:
        row.loss_mask[:] = False
    output = Policy(tiny_model(), critic="shared").score(pack(rows), entropy=True, value=True)
    for x in (output.log_prob, output.entropy, output.value):
        assert x.abs().max() == 0


def test_value_function_for_search():
    policy = Policy(tiny_model(), critic="shared")
    policy.value_head.bias.data.fill_(0.25)
    values = policy.value_of()(random_rows(3))
    assert values.tolist() == [0.25, 0.25, 0.25] and values.dtype.name == "float32"


def test_reference_stays_while_the_policy_moves():
    policy, packed = Policy(tiny_model()), pack(random_rows(3))
    before = policy.score_all(packed).log_prob
    reference = Reference(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(reference.log_prob(packed, max_rows=1), before, atol=2e-5, rtol=0)
    assert (policy.score_all(packed).log_prob - before).abs().max() > 1e-3


def test_refusals():
    with pytest.raises(ValueError, match=r"ppo.critic: expected one of none, shared, separate, got 'twin'"):
        Policy(tiny_model(), critic="twin")
    with pytest.raises(ValueError, match=r"value: expected a policy with a critic"):
        Policy(tiny_model()).score(pack(random_rows(1)), value=True)
    with pytest.raises(ValueError, match=r"output embeddings"):
        Policy(tiny_model().base_model)
