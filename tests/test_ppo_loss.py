"""The policy-gradient loss: hand-worked values, gradients against autograd in float64, statistics, aggregation."""

import itertools
import math

import pytest
import torch
from tolerances import COMPILERS

from manus_fast.ops import PPOLossConfig, dispatch, loss_denominator, loss_metrics, merge_loss_stats, ppo_loss
from manus_fast.ops.ppo_loss import RATIO_BOUNDS, STAT_NAMES

NEED_GRAD = ("log_prob", "values", "entropy")


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
    reason = dispatch.missing("ppo_loss", backend, device)
    if reason:
        pytest.skip(reason)
    with dispatch.forced(backend):
        yield request.param


def make(shape, *, seed=0, density=0.7, spread=0.3, omit=()):
    g = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return torch.randn(shape, generator=g) * scale

    log_prob = -normal().abs()
    values = normal()
    arrays = {
        "log_prob": log_prob, "old_log_prob": log_prob + normal(spread), "advantages": normal(2),
        "mask": torch.rand(shape, generator=g) < density, "weights": normal().abs(), "values": values,
        "old_values": values + normal(0.6), "returns": values + normal(), "ref_log_prob": log_prob + normal(spread),
        "entropy": normal().abs(),
    }  # fmt: skip
    return {name: array for name, array in arrays.items() if name not in omit}


def run(on, arrays, config, *, upstream=1.0, wide=False, **options):
    """loss, statistics and gradients by name, on the CPU."""

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        return (x.double() if wide and x.is_floating_point() else x).to(on[1]).clone()

    arrays = {name: move(x) for name, x in arrays.items()}
    leaves = {name: arrays[name].requires_grad_() for name in NEED_GRAD if name in arrays}
    loss, stats = ppo_loss(**arrays, config=config, **{k: move(v) for k, v in options.items()})
    (loss * upstream).backward()
    return loss.detach().cpu(), stats.cpu(), {name: leaf.grad.cpu() for name, leaf in leaves.items()}


def spec(arrays, config, **options):
    with dispatch.forced("reference"):
        return run(("reference", "cpu"), arrays, config, wide=True, **options)


def check(got, want, tolerance=2e-5):
    assert got[0].item() == pytest.approx(want[0].item(), rel=tolerance, abs=1e-6)
    for name, gradient in got[2].items():
        scale = want[2][name].abs().max().clamp(min=1e-12) if gradient.numel() else 1.0
        worst = ((gradient.double() - want[2][name]).abs() / scale).max().item() if gradient.numel() else 0.0
        assert worst <= tolerance, f"gradient of {name}: off by {worst:.2e} of its largest entry"
    for name, a, b in zip(STAT_NAMES, got[1].tolist(), want[1].tolist(), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4 + 1e-6 * want[1][0].item()), name


def one_token(log_ratio, advantage, config, **more):
    arrays = {
        "log_prob": torch.tensor([-1.0]), "old_log_prob": torch.tensor([-1.0 - log_ratio]),
        "advantages": torch.tensor([advantage]), "mask": torch.tensor([True]), **more,
    }  # fmt: skip
    return arrays, config


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.1, 2.0, -2.2, -2.2, None),
        (1.5, 2.0, -2.4, 0.0, "clip_high"),  # -2 * 1.2
        (0.5, 2.0, -1.0, -1.0, None),  # the pessimistic side is not clipped
        (0.5, -2.0, 1.6, 0.0, "clip_low"),  # 2 * 0.8
        (1.5, -2.0, 3.0, 3.0, None),
        (4.0, -2.0, 6.0, 0.0, "dual_clip"),  # at most 3 * 2
    ],
)
def test_policy_clip_by_hand(on, ratio, advantage, loss, slope, clipped):
    arrays, config = one_token(math.log(ratio), advantage, PPOLossConfig())
    value, stats, gradients = run(on, arrays, config, denominator=1)
    assert value.item() == pytest.approx(loss, rel=1e-5)
    assert gradients["log_prob"].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
    metrics = loss_metrics(stats)
    for name in ("clip_low", "clip_high", "dual_clip"):
        assert metrics[f"{name}_fraction"] == (1.0 if name == clipped else 0.0)
    assert metrics["ratio_max"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["approx_kl_k1"] == pytest.approx(-math.log(ratio), abs=1e-5)
    assert metrics["approx_kl_k3"] == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4, abs=1e-6)


def test_value_clip_entropy_and_kl_by_hand(on):
    # v moved from 0 to 2, R = 1: (2-1)^2 against (.5-1)^2, the larger counts: .5, slope 1. KL k1 = -1 - -1.5 = .5.
    arrays, config = one_token(
        0.0, 0.0, PPOLossConfig(vf_coef=0.1, ent_coef=0.01, kl_coef=2.0, kl="k1"),
        values=torch.tensor([2.0]), old_values=torch.tensor([0.0]), returns=torch.tensor([1.0]),
        ref_log_prob=torch.tensor([-1.5]), entropy=torch.tensor([3.0]),
    )  # fmt: skip
    loss, _, gradients = run(on, arrays, config, denominator=4)
    assert loss.item() == pytest.approx((0.1 * 0.5 + 2 * 0.5 - 0.01 * 3) / 4)
    assert gradients["values"].item() == pytest.approx(0.1 / 4)
    assert gradients["log_prob"].item() == pytest.approx(2 / 4)
    assert gradients["entropy"].item() == pytest.approx(-0.01 / 4)
    # R = 3: the clipped value is the further one, so the loss is .5 (.5-3)^2 and nothing pulls.
    arrays["returns"] = torch.tensor([3.0])
    loss, stats, gradients = run(on, arrays, config, denominator=1)
    assert loss_metrics(stats)["value_loss"] == pytest.approx(0.5 * 2.5**2)
    assert gradients["values"].item() == 0
    assert loss_metrics(stats)["value_clip_fraction"] == 1


@pytest.mark.parametrize("clip", ["ppo", "cispo", "none"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3+"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_every_term_against_float64(on, clip, kl, ratio):
    config = PPOLossConfig(
        clip=clip, kl=kl, ratio=ratio, kl_coef=0.1, ent_coef=0.01, clip_range=0.1, clip_range_high=0.28,
        aggregation="seq-mean-token-mean" if ratio == "sequence" else "token-mean",
    )  # fmt: skip
    arrays = make((7, 129), spread=0.5)
    options = {"mean": 0.3, "rstd": 0.8, "denominator": 500.0, "upstream": -1.7}
    check(run(on, arrays, config, **options), spec(arrays, config, **options))


@pytest.mark.parametrize("n", [0, 1, 7, 129, 1025, 9000, 1_000_003])
def test_sizes_against_float64(on, n):
    if n > 2**18 and on[1] == "cpu":
        pytest.skip("a size at which a block of the GPU walks several steps")
    arrays, config = make((n,), seed=n), PPOLossConfig(kl_coef=0.1, ent_coef=0.01)
    check(run(on, arrays, config, denominator=max(n, 1)), spec(arrays, config, denominator=max(n, 1)))


@pytest.mark.parametrize(
    "omit",
    [("weights",), ("values", "old_values", "returns"), ("ref_log_prob",), ("entropy",), ("ref_log_prob", "entropy")],
    ids=lambda o: o[0],
)
def test_absent_terms_against_float64(on, omit):
    arrays, config = make((3, 50), omit=omit), PPOLossConfig(kl_coef=0.1, ent_coef=0.01)
    check(run(on, arrays, config, denominator=100), spec(arrays, config, denominator=100))


def test_a_wide_policy_shift_stays_finite_and_equal_to_float64(on):
    arrays, config = make((4, 100), spread=15.0), PPOLossConfig(kl_coef=0.1, clip="none")
    got = run(on, arrays, config, denominator=100)
    assert all(torch.isfinite(g).all() for g in got[2].values())
    check(got, spec(arrays, config, denominator=100), tolerance=1e-4)


def test_small_kl_keeps_its_digits(on):
    # k3 of 1e-3 is 5e-7: e^d - d - 1 in float32 would keep one digit of it.
    arrays, config = one_token(0.0, 0.0, PPOLossConfig(kl_coef=1.0), ref_log_prob=torch.tensor([-1.0 + 2**-10]))
    loss, _, _ = run(on, arrays, config, denominator=1)
    if on[0] != "reference":
        assert loss.item() == pytest.approx(math.exp(2**-10) - 2**-10 - 1, rel=1e-5)


def test_what_is_masked_out_is_never_read(on):
    arrays, config = make((5, 40)), PPOLossConfig(kl_coef=0.1, ent_coef=0.01)
    clean = run(on, arrays, config, denominator=100)
    for name, array in arrays.items():
        if name != "mask":
            array[~arrays["mask"]] = math.nan
    dirty = run(on, arrays, config, denominator=100)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    for name, gradient in dirty[2].items():
        assert torch.equal(gradient, clean[2][name])
        assert (gradient[~arrays["mask"]] == 0).all()


def test_one_valid_token_is_as_if_alone(on):
    arrays, config = make((3, 50), density=0.0), PPOLossConfig(kl_coef=0.1, ent_coef=0.01)
    arrays["mask"][1, 17] = True
    alone = {name: array[1, 17:18].clone() for name, array in arrays.items()}
    got, want = run(on, arrays, config, denominator=1), run(on, alone, config, denominator=1)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    for name, gradient in got[2].items():
        torch.testing.assert_close(gradient[1, 17], want[2][name][0])
        assert gradient.count_nonzero() <= 1


def test_arrays_that_allow_no_wide_loads(on):
    arrays, config = make((4, 250)), PPOLossConfig(kl_coef=0.1, ent_coef=0.01)
    want = run(on, arrays, config, denominator=100)
    # The same numbers, one element after an aligned address; run() would copy them to one.
    moved = {name: torch.cat([x.new_zeros(1), x.reshape(-1)]).to(on[1])[1:].view(x.shape) for name, x in arrays.items()}
    with dispatch.forced(on[0]), torch.no_grad():
        loss, stats = ppo_loss(**moved, denominator=100, config=config)
    torch.testing.assert_close(loss.cpu().double(), want[0].double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(stats.cpu(), want[1], rtol=1e-6, atol=1e-6)


def test_nothing_selected_gives_zero_and_no_nan(on):
    arrays, config = make((2, 30), density=0.0), PPOLossConfig(kl_coef=0.1)
    loss, stats, gradients = run(on, arrays, config, denominator=0)
    assert loss.item() == 0
    assert all((g == 0).all() for g in gradients.values())
    assert all(math.isfinite(x) for x in loss_metrics(stats).values())


def test_a_token_without_a_finite_log_probability_is_dropped(on):
    arrays, config = make((40,), density=1.0), PPOLossConfig(kl_coef=0.1)
    arrays["old_log_prob"][3], arrays["log_prob"][8] = -math.inf, math.nan
    got = run(on, arrays, config, denominator=40)
    without = {name: array.clone() for name, array in arrays.items()}
    without["mask"][[3, 8]] = False
    want = run(on, without, config, denominator=40)
    assert got[1][STAT_NAMES.index("dropped")] == 2 and torch.equal(got[0], want[0])
    assert got[2]["log_prob"][3] == 0 and got[2]["log_prob"][8] == 0


def test_ratio_one_clips_nothing(on):
    arrays = make((3, 60))
    arrays["old_log_prob"] = arrays["log_prob"].clone()
    metrics = loss_metrics(run(on, arrays, PPOLossConfig(), denominator=100)[1])
    assert metrics["clip_fraction"] == metrics["dual_clip_fraction"] == metrics["approx_kl_k3"] == 0
    assert metrics["ratio_mean"] == metrics["ratio_max"] == metrics["ratio_p95_bound"] == 1


def test_logged_statistics_are_what_their_names_say(on):
    arrays = make((50, 40), spread=0.4)
    m = arrays["mask"]
    metrics = loss_metrics(run(on, arrays, PPOLossConfig(), denominator=m.sum().item())[1])
    ratio = (arrays["log_prob"] - arrays["old_log_prob"])[m].double().exp()
    returns, values = arrays["returns"][m].double(), arrays["values"][m].double()
    assert metrics["count"] == m.sum()
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    p95 = torch.quantile(ratio, 0.95).item()
    assert metrics["ratio_p95_bound"] == min(b for b in RATIO_BOUNDS if b >= p95)
    assert metrics["explained_variance"] == pytest.approx(
        1 - ((returns - values).var(correction=0) / returns.var(correction=0)).item(), abs=1e-4
    )
    assert metrics["entropy"] == pytest.approx(arrays["entropy"][m].mean().item(), rel=1e-5)


def test_explained_variance_survives_a_large_common_offset(on):
    arrays = make((50, 40))
    near = run(on, arrays, PPOLossConfig(value_clip=None), denominator=1)[1]
    for name in ("values", "returns"):
        arrays[name] = arrays[name] + 4096
    far = run(on, arrays, PPOLossConfig(value_clip=None), denominator=1)[1]
    assert loss_metrics(far)["explained_variance"] == pytest.approx(loss_metrics(near)["explained_variance"], abs=1e-3)


AGGREGATIONS = [
    PPOLossConfig(aggregation="token-mean"),
    PPOLossConfig(aggregation="seq-mean-token-mean"),
    PPOLossConfig(aggregation="seq-mean-token-sum"),
    PPOLossConfig(aggregation="seq-mean-token-sum-norm", norm_length=64),
    PPOLossConfig(aggregation="seq-mean-token-mean", ratio="sequence"),
]


@pytest.mark.parametrize("config", AGGREGATIONS, ids=lambda c: f"{c.aggregation}-{c.ratio}")
def test_gradient_does_not_depend_on_micro_batches_or_packing(on, config):
    arrays = make((6, 40), seed=5)
    arrays["mask"][2] = False  # a row with nothing in it is not part of any mean
    total = loss_denominator(arrays["mask"], None, config)
    whole = run(on, arrays, config, denominator=total)
    parts = [
        run(on, {name: a[begin:end].contiguous() for name, a in arrays.items()}, config, denominator=total)
        for begin, end in ((0, 1), (1, 4), (4, 6))
    ]
    assert sum(p[0].item() for p in parts) == pytest.approx(whole[0].item(), rel=1e-5)
    for name in NEED_GRAD:
        torch.testing.assert_close(torch.cat([p[2][name] for p in parts]), whole[2][name], rtol=1e-5, atol=1e-8)
    merged = merge_loss_stats(torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(merged, whole[1], rtol=1e-6, atol=1e-6)
    # Packed, rows of unequal length: the padding is gone, the gradient is not.
    lengths = [40, 11, 40, 1, 25, 40]
    flat = torch.cat([torch.arange(r * 40, r * 40 + n) for r, n in enumerate(lengths)])
    outside = torch.ones(240, dtype=torch.bool)
    outside[flat] = False
    arrays["mask"].view(-1)[outside] = False
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = {name: a.view(-1)[flat] for name, a in arrays.items()}
    total = loss_denominator(arrays["mask"], None, config)
    assert loss_denominator(packed["mask"], cu_seqlens, config) == total
    padded = run(on, arrays, config, denominator=total)
    got = run(on, packed, config, denominator=total, cu_seqlens=cu_seqlens)
    assert got[0].item() == pytest.approx(padded[0].item(), rel=1e-5)
    torch.testing.assert_close(got[2]["log_prob"], padded[2]["log_prob"].view(-1)[flat], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (AGGREGATIONS[0], (3 * 1 + 1 * 5) / 4),
        (AGGREGATIONS[1], (1 + 5) / 2),
        (AGGREGATIONS[2], (3 * 1 + 1 * 5) / 2),
        (AGGREGATIONS[3], (3 * 1 + 1 * 5) / (2 * 64)),
    ],
    ids=lambda c: c.aggregation if isinstance(c, PPOLossConfig) else "",
)
def test_aggregation_by_hand(on, config, want):
    # Row 0: three tokens of loss 1, row 1: one of loss 5, row 2: none.
    mask = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
    arrays = {"log_prob": torch.zeros(3, 3), "old_log_prob": torch.zeros(3, 3), "mask": mask}
    arrays["advantages"] = torch.tensor([[-1.0] * 3, [-5.0] * 3, [7.0] * 3])
    assert run(on, arrays, config, denominator=loss_denominator(mask, None, config))[0].item() == pytest.approx(want)


def test_gspo_ratio_is_the_rows_mean(on):
    arrays = make((3, 30), omit=("weights", "values", "old_values", "returns", "ref_log_prob", "entropy"))
    arrays["advantages"] = torch.ones(3, 30)
    config = PPOLossConfig(ratio="sequence", clip="none", aggregation="seq-mean-token-mean")
    loss, _, gradients = run(on, arrays, config, denominator=3)
    m = arrays["mask"].double()
    ratio = (((arrays["log_prob"] - arrays["old_log_prob"]).double() * m).sum(1) / m.sum(1)).exp()
    assert loss.item() == pytest.approx(-ratio.mean().item(), rel=1e-5)
    want = -(ratio / m.sum(1))[:, None] * m / 3  # d/d log_prob of the mean of exp(mean log ratio)
    torch.testing.assert_close(gradients["log_prob"].double(), want, rtol=1e-5, atol=1e-8)


def test_scalars_may_be_tensors(on):
    arrays, config = make((100,)), PPOLossConfig()
    numbers = run(on, arrays, config, mean=0.5, rstd=2.0, denominator=70)
    tensors = run(
        on, arrays, config, mean=torch.tensor(0.5), rstd=torch.tensor(2.0).double(), denominator=torch.tensor(70)
    )
    assert torch.equal(numbers[0], tensors[0]) and torch.equal(numbers[2]["log_prob"], tensors[2]["log_prob"])


@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_node_of_a_whole_graph(on, compiler):
    torch._dynamo.reset()
    arrays = {name: a.to(on[1]) for name, a in make((3, 100)).items()}
    config = PPOLossConfig(kl_coef=0.1, ent_coef=0.01)
    leaves = ("log_prob", "values", "entropy")

    def loss(scale, denominator, *trained):
        given = {name: x * scale for name, x in zip(leaves, trained, strict=True)}
        loss, stats = ppo_loss(**{**arrays, **given}, denominator=denominator, rstd=1.1, config=config)
        return loss * 2, stats

    results = []
    with dispatch.forced(on[0]):
        for function in (loss, torch.compile(loss, fullgraph=True, backend=compiler)):
            trained = [arrays[name].clone().requires_grad_() for name in leaves]
            value, stats = function(0.9, arrays["mask"].sum(), *trained)
            value.backward()
            assert not stats.requires_grad
            results.append([value.detach(), stats, *(x.grad for x in trained)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) or (compiler == "inductor" and torch.allclose(a, b, rtol=1e-6, atol=1e-7))


def test_a_compiled_graph_takes_every_setting(on):
    torch._dynamo.reset()
    arrays = {name: a.to(on[1]) for name, a in make((3, 40)).items()}
    config = PPOLossConfig(
        clip_range=0.1, clip_range_high=0.3, dual_clip=None, value_clip=None, vf_coef=0.7, ent_coef=0.02, kl_coef=0.2,
        kl="k3+", ratio="sequence", clip="none", aggregation="seq-mean-token-sum-norm", norm_length=50,
    )  # fmt: skip

    def loss(log_prob):
        return ppo_loss(**{**arrays, "log_prob": log_prob}, denominator=3.0, mean=0.2, config=config)

    with dispatch.forced(on[0]), torch.no_grad():
        plain, whole = (
            loss(arrays["log_prob"]),
            torch.compile(loss, fullgraph=True, backend="eager")(arrays["log_prob"]),
        )
    assert all(torch.equal(a, b) for a, b in zip(plain, whole, strict=True))


def test_a_second_backward_is_refused_where_the_gradient_is_gone():
    arrays = make((30,))
    arrays["log_prob"].requires_grad_()
    if dispatch.extension() is None:
        pytest.skip("manus_fast._C is not built")
    with dispatch.forced("cpu"):
        loss, _ = ppo_loss(**arrays, denominator=10, config=PPOLossConfig())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was called twice"):
        loss.backward()


def test_the_specification_passes_gradcheck():
    arrays = {n: a.double() if a.is_floating_point() else a for n, a in make((5, 6), seed=2).items()}
    leaves = [arrays.pop(name).requires_grad_() for name in NEED_GRAD]
    for config in (PPOLossConfig(kl_coef=0.1, ent_coef=0.01), PPOLossConfig(clip="none", kl="k2", kl_coef=0.1)):

        def loss(log_prob, values, entropy, config=config):
            given = {"log_prob": log_prob, "values": values, "entropy": entropy, **arrays}
            return ppo_loss(**given, denominator=20.0, config=config)[0]

        assert torch.autograd.gradcheck(loss, leaves)


def test_the_same_bits_for_every_number_of_threads():
    if dispatch.extension() is None:
        pytest.skip("manus_fast._C is not built")
    arrays, before, results = make((50000,)), dispatch.extension().num_threads(), []
    try:
        for threads in (1, 2, 3):
            dispatch.extension().set_num_threads(threads)
            with dispatch.forced("cpu"):
                results.append(run(("cpu", "cpu"), arrays, PPOLossConfig(), denominator=1000))
    finally:
        dispatch.extension().set_num_threads(before)
    for loss, stats, gradients in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(stats, results[0][1])
        assert torch.equal(gradients["log_prob"], results[0][2]["log_prob"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(4)}, "mask: expected torch.bool"),
        ({"old_log_prob": torch.zeros(5)}, r"old_log_prob: expected torch.float32 \[4\]"),
        ({"log_prob": torch.zeros(4, dtype=torch.bfloat16)}, "log_prob: expected float32, got torch.bfloat16"),
        ({"advantages": torch.zeros(8)[::2]}, "advantages: expected a contiguous tensor"),
        ({"values": torch.zeros(4)}, "returns: expected together with values"),
        ({"values": torch.zeros(4), "returns": torch.zeros(4)}, "old_values: expected with values"),
        ({"config": PPOLossConfig(ratio="sequence")}, "cu_seqlens: expected int32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    good = {name: torch.zeros(4) for name in ("log_prob", "old_log_prob", "advantages")}
    with pytest.raises(ValueError, match=message):
        ppo_loss(**{**good, "mask": torch.ones(4, dtype=torch.bool), "denominator": 4, **change})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kl": "k4"}, "kl: expected one of k1, k2, k3, k3\\+, got 'k4'"),
        ({"aggregation": "mean"}, "aggregation: expected one of"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "norm_length: expected tokens >= 1"),
        ({"dual_clip": 0.5}, "dual_clip: expected a number > 1 or None"),
        ({"value_clip": 0.0}, "value_clip: expected a number > 0 or None"),
        ({"clip_range": "0.2"}, "clip_range: expected 0 to 1"),
        ({"clip_range_high": [1]}, "clip_range: expected 0 to 1"),
        ({"dual_clip": "3"}, "dual_clip: expected a number > 1 or None, got 3"),
        ({"value_clip": "1"}, "value_clip: expected a number > 0 or None, got 1"),
        ({"aggregation": "seq-mean-token-sum-norm", "norm_length": "9"}, "norm_length: expected tokens >= 1"),
        ({"aggregation": "seq-mean-token-sum-norm", "norm_length": 1.5}, "norm_length: expected tokens >= 1"),
    ],
)
def test_wrong_configurations_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        PPOLossConfig(**wrong)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_dropped_token_does_not_dilute_the_ratio_of_its_row(on, packed):
    """Left out of the sum and left in the count, it drew the ratio of the whole row towards 1."""
    arrays = {
        "log_prob": torch.full((1, 4), -1.0), "old_log_prob": torch.full((1, 4), -1.5),
        "advantages": torch.ones(1, 4), "mask": torch.ones(1, 4, dtype=torch.bool),
    }  # fmt: skip
    arrays["old_log_prob"][0, 1:3] = -math.inf
    options = {"denominator": 1}
    if packed:
        arrays = {name: a.view(-1) for name, a in arrays.items()}
        options["cu_seqlens"] = torch.tensor([0, 4], dtype=torch.int32)
    _, stats, _ = run(on, arrays, PPOLossConfig(ratio="sequence", clip="none"), **options)
    assert stats[STAT_NAMES.index("dropped")] == 2
    assert loss_metrics(stats)["ratio_mean"] == pytest.approx(math.exp(0.5), rel=1e-5)


def test_nothing_but_log_prob_values_and_entropy_has_a_gradient(on):
    """The reference gave one to the advantages, the weights and the rest, the kernels did not."""
    arrays = {name: a.to(on[1]) for name, a in make((3, 20)).items()}
    for array in arrays.values():
        if array.is_floating_point():
            array.requires_grad_()
    scalars = {name: torch.tensor(2.0, device=on[1], requires_grad=True) for name in ("mean", "rstd", "denominator")}
    ppo_loss(**arrays, **scalars, config=PPOLossConfig(kl_coef=0.1, ent_coef=0.01))[0].backward()
    with_gradient = {name for name, x in {**arrays, **scalars}.items() if x.grad is not None}
    assert with_gradient == set(NEED_GRAD)
