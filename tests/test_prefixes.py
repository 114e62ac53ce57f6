"""Rows with common beginnings: their tree by hand, and that computing it once changes neither scores nor gradients."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import VOCABULARY, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import pack
from manus_fast.data.prefixes import PrefixTree, common_length, prefix_nodes, tree_micro_batches
from manus_fast.learn.advantages import Episodes
from manus_fast.learn.backend import SingleProcessBackend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.minibatch import mini_batches, steps_per_epoch
from manus_fast.learn.policy import Policy
from manus_fast.learn.sft import SFTConfig, train_sft
from manus_fast.learn.update import PolicyGradientUpdate
from manus_fast.modeling.attention import packed_hidden, planned_hidden, use_packed_attention
from manus_fast.modeling.flops import forward_flops
from manus_fast.modeling.tree_attention import TreePlan


def row(ids, trained=(), episode=0, group=0):
    """A row that trains on the positions `trained`, the last of which is rewarded."""
    length = len(ids)
    mask = np.isin(np.arange(length), trained)
    reward = np.zeros(length, np.float32)
    if mask.any():
        reward[np.flatnonzero(mask)[-1]] = 1.0 + 0.1 * episode
    log_prob = np.where(mask, -3.0, 0.0).astype(np.float32)
    turn = np.where(mask, 0, -1).astype(np.int32)
    return Row(np.asarray(ids, np.int64), mask, turn, log_prob, reward, episode, True, group)


def branching_rows(seed, count=9, turns=3):
    """Rows of `turns` turns that branch at random; every third row of a group is trained on its last turn alone."""
    rng = np.random.default_rng(seed)
    pieces = rng.integers(0, VOCABULARY, (turns, 3, 8))
    rows = []
    for number in range(count):
        ids, mask = rng.integers(0, VOCABULARY, 1).tolist() if number == count - 1 else [5], [False]
        for turn in range(turns):
            branch = pieces[turn, rng.integers(0, 3)]
            asked, said = int(rng.integers(2, 4)), int(rng.integers(2, 5))
            ids += branch[: asked + said].tolist()
            mask += [False] * asked + [turn == turns - 1 or number % 3 > 0] * said
        rows.append(row(ids, np.flatnonzero(mask), number, number // 3))
    return rows


HAND = [[1, 2, 4, 5], [1, 2, 3], [7], [1, 2, 3, 6], [1, 2, 3]]


def test_nodes_by_hand():
    """The tree 1-2-(3-6, 4-5) beside 7, numbered depth first: 1 2 3 6 4 5 7."""
    nodes = prefix_nodes([row(ids) for ids in HAND])
    assert nodes.tolist() == [0, 1, 4, 5, 0, 1, 2, 6, 0, 1, 2, 3, 0, 1, 2]
    assert common_length(np.asarray([1, 2]), np.asarray([1, 3])) == 1
    assert prefix_nodes([]).tolist() == []


def test_the_tree_by_hand():
    rows = [row(HAND[0], [2, 3]), row(HAND[1], [2]), row(HAND[2]), row(HAND[3], [2, 3]), row(HAND[4])]
    packed = pack(rows, share_prefixes=True)
    tree = PrefixTree.of(packed)
    assert tree.token_ids.tolist() == [1, 2, 3, 6, 4, 5, 7]
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 0]
    assert tree.segments == [2, 2, 2, 1]
    assert [path.tolist() for path in tree.paths] == [[0, 1], [0, 1, 2, 3], [0, 1, 4, 5], [6]]
    assert tree.pairs == 1 + 2 + 3 + 4 + 3 + 4 + 1
    assert torch.equal(tree.token_ids[tree.place], packed.token_ids)
    assert tree.ends.tolist() == [5, 2, 6, 3, 2]
    # 3 is trained by two rows and computed once; 4 and 3 are both predicted after 2.
    assert tree.trained.tolist() == [2, 3, 4, 5] and tree.before.tolist() == [1, 2, 1, 4]
    assert tree.again.tolist() == [2, 3, 0, 0, 1]
    # Any selection is a tree of its own.
    part = PrefixTree.of(packed.select([3, 4]))
    assert part.token_ids.tolist() == [1, 2, 3, 6] and part.segments == [4]
    with pytest.raises(ValueError, match="packed: expected rows packed with share_prefixes=True"):
        PrefixTree.of(pack(rows))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_sees_ancestors_and_nothing_else(kv_heads):
    """Against one dense mask of who descends from whom, in float64."""
    tree = PrefixTree.of(pack(branching_rows(3), share_prefixes=True))
    size = tree.tokens
    sees = torch.zeros(size, size, dtype=torch.bool)
    for own, path in zip(tree.segments, tree.paths, strict=True):
        for k in range(own):
            sees[path[len(path) - own + k], path[: len(path) - own + k + 1]] = True
    assert torch.equal(sees.sum(1), tree.position_ids + 1) and not sees.triu(1).any()
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, size, 4, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 1, kv_heads, size, 4, generator=generator, dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, enable_gqa=kv_heads == 1)
    got = TreePlan(tree.segments, tree.paths, query.device).attend(0, query, key, value, None)
    assert torch.allclose(got, wanted[0].transpose(0, 1), atol=1e-12)
    with pytest.raises(ValueError, match=f"segments: expected some that cover {size - 1} tokens"):
        TreePlan(tree.segments, tree.paths, query.device).attend(0, query[:, :, 1:], key, value, None)
    with pytest.raises(ValueError, match=r"paths\[0\]: expected at least the segment's 2 tokens, got 1"):
        TreePlan([2], [np.asarray([0])], query.device)


def scored(rows, share, critic, weights, select=None, checkpointing=False):
    """Everything that `score` gives, and the gradient of a weighted sum of it."""
    policy = Policy(tiny_model(), critic, gradient_checkpointing=checkpointing)
    with torch.no_grad():
        policy.value_head.weight.copy_(torch.linspace(-0.3, 0.3, 32)[None])
    packed = pack(rows, share)
    packed = packed if select is None else packed.select(select)
    output = policy.score(packed, entropy=True, value=True, temperature=0.7)
    parts = (output.log_prob, output.entropy, output.value)
    loss = sum((weights[k, : packed.tokens] * part).sum() for k, part in enumerate(parts))
    (loss + (weights[3, : packed.rows] * output.last_value).sum()).backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return output, gradients, policy.work


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("select", [None, [8, 1, 5, 0]])
def test_scores_and_gradients_are_those_of_rows_computed_one_by_one(critic, select):
    """A token of several rows has its weights summed: the loss is linear in what each row says of it."""
    rows = branching_rows(1)
    weights = torch.randn(4, sum(map(len, rows)), generator=torch.Generator().manual_seed(1))
    plain, wanted, _ = scored(rows, False, critic, weights, select)
    shared, got, work = scored(rows, True, critic, weights, select)
    for name in ("log_prob", "entropy", "value", "last_value"):
        assert torch.allclose(getattr(shared, name), getattr(plain, name), atol=1e-5), name
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(got[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max())), name
    assert work.tokens < work.rows_tokens


def test_gradient_checkpointing_computes_the_same_tree_again():
    rows = branching_rows(6)
    weights = torch.randn(4, sum(map(len, rows)), generator=torch.Generator().manual_seed(2))
    _, wanted, _ = scored(rows, True, "shared", weights)
    _, got, _ = scored(rows, True, "shared", weights, checkpointing=True)
    assert all(torch.equal(gradient, got[name]) for name, gradient in wanted.items())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_any_rows_keep_their_scores(sequences):
    """Few words, so that rows repeat, end inside one another, and branch everywhere."""
    rows = [row(ids, range(1, len(ids))) for ids in sequences]
    policy = Policy(tiny_model(layers=1))
    with torch.no_grad():
        plain = policy.score(pack(rows)).log_prob
        shared = policy.score(pack(rows, share_prefixes=True)).log_prob
    assert torch.allclose(shared, plain, atol=1e-5)
    distinct = {tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)}
    assert policy.work.tokens == len(distinct) and policy.work.rows_tokens == sum(map(len, sequences))


class Recorder(SingleProcessBackend):
    """Keeps the gradients of every step and changes no weight."""

    steps: list

    def step(self, lr, norm):
        self.steps.append({name: gradient.clone() for name, gradient in self.gradients().items()})
        self.discard()


def recorder(policy):
    backend = Recorder(policy, dtype="float32")
    backend.steps = []
    return backend


@pytest.mark.parametrize("advantage", ["turn", "grpo"])
def test_a_policy_gradient_step_is_the_same(advantage):
    rows, found = branching_rows(2), {}
    episodes = Episodes(
        reward=torch.tensor([float(r.reward.sum()) for r in rows]),
        group=torch.tensor([r.group for r in rows]),
        turn_reward=torch.tensor([float(r.reward.sum()) for r in rows]),
        turn_penalty=torch.zeros(len(rows)),
        turn_episode=torch.arange(len(rows)),
        anchor=torch.arange(len(rows)),
        cu_turns=torch.arange(len(rows) + 1, dtype=torch.int32),
    )
    for share in (False, True):
        config = PPOConfig(advantage=advantage, batch_size=9, ent_coef=0.1, share_prefixes=share)
        backend = recorder(Policy(tiny_model(), config.critic_kind))
        update = PolicyGradientUpdate(
            backend.policy, backend, config, gradient_accumulation_steps=3, temperature=0.8, correction="none"
        )
        stats = update.run(rows, copy.deepcopy(episodes), iteration=0, progress=0.0, learning_rate=1.0)
        found[share] = backend.steps[0], stats
    (wanted, plain), (got, stats) = found[False], found[True]
    for name, gradient in wanted.items():
        assert torch.allclose(got[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max())), name
    assert stats["policy/entropy"] == pytest.approx(plain["policy/entropy"], rel=1e-5)
    assert 0 < stats["update/tokens_shared"] < 1 < stats["update/flops_ratio"] and "update/flops_ratio" not in plain


def test_fine_tuning_takes_the_same_step_and_says_what_it_saved():
    rows, found = branching_rows(4), {}
    for share in (False, True):
        backend, logged = recorder(Policy(tiny_model())), []
        config = SFTConfig(epochs=1, batch_size=9, share_prefixes=share)
        train_sft(backend, rows, config, on_step=lambda _, stats, to=logged: to.append(stats))
        found[share] = backend.steps[0], logged[0]
    (wanted, plain), (got, stats) = found[False], found[True]
    for name, gradient in wanted.items():
        assert torch.allclose(got[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max())), name
    assert stats["sft/loss"] == pytest.approx(plain["sft/loss"], rel=1e-5)
    assert stats["sft/flops_ratio"] > 1 and "sft/flops_ratio" not in plain


def test_the_count_of_operations_by_hand():
    """One row of 4 tokens twice, 2 of them trained: everything is computed once, so the ratio is 2."""
    model = tiny_model(layers=1)
    # Per layer: q and o 32 x 32, k and v 32 x 16, three products of 32 x 48; 4 heads of 8; the lm head 37 x 32.
    matrices = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    one = 2 * matrices * 4 + 4 * 32 * (1 + 2 + 3 + 4) + 2 * 37 * 32 * 2
    assert forward_flops(model, tokens=4, pairs=10, trained=2) == one
    policy = Policy(model)
    with torch.no_grad():
        policy.score(pack([row([1, 2, 3, 4], [2, 3])] * 2, share_prefixes=True))
    assert (policy.work.flops, policy.work.rows_flops) == (one, 2 * one)
    assert policy.work.take() == {"tokens_shared": 0.5, "flops_ratio": 2.0} and policy.work.take() == {}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.none() | st.integers(1, 5), st.none() | st.integers(1, 60))
def test_micro_batches_keep_the_limits_with_shared_tokens_counted_once(seed, max_rows, max_tokens):
    rows = branching_rows(seed, count=12)
    packed = pack(rows, share_prefixes=True)
    packs = packed.micro_batches(max_rows=max_rows, max_tokens=max_tokens)
    assert sorted(np.concatenate(packs).tolist()) == list(range(12))
    for index in packs:
        assert max_rows is None or len(index) <= max_rows
        assert max_tokens is None or len(index) == 1 or len(np.unique(packed.select(index).node)) <= max_tokens
    with pytest.raises(ValueError, match="max_rows: expected None or an integer >= 1, got 0"):
        tree_micro_batches(packed.node, packed.lengths, max_rows=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 99))
def test_mini_batches_keep_groups_together(groups, size, seed):
    groups = np.asarray(groups)
    batches = mini_batches(len(groups), size, seed, 1, groups=groups)
    assert len(batches) == steps_per_epoch(len(groups), size) and min(map(len, batches)) >= 1
    order = np.concatenate(batches)
    assert sorted(order.tolist()) == list(range(len(groups)))
    runs = 1 + int((np.diff(groups[order]) != 0).sum())
    assert runs == len(set(groups.tolist()))  # never two stretches of one group


def test_rows_without_a_group_are_shuffled_one_by_one():
    rows = [row([1, 2], [1]) for _ in range(40)]
    for each in rows:
        each.group = None
    packed = pack(rows, share_prefixes=True)
    assert len(set(packed.groups.tolist())) == 40
    orders = [np.concatenate(mini_batches(40, 8, 0, epoch, groups=packed.groups)).tolist() for epoch in range(2)]
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    one = [np.concatenate(mini_batches(40, 8, 0, epoch, groups=np.zeros(40))).tolist() for epoch in range(2)]
    assert one[0] != one[1]  # the rows of a group, too, come in another order


def test_mini_batches_are_cut_between_groups():
    groups = np.repeat([3, 1, 2, 9], 8)
    for batch in mini_batches(32, 16, 0, groups=groups):
        assert len(batch) == 16 and len(set(groups[batch].tolist())) == 2
    assert len(mini_batches(20, 5, 0, groups=np.repeat([0, 1], [17, 3]))) == 4  # one group is larger than a mini-batch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_for_sequences_sees_the_same(dtype):
    """bfloat16 takes torch's variable-length kernel: against the float32 path of the CPU."""
    tree = PrefixTree.of(pack(branching_rows(3, count=40), share_prefixes=True))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, tree.tokens, 64, generator=generator)
    key, value = torch.randn(2, 1, 2, tree.tokens, 64, generator=generator)
    outcome = {}
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        inputs = [x.detach().clone().to(device, kind).requires_grad_(True) for x in (query, key, value)]
        output = TreePlan(tree.segments, tree.paths, torch.device(device)).attend(0, *inputs, None)
        output.float().square().sum().backward()
        outcome[device] = [output.detach().float().cpu(), *(x.grad.float().cpu() for x in inputs)]
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for wanted, got in zip(outcome["cpu"], outcome["cuda"], strict=True):
        assert (got - wanted).abs().max() <= bound * wanted.abs().max()


def decoded(share, device, dtype):
    """Hidden states at the tokens of some rows, and the gradient of a random weighting of them for every parameter."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes)).to(device, dtype)
    use_packed_attention(model)
    packed = pack(branching_rows(3, count=40), share_prefixes=True).to(device)
    if share:
        tree = PrefixTree.of(packed)
        plan = TreePlan(tree.segments, tree.paths, torch.device(device))
        hidden = planned_hidden(model, tree.token_ids, tree.position_ids, plan)[tree.place]
    else:
        longest = int(packed.lengths.max())
        hidden = packed_hidden(model, packed.token_ids, packed.position_ids, packed.cu_seqlens, longest)
    # Not their squares: the last norm fixes the sum of those, and what is left as a gradient is rounding.
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (hidden.float() * weights).mean().backward()
    gradients = [p.grad.float().cpu() for p in model.model.parameters()]
    return [hidden.detach().float().cpu(), *gradients]


@pytest.mark.parametrize(
    "device,dtype",
    [
        ("cpu", torch.float32),
        *(pytest.param("cuda", d, marks=pytest.mark.gpu) for d in (torch.float32, torch.bfloat16)),
    ],
)
def test_a_decoder_sees_the_same_in_a_tree_of_rows(device, dtype):
    """In bfloat16 shared tokens computed once are no worse than rows one by one, both against float32 on the CPU."""
    exact = decoded(False, "cpu", torch.float32)
    rows, tree = decoded(False, device, dtype), decoded(True, device, dtype)
    for wanted, one_by_one, shared in zip(exact, rows, tree, strict=True):
        size = wanted.abs().max()
        alone, together = ((got - wanted).abs().max() / size for got in (one_by_one, shared))
        assert together <= (3 * alone + 2e-2 if dtype == torch.bfloat16 else 1e-3), (alone, together)
