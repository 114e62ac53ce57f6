"""Generalised advantage estimation: hand-worked values, a naive loop, float64 on every backend, and its properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import COMPILERS

from manus_fast.ops import dispatch, gae, merge_stats, normalizer


def _params():
    here = "cuda" if torch.cuda.is_available() else "cpu"
    for backend in ("reference", "cpu", "triton", "cuda"):
        device = here if backend in ("triton", "cuda") else "cpu"
        marks = [pytest.mark.gpu] if backend == "cuda" or (backend == "triton" and here == "cuda") else []
        yield pytest.param((backend, device), id=backend, marks=marks)


@pytest.fixture(params=_params())
def on(request):
    """(backend, device); skips where the machine cannot run the backend, and says why."""
    backend, device = request.param
    if device == "cpu" and backend == "cuda":
        pytest.skip("no CUDA device")
    reason = dispatch.missing("gae", backend, device)
    if reason:
        pytest.skip(reason)
    with dispatch.forced(backend):
        yield request.param


def make(shape, *, seed=0, density=0.7, turns=True, cu_seqlens=None):
    """Random inputs; what must not be read (masked-out rewards and values) is NaN except for the reference's sake."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=g) < density
    out = {
        "rewards": torch.where(mask, torch.randn(shape, generator=g), 0.0),
        "values": torch.where(mask, torch.randn(shape, generator=g), torch.nan),
        "mask": mask,
    }
    rows = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    options = {"bootstrap": torch.randn(rows, generator=g)}
    if turns:
        options["turn_id"] = (torch.rand(shape, generator=g) < 0.1).cumsum(-1).int()
        options.update(token_gamma=0.99, token_lam=0.97)
    if cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32)
    return out, options


def spare_the_interpreter(on, tokens, programs=1):
    """Skips where Triton's interpreter would take seconds; the GPU runs the same case."""
    if on == ("triton", "cpu") and (tokens > 2500 or programs > 32):
        pytest.skip("slow in Triton's interpreter")


def spec(inputs, options, gamma, lam):
    def wide(d):
        return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in d.items()}

    with dispatch.forced("reference"):
        return gae(**wide(inputs), gamma=gamma, lam=lam, **wide(options))


def run(on, inputs, options, gamma, lam):
    def move(d):
        return {k: v.to(on[1]) if isinstance(v, torch.Tensor) else v for k, v in d.items()}

    return [x.cpu() for x in gae(**move(inputs), gamma=gamma, lam=lam, **move(options))]


def check(got, want):
    for name, a, b in zip(("advantages", "returns"), got, want, strict=False):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        worst = (a.double() - b).abs().max().item() if b.numel() else 0.0
        assert worst <= 4e-6 * scale, f"{name}: off by {worst:.2e} of {scale:.2e}"
    count, mean, m2 = got[2].tolist()
    assert count == want[2][0]
    assert mean == pytest.approx(want[2][1].item(), abs=2e-6 * max(1.0, want[0].abs().max().item() if count else 1.0))
    assert m2 == pytest.approx(want[2][2].item(), rel=1e-5, abs=1e-9)


def test_token_level_by_hand(on):
    # gamma .9, lam .5; the masked token neither decays nor contributes.
    # t3: d = 1 - .5 = .5. t1: d = 0 + .9*.5 - .2 = .25, A = .25 + .45*.5 = .475.
    # t0: d = .9*.2 - .1 = .08, A = .08 + .45*.475
    inputs = {
        "rewards": torch.tensor([[0.0, 0.0, 0.0, 1.0]]),
        "values": torch.tensor([[0.1, 0.2, 9.0, 0.5]]),
        "mask": torch.tensor([[True, True, False, True]]),
    }
    advantages, returns, stats = run(on, inputs, {}, 0.9, 0.5)
    assert advantages[0].tolist() == pytest.approx([0.29375, 0.475, 0.0, 0.5])
    assert returns[0].tolist() == pytest.approx([0.39375, 0.675, 0.0, 1.0])
    kept = np.array([0.29375, 0.475, 0.5])
    assert stats.tolist() == pytest.approx([3, kept.mean(), ((kept - kept.mean()) ** 2).sum()])


def test_turn_level_by_hand(on):
    # Two turns of two tokens, gamma .5, lam .8 a turn; inside a turn 1 and .5.
    # turn 2, last token: A = 2 - .4 = 1.6. first: d = 0 + .4 - .3 = .1, A = .1 + .5*1.6 = .9
    # turn 1, last: A = 1 + .5*.4 - .2 + .4*1.6 = 1.64. first: d = .2 - .1 = .1, A = .1 + .5*1.64 = .92
    inputs = {
        "rewards": torch.tensor([[0.0, 1.0, 0.0, 2.0]]),
        "values": torch.tensor([[0.1, 0.2, 0.3, 0.4]]),
        "mask": torch.ones(1, 4, dtype=torch.bool),
    }
    turn_id = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    advantages, _, _ = run(on, inputs, {"turn_id": turn_id, "token_lam": 0.5}, 0.5, 0.8)
    assert advantages[0].tolist() == pytest.approx([0.92, 1.64, 0.9, 1.6])


def test_turn_level_counts_rewards_inside_a_turn_once(on):
    # gamma = lam = 1 everywhere: A = rewards still to come - V, wherever they stand.
    inputs, options = make((3, 50))
    options.update(token_gamma=1.0, token_lam=1.0, bootstrap=torch.zeros(3))
    advantages, returns, _ = run(on, inputs, options, 1.0, 1.0)
    to_come = inputs["rewards"].double().flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns.double(), torch.where(inputs["mask"], to_come, 0.0), rtol=1e-5, atol=1e-5)
    assert not torch.isnan(advantages).any()


@pytest.mark.parametrize("turns", [False, True], ids=["token", "turn"])
@pytest.mark.parametrize(
    "shape",
    # The last four on a GPU: whole rows a block, a tile not full, rows as long as a tile, more tiles than blocks.
    [(1, 1), (3, 7), (2, 129), (5, 1025), (1, 5000), (0, 5), (4, 0), (40, 33), (9, 1000), (2, 4096), (450, 4096)],
    ids=str,
)
def test_padded_against_float64(on, shape, turns):
    spare_the_interpreter(on, shape[0] * shape[1], shape[0])
    if shape[0] * shape[1] > 2**20 and on[1] == "cpu":
        pytest.skip("a size for the GPU")
    inputs, options = make(shape, turns=turns)
    check(run(on, inputs, options, 0.97, 0.9), spec(inputs, options, 0.97, 0.9))


@pytest.mark.parametrize("turns", [False, True], ids=["token", "turn"])
@pytest.mark.parametrize(
    "cu_seqlens", [[0, 1], [0, 0, 3, 3, 10, 10], [0, 129, 1154, 1161, 6000], list(range(0, 600, 3))], ids=len
)
def test_packed_against_float64(on, cu_seqlens, turns):
    spare_the_interpreter(on, cu_seqlens[-1], len(cu_seqlens))
    inputs, options = make((cu_seqlens[-1],), turns=turns, cu_seqlens=cu_seqlens)
    check(run(on, inputs, options, 0.97, 0.9), spec(inputs, options, 0.97, 0.9))


@pytest.mark.parametrize("turns", [False, True], ids=["token", "turn"])
def test_packed_equals_padded(on, turns):
    inputs, options = make((6, 40), turns=turns)
    padded = run(on, inputs, options, 0.95, 0.9)
    flat = {k: v.reshape(-1) for k, v in inputs.items()}
    packed_options = {k: v.reshape(-1) if k == "turn_id" else v for k, v in options.items()}
    packed_options["cu_seqlens"] = torch.arange(0, 241, 40, dtype=torch.int32)
    packed = run(on, flat, packed_options, 0.95, 0.9)
    for a, b in zip(padded[:2], packed[:2], strict=True):
        torch.testing.assert_close(a.reshape(-1), b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("turns", [False, True], ids=["token", "turn"])
def test_arrays_that_allow_no_wide_loads(on, turns):
    inputs, options = make((8, 250), turns=turns)
    want = run(on, inputs, options, 0.95, 0.9)

    def shifted(x):  # the same numbers, one element after an aligned address
        return torch.cat([x.new_zeros(1), x.to(on[1]).reshape(-1)])[1:].view(x.shape)

    moved = {name: shifted(x.to(on[1])) for name, x in inputs.items()}
    if turns:
        options["turn_id"] = shifted(options["turn_id"].to(on[1]))
    for a, b in zip(run(on, moved, options, 0.95, 0.9), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_long_row_with_no_decay_keeps_its_digits(on):
    spare_the_interpreter(on, 20000)
    # 20,000 additions: a running float32 sum would be off by far more.
    inputs, options = make((1, 20000), turns=False, density=1.0)
    check(run(on, inputs, options, 1.0, 1.0), spec(inputs, options, 1.0, 1.0))


@pytest.mark.parametrize("density", [0.0, 0.001])
def test_masks_with_nothing_or_one_token(on, density):
    inputs, options = make((2, 300), density=density, seed=3)
    if density:
        inputs, options = make((2, 300), density=0.0)
        inputs["mask"][1, 17], inputs["values"][1, 17] = True, 0.5
    advantages, returns, stats = run(on, inputs, options, 0.9, 0.9)
    assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()
    assert stats[0] == inputs["mask"].sum()
    mean, rstd = normalizer(stats)
    white = torch.where(inputs["mask"], (advantages - mean) * rstd, 0.0)
    assert (white.abs() < 1e-2).all()


def test_whitened_advantages_have_mean_0_and_variance_1(on):
    inputs, options = make((7, 400))
    inputs["rewards"] = torch.where(inputs["mask"], inputs["rewards"] + 50, 0.0)  # a large common offset
    advantages, _, stats = run(on, inputs, options, 0.99, 0.95)
    mean, rstd = normalizer(stats)
    white = ((advantages - mean) * rstd)[inputs["mask"]]
    assert abs(white.mean().item()) < 1e-5
    assert white.var().item() == pytest.approx(1, abs=1e-5)


def test_a_truncated_row_bootstraps_and_a_finished_one_does_not(on):
    one = {
        "rewards": torch.zeros(2, 1),
        "values": torch.zeros(2, 1),
        "mask": torch.ones(2, 1, dtype=torch.bool),
    }
    advantages, _, _ = run(on, one, {"bootstrap": torch.tensor([0.0, 2.0])}, 0.9, 0.5)
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 1.8])


@pytest.mark.parametrize("turns", [False, True], ids=["token", "turn"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 60, 60, 200], [0, 5000, 10100]], ids=["padded", "packed", "long"])
def test_a_number_that_is_not_finite_stays_in_its_row(on, cu_seqlens, turns):
    shape = (6, 36) if cu_seqlens is None else (cu_seqlens[-1],)
    spare_the_interpreter(on, shape[-1])
    inputs, options = make(shape, turns=turns, cu_seqlens=cu_seqlens)
    # Row 1, its token `at` and the end of the row.
    begin, at, end = (36, 50, 72) if cu_seqlens is None else (cu_seqlens[1], cu_seqlens[1] + 30, cu_seqlens[2])
    inputs["mask"].view(-1)[at], inputs["values"].view(-1)[at] = True, 0.5
    clean = run(on, inputs, options, 0.97, 0.9)
    for name, bad in (("rewards", math.nan), ("rewards", -math.inf), ("values", math.inf), ("bootstrap", math.nan)):
        wild, wild_options = {k: v.clone() for k, v in inputs.items()}, dict(options)
        if name == "bootstrap":
            wild_options[name] = options[name].clone()
            wild_options[name][1] = bad
            right = end
        else:
            wild[name].view(-1)[at] = bad
            right = at + 1
        got = run(on, wild, wild_options, 0.97, 0.9)
        for a, b in zip(got[:2], clean[:2], strict=True):
            a, b = a.view(-1), b.view(-1)
            assert torch.equal(a[:begin], b[:begin]) and torch.equal(a[right:], b[right:]), name
        kept = inputs["mask"].view(-1)[begin:right].nonzero()[-1].item() + begin
        assert not got[0].view(-1)[kept].isfinite()
        assert got[2][0] == inputs["mask"].sum() and not got[2][1:].isfinite().any()


def naive(rewards, values, mask, gamma, lam, bootstrap):
    advantages = np.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        kept = [t for t in range(rewards.shape[1]) if mask[row, t]]
        for i, t in enumerate(kept):  # the definition: sum of (gamma lam)^k delta_{t+k} over the kept tokens
            for k, s in enumerate(kept[i:]):
                after = values[row, kept[i + k + 1]] if i + k + 1 < len(kept) else bootstrap[row]
                advantages[row, t] += (gamma * lam) ** k * (rewards[row, s] + gamma * after - values[row, s])
    return advantages


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_specification_equals_the_definition(data):
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    mask = rng.random((rows, length)) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    rewards, values = np.where(mask, rng.normal(size=mask.shape), 0), rng.normal(size=mask.shape)
    bootstrap = rng.normal(size=rows)
    want = naive(rewards, values, mask, gamma, lam, bootstrap)
    tensors = [torch.from_numpy(x) for x in (rewards, values, mask)]
    got = gae(*tensors, gamma, lam, bootstrap=torch.from_numpy(bootstrap))[0].numpy()
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    # Every token a turn of its own: the turn level is the token level.
    own = torch.arange(length, dtype=torch.int32).expand(rows, length).contiguous()
    turns = gae(*tensors, gamma, lam, bootstrap=torch.from_numpy(bootstrap), turn_id=own)[0].numpy()
    np.testing.assert_allclose(turns, want, rtol=1e-10, atol=1e-12)


def test_merged_statistics_are_those_of_the_whole():
    x = torch.randn(1000, dtype=torch.float64) * 3 + 1e4
    parts = [torch.stack([torch.tensor(float(p.numel())).double(), p.mean(), ((p - p.mean()) ** 2).sum()])
             for p in x.split([1, 399, 600])]  # fmt: skip
    merged = merge_stats(torch.stack([*parts, torch.zeros(3, dtype=torch.float64)]))
    assert merged.tolist() == pytest.approx([1000, x.mean().item(), ((x - x.mean()) ** 2).sum().item()], rel=1e-9)
    assert merge_stats(torch.zeros(2, 3, dtype=torch.float64)).tolist() == [0, 0, 0]


def test_the_same_bits_for_every_number_of_threads():
    if dispatch.extension() is None:
        pytest.skip("manus_fast._C is not built")
    inputs, options = make((64, 500))
    before, results = dispatch.extension().num_threads(), []
    try:
        for threads in (1, 2, 3):
            dispatch.extension().set_num_threads(threads)
            with dispatch.forced("cpu"):
                results.append(gae(**inputs, gamma=0.9, lam=0.9, **options))
    finally:
        dispatch.extension().set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_specification_refuses_a_reward_on_a_masked_token():
    inputs, options = make((2, 5), density=0.0)
    inputs["rewards"][1, 3] = 1.0
    with dispatch.forced("reference"), pytest.raises(ValueError, match="rewards: expected 0 wherever mask is False"):
        gae(**inputs, gamma=0.9, lam=0.9, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(2, 4)}, "values: expected torch.float32"),
        ({"mask": torch.ones(2, 5)}, "mask: expected torch.bool"),
        ({"rewards": torch.zeros(5, 2).T}, "rewards: expected a contiguous tensor"),
        ({"rewards": torch.zeros(10)}, r"rewards: expected shape \[B, T\]"),
        ({"gamma": 1.5}, "gamma: expected a number from 0 to 1, got 1.5"),
        ({"turn_id": torch.zeros(2, 5, dtype=torch.int64)}, "turn_id: expected torch.int32"),
        ({"bootstrap": torch.zeros(3)}, r"bootstrap: expected torch.float32 \[2\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    good = {"rewards": torch.zeros(2, 5), "values": torch.zeros(2, 5), "mask": torch.ones(2, 5, dtype=torch.bool)}
    with pytest.raises(ValueError, match=message):
        gae(**{**good, "gamma": 0.9, "lam": 0.9, **change})


def test_row_boundaries_that_do_not_cover_the_tokens_are_refused():
    if dispatch.extension() is None:
        pytest.skip("manus_fast._C is not built")
    with dispatch.forced("cpu"), pytest.raises(ValueError, match="cu_seqlens: expected a rising sequence from 0 to 5"):
        gae(torch.zeros(5), torch.zeros(5), torch.ones(5, dtype=torch.bool), 0.9, 0.9,
            cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))  # fmt: skip


@pytest.mark.parametrize("backend", COMPILERS)
def test_one_node_of_a_whole_graph(on, backend):
    torch._dynamo.reset()
    inputs, options = make((3, 20), turns=False)
    inputs = {name: x.to(on[1]) for name, x in inputs.items()}
    boot = options["bootstrap"].to(on[1])

    def step(rewards, values, mask):
        advantages, returns, stats = gae(rewards * 2, values, mask, 0.9, 0.8, bootstrap=boot)
        return advantages + 1, returns, stats

    plain = step(**inputs)
    whole = torch.compile(step, fullgraph=True, backend=backend)(**inputs)
    for a, b in zip(plain, whole, strict=True):
        assert torch.equal(a, b) or (backend == "inductor" and torch.allclose(a, b, rtol=1e-6, atol=1e-6))
    inputs["values"].requires_grad_()
    assert not any(x.requires_grad for x in torch.compile(step, fullgraph=True, backend=backend)(**inputs))
