"""`logprob`: every backend against the specification in float64, hand-worked values, and the edges of its contract."""

import math

import pytest
import torch
from tolerances import COMPILERS, GRADIENT_ERROR, assert_close, relative_error

from manus_fast.ops import dispatch, logprob, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [name for name in ("cpu", "triton") if dispatch.missing("logprob", name, DEVICE) is None]
HALF = [torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 7), (7, 129), (5, 1025), (3, 5003)]
if DEVICE == "cuda":
    SHAPES += [(129, 32000), (65, 151936)]


def make(n, v, dtype, seed=0, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, v, generator=g) * scale).to(dtype).to(DEVICE)
    target = torch.randint(0, v, (n,), generator=g).to(DEVICE)
    temperature = (torch.rand(n, generator=g) + 0.5).to(DEVICE)
    upstream = torch.randn(2, n, generator=g).to(DEVICE)
    return logits, target, temperature, upstream


def run(function, logits, target, upstream, dtype=None, entropy=True, **options):
    logits = logits.detach().to(dtype or logits.dtype, copy=True).requires_grad_()
    log_prob, row_entropy = function(logits, target, entropy=entropy, **options)
    loss = (log_prob * upstream[0].to(log_prob.dtype)).sum()
    if entropy:
        loss = loss + (row_entropy * upstream[1].to(log_prob.dtype)).sum()
    loss.backward()
    return log_prob.detach(), None if row_entropy is None else row_entropy.detach(), logits.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy", [True, False])
def test_matches_float64(backend, dtype, shape, entropy):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the Triton kernels compute in float32; float64 logits are refused")
    logits, target, temperature, upstream = make(*shape, dtype)
    if shape[0] > 2:
        target[1] = -1
    for t in (1.0, 0.7, temperature):
        want = run(reference.logprob, logits, target, upstream, torch.float64, entropy, temperature=t)
        with dispatch.forced(backend):
            got = run(logprob, logits, target, upstream, None, entropy, temperature=t)
        assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(got[0], want[0], torch.float32 if dtype != torch.float64 else dtype)
        if entropy:
            assert_close(got[1], want[1], torch.float32 if dtype != torch.float64 else dtype)
        assert got[2].dtype == dtype
        assert relative_error(got[2], want[2]) < GRADIENT_ERROR[dtype]


def test_reference_known_values():
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]], dtype=torch.float64)
    log_prob, entropy = reference.logprob(logits, torch.tensor([1, 0]))
    assert log_prob.tolist() == pytest.approx([math.log(0.75), -math.log(2)])
    assert entropy.tolist() == pytest.approx([-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)])
    log_prob, _ = reference.logprob(logits, torch.tensor([1, 0]), temperature=0.5)
    assert log_prob[0].item() == pytest.approx(math.log(0.9))  # 3² : 1


def test_reference_gradcheck():
    logits, target, temperature, _ = make(4, 6, torch.float64)
    logits, target, temperature = logits.cpu(), target.cpu(), temperature.cpu().double()
    target[2] = -100
    with dispatch.forced("reference"):
        assert torch.autograd.gradcheck(
            lambda z: logprob(z, target, temperature=temperature), [logits.requires_grad_()]
        )


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_impossible_logits(backend):
    """-inf among the logits is a probability of zero: no NaN comes of it, not even from a leading block of them."""
    logits, target, _, upstream = make(3, 2500, torch.float32)
    logits[0, :1] = -torch.inf
    logits[1, :2499] = -torch.inf
    logits[2, ::2] = -torch.inf
    target[:] = 2499
    with dispatch.forced(backend):
        log_prob, entropy, grad = run(logprob, logits, target, upstream)
    assert torch.isfinite(log_prob).all() and torch.isfinite(entropy).all() and torch.isfinite(grad).all()
    assert log_prob[1] == 0 and entropy[1] == 0 and grad[1].abs().max() < 1e-6
    assert (grad[2, ::2] == 0).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_impossible_target(backend):
    logits, target, _, upstream = make(1, 9, torch.float32)
    logits[0, 3], target[0] = -torch.inf, 3
    with dispatch.forced(backend):
        log_prob, entropy, grad = run(logprob, logits, target, upstream)
    assert log_prob.item() == -torch.inf and torch.isfinite(entropy).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_ignored_rows_are_exact_zeros(backend):
    logits, target, _, upstream = make(4, 33, torch.float32)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    target[1], target[2] = -1, -100
    with dispatch.forced(backend):
        log_prob, entropy, grad = run(logprob, logits, target, upstream)
    assert (log_prob[1:3] == 0).all() and (entropy[1:3] == 0).all() and (grad[1:3] == 0).all()
    assert (grad[[0, 3]] != 0).any()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_all_ignored_and_empty(backend):
    for n in (3, 0):
        logits = torch.randn(n, 5, device=DEVICE)
        target = torch.full((n,), -1, device=DEVICE)
        with dispatch.forced(backend):
            log_prob, entropy, grad = run(logprob, logits, target, torch.ones(2, n, device=DEVICE))
        assert log_prob.shape == entropy.shape == (n,) and not log_prob.any() and not entropy.any() and not grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_common_offset_changes_nothing(backend):
    logits, target, _, upstream = make(5, 300, torch.float32)
    logits = (logits * 4).round() / 4  # exact after adding 2^16 too
    with dispatch.forced(backend):
        low = run(logprob, logits, target, upstream)
        high = run(logprob, logits + 65536, target, upstream)
    for a, b in zip(low, high, strict=True):
        assert_close(a, b, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_rows_sum_to_zero(backend):
    logits, target, temperature, upstream = make(6, 777, torch.float32)
    with dispatch.forced(backend):
        _, entropy, grad = run(logprob, logits, target, upstream, temperature=temperature)
    assert grad.sum(1).abs().max() < 1e-4
    assert ((entropy >= 0) & (entropy <= math.log(777) + 1e-5)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows(backend):
    wide, target, _, _ = make(6, 200, torch.float32)
    view = wide[:, 8:137]
    target = target % 129
    with dispatch.forced(backend):
        a = logprob(view, target)
        b = logprob(view.contiguous(), target)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    with pytest.raises(ValueError, match="logits: expected unit stride"):
        logprob(wide[:, ::2], target)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_backward(backend):
    logits, target, temperature, upstream = make(5, 129, torch.float32)
    target[3] = -1
    with dispatch.forced(backend):
        want = run(logprob, logits, target, upstream, temperature=temperature)
        source = logits.clone().requires_grad_()
        z = source * 1.0
        log_prob, entropy = logprob(z, target, temperature=temperature, inplace_backward=True)
        z.retain_grad()
        ((log_prob * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
        assert torch.equal(source.grad, want[2])
        assert z.detach().data_ptr() == z.grad.data_ptr() or torch.equal(z.detach(), want[2])
        # Someone else still needing the logits is told, not handed the gradient instead.
        z = source * 1.0
        other = z.square().sum()  # made first, so its backward runs last
        log_prob, _ = logprob(z, target, temperature=temperature, inplace_backward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (log_prob.sum() + other).backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_one_output_used(backend):
    logits, target, _, _ = make(4, 50, torch.float32)
    for index in (0, 1):
        a = logits.clone().requires_grad_()
        b = logits.clone().double().requires_grad_()
        with dispatch.forced(backend):
            logprob(a, target)[index].sum().backward()
        reference.logprob(b, target)[index].sum().backward()
        assert relative_error(a.grad, b.grad) < 1e-5


def test_errors_name_the_argument():
    logits, target = torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)
    for kwargs, message in [
        ({"logits": torch.randn(3)}, "logits: expected 2 dimensions"),
        ({"logits": logits.long()}, "logits: expected float16"),
        ({"target": target[:2]}, r"target: expected shape \[3\], got \[2\]"),
        ({"target": target.int()}, "target: expected int64"),
        ({"target": target + 4}, "target: expected ids below 4, got 4"),
        ({"temperature": 0.0}, "temperature: expected a finite number above 0"),
        ({"temperature": torch.ones(2)}, "temperature: expected a number or a floating tensor"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, "temperature: expected finite values above 0"),
    ]:
        arguments = {"logits": logits, "target": target, **kwargs}
        with pytest.raises(ValueError, match=message):
            logprob(arguments.pop("logits"), arguments.pop("target"), **arguments)


def test_backend_asked_for_by_name(monkeypatch):
    logits, target = torch.randn(2, 4), torch.zeros(2, dtype=torch.int64)
    monkeypatch.setenv("MANUS_FAST_BACKEND", "fast")
    with pytest.raises(ValueError, match="MANUS_FAST_BACKEND: expected one of auto, reference"):
        logprob(logits, target)
    monkeypatch.setenv("MANUS_FAST_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="logprob: backend 'cuda' was asked for, but"):
        logprob(logits, target)
    monkeypatch.setenv("MANUS_FAST_BACKEND", "reference")
    assert torch.equal(logprob(logits, target)[0], reference.logprob(logits, target)[0])


def test_backends_lists_every_implementation():
    for op, table in dispatch.TABLE.items():
        status = dispatch.backends(op)
        assert list(status) == list(table) and status["reference"] == "ready"


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_node_of_a_whole_graph(backend, compiler):
    torch._dynamo.reset()
    for rows, entropy in ((5, True), (8, False)):
        logits, target, temperature, _ = make(rows, 129, torch.float32)

        def step(logits, target, temperature, entropy=entropy):
            # Written over the logits outside of a graph only: inside, `logits * 2` may be anybody's memory.
            given = {"temperature": temperature, "entropy": entropy, "inplace_backward": True}
            log_prob, row_entropy = logprob(logits * 2, target, **given)
            return log_prob.sum() + (row_entropy.sum() if entropy else 0)

        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend=compiler)):
            leaf = logits.clone().requires_grad_()
            with dispatch.forced(backend):
                value = function(leaf, target, temperature)
                value.backward()
            results.append((value.detach(), leaf.grad))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b) or (compiler == "inductor" and relative_error(a, b) < 1e-6)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_more_than_2_to_31_elements():
    n, v = 14200, 151936
    logits = torch.empty(n, v, dtype=torch.bfloat16, device=DEVICE)
    for rows in logits.split(1024):
        rows.normal_()
    target = torch.randint(0, v, (n,), device=DEVICE)
    want = reference.logprob(logits[-3:].double(), target[-3:])
    logits.requires_grad_()
    log_prob, entropy = logprob(logits, target, inplace_backward=True)
    assert_close(log_prob[-3:].detach(), want[0], torch.float32)
    assert_close(entropy[-3:].detach(), want[1], torch.float32)
    tail = logits[-3:].detach().double().requires_grad_()
    reference.logprob(tail, target[-3:])[0].sum().backward()
    log_prob.sum().backward()
    assert relative_error(logits.grad[-3:], tail.grad) < GRADIENT_ERROR[torch.bfloat16]
