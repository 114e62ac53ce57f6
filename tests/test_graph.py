"""A node of a compiled graph whose backward asks for what its forward left (manus_fast/ops/graph.py)."""

import gc

import pytest
import torch

from manus_fast.ops import dispatch, graph, linear_logprob, logprob

LOGITS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([3, -1, 39, 0, 7])


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def test_what_a_forward_left_goes_with_the_graph():
    gc.collect()
    before = len(graph._recorded)
    logits = LOGITS.clone().requires_grad_()
    loss = compiled(lambda z: logprob(z, TARGET)[0].sum())(logits)
    assert len(graph._recorded) == before + 1
    loss.backward()
    del loss
    gc.collect()
    assert len(graph._recorded) == before
    abandoned = compiled(lambda z: logprob(z, TARGET)[0].sum())(logits)  # no backward at all
    del abandoned
    gc.collect()
    assert len(graph._recorded) == before


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_is_left_where_no_gradient_is_asked_of(trained):
    before = len(graph._recorded)
    logits = LOGITS.clone().requires_grad_(trained)
    with torch.set_grad_enabled(not trained):
        out = compiled(lambda z: logprob(z, TARGET))(logits)
    assert not any(x.requires_grad for x in out) and len(graph._recorded) == before


def test_an_output_that_enters_no_loss_has_no_part_in_the_gradient():
    weight = torch.randn(40, 8)
    gradients = []
    for backend in (None, "eager", "aot_eager"):
        hidden = torch.ones(5, 8, requires_grad=True)

        def step(h):
            return linear_logprob(h, weight, TARGET)

        log_prob, _ = (step if backend is None else compiled(step, backend))(hidden)
        log_prob.sum().backward()
        gradients.append(hidden.grad)
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-6, atol=1e-7)


def test_a_second_backward_gives_the_same_gradient_again():
    logits = LOGITS.clone().requires_grad_()
    loss = compiled(lambda z: logprob(z, TARGET)[0].sum(), "eager")(logits)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])


def test_other_sizes_and_float64_run_through_the_same_function():
    whole = compiled(lambda z, t: logprob(z, t)[1].sum())
    for rows, dtype in ((5, torch.float32), (3, torch.float32), (2, torch.float64)):
        logits = LOGITS[:rows].to(dtype).requires_grad_()
        value = whole(logits, TARGET[:rows])
        assert value.dtype == dtype
        (gradient,) = torch.autograd.grad(value, logits)
        (want,) = torch.autograd.grad(logprob(logits, TARGET[:rows])[1].sum(), logits)
        assert torch.equal(gradient, want)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_node_returns_what_tracing_foresees(dtype, entropy):
    """An entropy not asked for too: code that a compiler makes from the foreseen types would read it wrongly."""
    logits, trained = LOGITS.to(dtype), [False]
    torch.library.opcheck(
        torch.ops.manus_fast.logprob,
        (logits, TARGET, None, 1.0, entropy, trained),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.manus_fast.linear_logprob,
        (logits, logits.clone(), None, TARGET % 5, None, 1.0, entropy, None, "auto", None, trained * 3),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_wrong_arguments_are_refused_when_the_graph_runs():
    with pytest.raises(ValueError, match="target: expected ids below 40, got 40"):
        compiled(lambda z: logprob(z, TARGET + 1)[0])(LOGITS)


def test_the_backend_is_chosen_when_the_graph_runs():
    whole = compiled(lambda z: logprob(z, TARGET)[0].sum())
    for name in ("reference", "cpu"):
        with dispatch.forced(name):
            logits = LOGITS.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(whole(logits), logits)
            (want,) = torch.autograd.grad(logprob(logits, TARGET)[0].sum(), logits)
            assert torch.equal(gradient, want)
