"""`linear_logprob`: every backend against the specification in float64, and the edges of its contract."""

import pytest
import torch
from tolerances import COMPILERS, GRADIENT_ERROR, TOLERANCES, assert_close, relative_error

from manus_fast.ops import dispatch, linear_logprob, logprob, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a CUDA device without the extension, or another than Hopper's, "auto" stands for the choice that users get there.
BACKENDS = [name for name in ("cpu", "triton") if dispatch.missing("linear_logprob", name, DEVICE) is None]
BACKENDS += ["auto"] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (N, H, V)
SHAPES = [(1, 1, 1), (7, 5, 129), (9, 33, 1025)]
if DEVICE == "cuda":
    SHAPES += [(129, 64, 151936), (1025, 104, 4099), (300, 1536, 32001), (257, 1000, 511), (3000, 512, 7777)]


def make(n, h, v, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(n, h, generator=g).to(dtype).to(DEVICE),
        "weight": (torch.randn(v, h, generator=g) * 2 / h**0.5).to(dtype).to(DEVICE),
        "bias": torch.randn(v, generator=g).to(dtype).to(DEVICE),
        "target": torch.randint(0, v, (n,), generator=g).to(DEVICE),
        "temperature": (torch.rand(n, generator=g) + 0.5).to(DEVICE),
        "upstream": torch.randn(2, n, generator=g).to(DEVICE),
    }


def run(function, case, dtype=None, need=("hidden", "weight", "bias"), use_bias=True, entropy=True, **options):
    """Outputs, then gradients of hidden, weight and bias, all converted to `dtype` first; None where not in `need`."""
    leaves = {}
    for name in ("hidden", "weight", "bias"):
        leaves[name] = case[name].detach().to(dtype or case[name].dtype, copy=True).requires_grad_(name in need)
    log_prob, row_entropy = function(
        leaves["hidden"],
        leaves["weight"],
        case["target"],
        bias=leaves["bias"] if use_bias else None,
        entropy=entropy,
        **options,
    )
    loss = (log_prob * case["upstream"][0].to(log_prob.dtype)).sum()
    if entropy:
        loss = loss + (row_entropy * case["upstream"][1].to(log_prob.dtype)).sum()
    loss.backward()
    values = (log_prob.detach(), None if row_entropy is None else row_entropy.detach())
    return *values, *(leaves[name].grad for name in ("hidden", "weight", "bias"))


def check(got, want, dtype, case=None):
    """Values and gradients of a run against the float64 reference.

    Where logits may be rounded to fp16 or bf16, values may be twice as far off as PyTorch's own with such logits.
    """
    slack, own = 0.0, [0.0] * 3
    if case is not None and dtype != torch.float32:
        rounded = run(with_rounded_logits, case, temperature=case["temperature"])
        slack = 2 * max(float((r - w).abs().max()) for r, w in zip(rounded[:2], want[:2], strict=True))
        own = [relative_error(r, w) for r, w in zip(rounded[2:], want[2:], strict=True)]
    for out, expected in zip(got[:2], want[:2], strict=True):
        if expected is not None:
            rtol, atol = TOLERANCES[torch.float32 if case is None else dtype]
            torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=max(atol, slack))
    for out, expected, other in zip(got[2:], want[2:], own, strict=True):
        assert (out is None) == (expected is None)
        if out is not None:
            assert out.dtype == dtype
            assert relative_error(out, expected) < max(GRADIENT_ERROR[dtype], 2 * other)


def with_rounded_logits(hidden, weight, target, *, temperature, bias=None, entropy=True):
    """PyTorch's own way: logits in the dtype of hidden, the rest in float32."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    return reference.logprob(logits, target, temperature=temperature, entropy=entropy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_matches_float64(backend, dtype, shape, mode):
    if DEVICE == "cpu" and (backend, dtype) == ("triton", torch.float16):
        pytest.skip("its fp16 gradients are bf16 products, summed otherwise in the interpreter; the GPU runs this case")
    case = make(*shape, dtype)
    if shape[0] > 2:
        case["target"][1] = -1
    want = run(reference.linear_logprob, case, torch.float64, temperature=case["temperature"])
    with dispatch.forced(backend):
        got = run(linear_logprob, case, temperature=case["temperature"], mode=mode)
    check(got, want, dtype, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"softcap": 2.0}, {"entropy": False}, {"use_bias": False}]
)
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_options(backend, options, mode):
    case = make(6, 17, 140)
    case["target"][0] = -1
    need = ("hidden", "weight") if "use_bias" in options else ("hidden", "weight", "bias")
    want = run(reference.linear_logprob, case, torch.float64, need=need, **options)
    with dispatch.forced(backend):
        got = run(linear_logprob, case, need=need, mode=mode, **options)
    check(got, want, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("need", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_only_the_gradients_needed(backend, need):
    case = make(5, 8, 70)
    want = run(reference.linear_logprob, case, torch.float64, need=need)
    with dispatch.forced(backend):
        got = run(linear_logprob, case, need=need)
    check(got, want, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_weight(backend):
    """The same matrix as embedding and head: both gradients add up in it."""
    case = make(6, 8, 50)
    grads = []
    for function, dtype in ((linear_logprob, torch.float32), (reference.linear_logprob, torch.float64)):
        weight = case["weight"].to(dtype, copy=True).requires_grad_()
        hidden = torch.nn.functional.embedding(case["target"], weight)
        with dispatch.forced(backend):
            function(hidden.tanh(), weight, case["target"])[0].sum().backward()
        grads.append(weight.grad)
    assert relative_error(*grads) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_are_exact_zeros(backend):
    case = make(5, 8, 70)
    case["target"][1], case["target"][4] = -1, -100
    with dispatch.forced(backend):
        log_prob, entropy, grad_hidden, grad_weight, _ = run(linear_logprob, case)
        kept = [0, 2, 3]
        part = {
            k: v if k in ("weight", "bias") else v[..., kept] if k == "upstream" else v[kept] for k, v in case.items()
        }
        alone = run(linear_logprob, part)
    for tensor in (log_prob, entropy, grad_hidden):
        assert (tensor[[1, 4]] == 0).all() and (tensor[kept] != 0).any()
    assert relative_error(grad_weight, alone[3]) < 1e-6


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_what_an_ignored_row_holds_reaches_no_gradient(backend, dtype, mode):
    """NaN or inf there, as attention without a key leaves it, changes nothing; 16 columns let Hopper's kernel run."""
    case = make(40, 16, 300, dtype)
    case["target"][[0, 7, 39]] = torch.tensor([-1, -100, -1], device=DEVICE)
    case["hidden"][[0, 7, 39]] = 0
    options = {"mode": mode, "use_bias": False, "need": ("hidden", "weight")}
    with dispatch.forced(backend):
        want = run(linear_logprob, case, **options)
        for row, value in ((0, torch.nan), (7, torch.inf), (39, -torch.inf)):
            case["hidden"][row, row % 16] = value
        got = run(linear_logprob, case, **options)
    for a, b in zip(got[:4], want[:4], strict=True):
        assert torch.isfinite(a).all() and relative_error(a, b) < GRADIENT_ERROR[a.dtype]
    assert not any(tensor[[0, 7, 39]].any() for tensor in got[:3])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_all_ignored_and_empty(backend):
    for n in (3, 0):
        case = make(n, 8, 70)
        case["target"][:] = -1
        with dispatch.forced(backend):
            out = run(linear_logprob, case)
        assert out[0].shape == out[1].shape == (n,)
        assert all(
            tensor.shape == like.shape
            for tensor, like in zip(out[2:], (case["hidden"], case["weight"], case["bias"]), strict=True)
        )
        assert not any(tensor.any() for tensor in out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_words(backend):
    """A bias of -inf takes words out: probability zero, no NaN anywhere."""
    case = make(4, 8, 200)
    case["bias"][:150] = -torch.inf
    case["target"][:] = torch.tensor([150, 151, 199, 160])
    with dispatch.forced(backend):
        log_prob, entropy, grad_hidden, grad_weight, grad_bias = run(linear_logprob, case)
        short = {**case, "weight": case["weight"][150:], "bias": case["bias"][150:], "target": case["target"] - 150}
        want = run(linear_logprob, short)
    for tensor in (log_prob, entropy, grad_hidden, grad_weight, grad_bias):
        assert torch.isfinite(tensor).all()
    assert (grad_weight[:150] == 0).all() and (grad_bias[:150] == 0).all()
    assert relative_error(log_prob, want[0]) < 1e-5 and relative_error(entropy, want[1]) < 1e-5
    assert relative_error(grad_hidden, want[2]) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_common_offset_costs_no_more_than_the_logits_own_digits(backend):
    case = make(5, 8, 200)
    offset = 30000.0  # beyond fp16, and where exp would overflow
    with dispatch.forced(backend):
        low = run(linear_logprob, case)
        high = run(linear_logprob, {**case, "bias": case["bias"] + offset})
    for a, b in zip(low, high, strict=True):
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b, rtol=0.01, atol=4 * offset * 2**-24)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_valid_token_is_as_if_alone(backend):
    case = make(7, 8, 70)
    target = case["target"][4].clone()
    case["target"][:] = -1
    case["target"][4] = target
    alone = {**case, **{name: case[name][4:5] for name in ("hidden", "target", "temperature")}}
    alone["upstream"] = case["upstream"][:, 4:5]
    with dispatch.forced(backend):
        got, want = run(linear_logprob, case), run(linear_logprob, alone)
    for a, b in zip(got[:3], want[:3], strict=True):
        assert_close(a[4:5], b, torch.float32)
        assert a.count_nonzero() == b.count_nonzero()
    for a, b in zip(got[3:], want[3:], strict=True):
        assert_close(a, b, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_strided_rows(backend, mode):
    case = make(6, 40, 90)
    parts = {name: case[name][:, 8:24] for name in ("hidden", "weight")}
    results = []
    for given in (parts, {name: x.contiguous() for name, x in parts.items()}):
        hidden, weight = (given[name].detach().requires_grad_() for name in ("hidden", "weight"))
        with dispatch.forced(backend):
            log_prob, entropy = linear_logprob(hidden, weight, case["target"], mode=mode)
            (log_prob + 0.1 * entropy).sum().backward()
        results.append((log_prob.detach(), entropy.detach(), hidden.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, torch.float32)
    with pytest.raises(ValueError, match="hidden: expected unit stride"):
        linear_logprob(case["hidden"][:, ::2], case["weight"][:, ::2], case["target"])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_more_than_2_to_31_logits(mode):
    """The last tokens of the last words, whose places in a matrix of logits are past 2^31."""
    n, width, words = 14300, 64, 151936
    hidden = torch.randn(n, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(words, width, device="cuda") / width**0.5).bfloat16().requires_grad_()
    target = torch.randint(words - 3, words, (n,), device="cuda")
    log_prob, entropy = linear_logprob(
        hidden, weight, target, mode=mode, keep_bytes=None if mode == "recompute" else 8 << 30
    )
    (log_prob + 0.1 * entropy).sum().backward()
    tail = hidden[-3:].detach().double().requires_grad_()
    want = reference.linear_logprob(tail, weight.detach().double(), target[-3:])
    (want[0] + 0.1 * want[1]).sum().backward()
    for got, expected in zip((log_prob, entropy), want, strict=True):
        assert float((got[-3:].detach() - expected.detach()).abs().max()) < 0.02
    assert relative_error(hidden.grad[-3:], tail.grad) < 2 * GRADIENT_ERROR[torch.bfloat16]
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_keep_equals_recompute(backend, monkeypatch):
    """Whatever part of the logits is kept, the float32 gradients agree."""
    import manus_fast.ops.cpu.logprob as rows

    monkeypatch.setattr(rows, "CHUNK_BYTES", 4 * 300 * 4)
    if backend == "triton":
        import manus_fast.ops.triton.linear_logprob as tiles

        for name, value in (("BACKWARD_BYTES", 11 * 128 * 4), ("FORWARD_TOKENS", 8), ("FORWARD_VOCABULARY", 50)):
            monkeypatch.setattr(tiles, name, value)
    case = make(11, 6, 300)
    with dispatch.forced(backend):
        want = run(linear_logprob, case, mode="recompute")
        for budget in (0, 4 * 300 * 4, 9 * 300 * 4, 1 << 30):
            got = run(linear_logprob, case, keep_bytes=budget)
            for a, b in zip(got, want, strict=True):
                assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_logprob(backend):
    case = make(6, 12, 90)
    with dispatch.forced(backend):
        a = linear_logprob(case["hidden"], case["weight"], case["target"])
        b = logprob(case["hidden"] @ case["weight"].T, case["target"])
    assert_close(a[0], b[0], torch.float32)
    assert_close(a[1], b[1], torch.float32)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_node_of_a_whole_graph(backend, compiler):
    torch._dynamo.reset()
    for rows, frozen, dtype in ((6, False, torch.float32), (9, True, torch.bfloat16)):
        case = make(rows, 16, 90, dtype=dtype)
        # bf16 without bias and soft cap: what Hopper's own kernel takes
        options = {"bias": case["bias"], "softcap": 20.0} if dtype == torch.float32 else {}

        def step(hidden, weight, target, options=options):
            log_prob, entropy = linear_logprob(hidden * 2, weight, target, temperature=0.8, **options)
            return (log_prob + 0.1 * entropy).mean()

        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend=compiler)):
            hidden = case["hidden"].clone().requires_grad_()
            weight = case["weight"].clone().requires_grad_(not frozen)
            with dispatch.forced(backend):
                loss = function(hidden, weight, case["target"])
                loss.backward()
            results.append((loss.detach(), hidden.grad, *([] if frozen else [weight.grad])))
            assert not frozen or weight.grad is None
        for a, b in zip(*results, strict=True):
            # inductor takes the mean in an order of its own, and so may the rounded gradients differ
            same = torch.equal(a, b) if compiler != "inductor" else relative_error(a, b) < GRADIENT_ERROR[a.dtype]
            assert same


@pytest.mark.skipif(DEVICE == "cuda", reason="the cpu backend's products are torch's, which autocast rewrites")
@pytest.mark.parametrize("within", ["forward", "backward", "both"])
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_autocast_changes_nothing(mode, within):
    case, results = make(6, 12, 90), []
    for on in (False, True):
        hidden, weight = (case[name].detach().clone().requires_grad_() for name in ("hidden", "weight"))
        with torch.autocast("cpu", torch.bfloat16, enabled=on and within != "backward"):
            log_prob, entropy = linear_logprob(hidden, weight, case["target"], mode=mode)
            loss = (log_prob + 0.1 * entropy).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=on and within != "forward"):
            loss.backward()
        results.append((log_prob.detach(), entropy.detach(), hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradcheck_of_the_written_backward():
    case = {k: v.cpu().double() if v.dtype.is_floating_point else v.cpu() for k, v in make(4, 3, 6).items()}
    case["target"][2] = -1
    for mode in ("recompute", "keep"):
        with dispatch.forced("cpu"):
            assert torch.autograd.gradcheck(
                lambda h, w, b, mode=mode: linear_logprob(
                    h, w, case["target"], bias=b, temperature=case["temperature"], softcap=1.5, mode=mode
                ),
                [case[name].requires_grad_() for name in ("hidden", "weight", "bias")],
            )


def test_errors_name_the_argument():
    case = make(3, 4, 5)
    hidden, weight, target = case["hidden"], case["weight"], case["target"]
    for arguments, options, message in [
        ((hidden[0], weight, target), {}, "hidden: expected 2 dimensions"),
        ((hidden, weight[:, :3], target), {}, r"weight: expected unit stride|weight: expected shape \[V, 4\]"),
        ((hidden, weight.double(), target), {}, "weight: expected the dtype of hidden"),
        ((hidden, weight, target), {"bias": torch.zeros(4, device=DEVICE)}, r"bias: expected shape \[5\], got \[4\]"),
        ((hidden, weight, target), {"softcap": -1.0}, "softcap: expected None or a finite number"),
        ((hidden, weight, target), {"mode": "fast"}, "mode: expected one of auto, recompute, keep"),
        ((hidden, weight, target), {"keep_bytes": -1}, "keep_bytes: expected None or"),
        ((hidden.T.contiguous().T, weight, target), {}, "hidden: expected unit stride"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_logprob(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE == "cpu" or dispatch.missing("linear_logprob", "cuda", DEVICE, torch.bfloat16) is not None,
    reason="needs the CUDA extension and a CUDA device",
)
class TestHopperKernel:
    """The fused kernel: precision that rounded logits would not give, its limits, determinism."""

    @pytest.mark.parametrize("shape", [(8, 64, 256), (129, 448, 1000), (1000, 1536, 30001), (513, 3584, 8193)])
    @pytest.mark.parametrize("mode", ["recompute", "keep"])
    def test_values_from_float32_logits(self, shape, mode):
        case = make(*shape, torch.bfloat16)
        case["target"][-1] = -1
        want = run(reference.linear_logprob, case, torch.float64, ("hidden", "weight"), False, temperature=0.8)
        with dispatch.forced("cuda"):
            got = run(linear_logprob, case, None, ("hidden", "weight"), False, temperature=0.8, mode=mode)
        assert (got[0] - want[0]).abs().max() < 1e-4 and (got[1] - want[1]).abs().max() < 1e-4
        with_bf16 = run(with_rounded_logits, case, None, ("hidden", "weight"), False, temperature=0.8)
        for out, expected, other in zip(got[2:4], want[2:4], with_bf16[2:4], strict=True):
            # Kept logits are rounded and their normaliser is not: a little more than rounding both.
            bound = 3e-3 if mode == "recompute" else 3 * relative_error(other, expected)
            assert relative_error(out, expected) < bound

    def test_same_bits_every_time(self):
        case = make(700, 1024, 20000, torch.bfloat16)
        with dispatch.forced("cuda"):
            first = run(linear_logprob, case, None, ("hidden", "weight"), False)
            for _ in range(3):
                again = run(linear_logprob, case, None, ("hidden", "weight"), False)
                assert all(torch.equal(a, b) for a, b in zip(first[:4], again[:4], strict=True))

    def test_budget_between_nothing_and_everything(self, monkeypatch):
        import manus_fast.ops.triton.linear_logprob as tiles

        monkeypatch.setattr(tiles, "BACKWARD_BYTES", 300 * 512 * 2)
        case = make(300, 512, 3000, torch.bfloat16)
        want = run(reference.linear_logprob, case, torch.float64, ("hidden", "weight"), False)
        for budget in (0, 2 * 300 * 512 * 2, 1 << 40):
            with dispatch.forced("cuda"):
                got = run(linear_logprob, case, None, ("hidden", "weight"), False, keep_bytes=budget)
            for out, expected in zip(got[2:4], want[2:4], strict=True):
                assert relative_error(out, expected) < 1e-2

    def test_refuses_by_name_and_falls_to_triton_by_choice(self):
        case = make(5, 12, 40, torch.bfloat16)
        with dispatch.forced("cuda"), pytest.raises(RuntimeError, match="backend 'cuda' was asked for, but its kernel"):
            linear_logprob(case["hidden"], case["weight"], case["target"])
        log_prob, _ = linear_logprob(case["hidden"], case["weight"], case["target"])
        assert torch.isfinite(log_prob).all()

    def test_on_a_side_stream_and_in_a_graph(self):
        case = make(300, 512, 3000, torch.bfloat16)
        with torch.no_grad(), dispatch.forced("cuda"):
            want = linear_logprob(case["hidden"], case["weight"], case["target"])
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                linear_logprob(case["hidden"], case["weight"], case["target"])
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = linear_logprob(case["hidden"], case["weight"], case["target"])
            graph.replay()
            torch.cuda.synchronize()
        assert torch.equal(want[0], captured[0]) and torch.equal(want[1], captured[1])
