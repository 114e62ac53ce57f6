"""Attention of rows laid end to end: kernel and gradients against float64, what is not seen, and refusals."""

import pytest
import torch

from manus_fast.ops import dispatch, packed_attention

ROWS = ([7, 0, 33, 1], [9, 5, 33, 0])  # keys of each row; queries of each row, any of them


def make(heads=2, group=2, dim=32, rows=ROWS, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    keys, queries = [n for n in rows[0]], [m if n else 0 for n, m in zip(*rows, strict=True)]
    query = torch.randn(sum(queries), heads * group, dim, generator=g, dtype=dtype)
    key, value = (torch.randn(sum(keys), heads, dim, generator=g, dtype=dtype) for _ in range(2))
    seen = torch.cat([torch.randint(1, n + 1, (m,), generator=g) for n, m in zip(keys, queries, strict=True) if n])
    spans = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
    return query, key, value, *spans, seen, dim**-0.5


def run(backend, inputs, upstream=None):
    """Output and, with `upstream`, the gradients of query, key and value."""
    tensors = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    with dispatch.forced(backend):
        output = packed_attention(*tensors, *inputs[3:])
        if upstream is None:
            return [output.detach()]
        return [output.detach(), *torch.autograd.grad(output, tensors, upstream)]


def exact(inputs, upstream):
    return run("reference", [*(x.double() for x in inputs[:3]), *inputs[3:]], upstream.double())


def test_reference_by_hand():
    # scores ln 1, ln 3 -> weights 1/4 and 3/4 for the query that sees both; the other sees the first key alone
    key = torch.tensor([[[0.0, 5.0]], [[3.0, 0.0]]], dtype=torch.float64)
    key[1, 0, 0] = torch.tensor(3.0).double().log()
    value = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    query = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64)
    spans = torch.tensor([0, 2], dtype=torch.int32)
    with dispatch.forced("reference"):
        output = packed_attention(query, key, value, spans, spans, torch.tensor([1, 2]), 1.0)
    expected = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    torch.testing.assert_close(output[:, 0], expected)


@pytest.mark.parametrize("heads, group", [(1, 1), (2, 2), (3, 3), (1, 7), (1, 64)])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 256])
def test_kernel_and_gradients_against_float64(heads, group, dim):
    for rows in (ROWS, ([1], [1]), ([129, 16], [200, 16]), ([17] * 5, [3] * 5)):
        inputs = make(heads, group, dim, rows)
        upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
        for got, expected in zip(run("cpu", inputs, upstream), exact(inputs, upstream), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5)


def test_large_scores_do_not_overflow():
    query, *rest = make()
    inputs = [query * 1e4, *rest]
    upstream = torch.ones_like(query)
    output, *gradients = run("cpu", inputs, upstream)
    torch.testing.assert_close(output.double(), exact(inputs, upstream)[0], rtol=1e-3, atol=1e-3)
    assert all(bool(g.isfinite().all()) for g in gradients)


def test_what_no_query_sees_is_not_read_and_gets_no_gradient():
    inputs = make(rows=([20, 5], [6, 5]))
    inputs[5][:] = torch.tensor([1, 3, 17, 17, 2, 9, 1, 2, 3, 4, 4])
    upstream = torch.ones_like(inputs[0])
    plain = run("cpu", inputs, upstream)
    for tensor in inputs[1:3]:
        tensor[17:20] = 1e30
        tensor[24:] = 1e30
    changed = run("cpu", inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))
    for gradient in changed[2:]:
        assert not gradient[17:20].any() and not gradient[24:].any()


def test_any_strides_of_tokens_and_heads():
    query, key, value, *rest = make()
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    wide = [torch.cat([x, x], dim=-1)[..., : x.shape[-1]] for x in (query, key, value)]
    upstream = torch.randn(query.shape, generator=torch.Generator().manual_seed(1))
    with dispatch.forced("cpu"):
        results = []
        for tensors in ((query, key, value), turned, wide):
            tensors = [x.detach().requires_grad_() for x in tensors]
            output = packed_attention(*tensors, *rest)
            results.append([output, *torch.autograd.grad(output, tensors, upstream.transpose(0, 1).transpose(0, 1))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_threads_change_nothing():
    extension, inputs = dispatch.extension(), make(rows=([40, 90, 3, 64] * 4, [40, 90, 3, 64] * 4))
    upstream = torch.ones_like(inputs[0])
    threads, results = extension.num_threads(), []
    try:
        for n in (1, 4):
            extension.set_num_threads(n)
            results.append(run("cpu", inputs, upstream))
    finally:
        extension.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_queries_and_no_rows():
    for rows in (([], []), ([3, 2], [0, 0])):
        keys, queries = rows
        spans = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
        empty, full = torch.zeros(0, 4, 32, requires_grad=True), torch.ones(sum(keys), 2, 32, requires_grad=True)
        for backend in ("cpu", "reference"):
            with dispatch.forced(backend):
                output = packed_attention(empty, full, full, *spans, torch.zeros(0).long(), 1.0)
            assert output.shape == (0, 4, 32)
            output.sum().backward()


def test_other_dtypes_and_dims_run_on_the_reference():
    for options in ({"dtype": torch.float64}, {"dim": 8}):
        inputs = make(**options)
        torch.testing.assert_close(packed_attention(*inputs), run("reference", inputs)[0])
        with dispatch.forced("cpu"), pytest.raises(ValueError, match="query: expected float32 and D a multiple of 16"):
            packed_attention(*inputs)


@pytest.mark.parametrize(
    "place, change, message",
    [
        (0, lambda x: x[..., ::2], "query: expected .* unit stride along D"),
        (0, lambda x: x[0], "query: expected"),
        (1, lambda x: x.double(), "key: expected torch.float32"),
        (1, lambda x: x[:-1], "key, value: expected one shape"),
        (0, lambda x: x[:, :3], "key, value: expected one shape .* a divisor of 3"),
        (3, lambda x: x.long(), "cu_queries: expected int32"),
        (4, lambda x: x[:-1], "cu_keys: expected int32"),
        (4, lambda x: x.flip(0), "cu_keys: expected an ascent from 0 to 41"),
        (5, lambda x: x[:-1], r"seen: expected int64 \[42\]"),
        (5, lambda x: x * 0, "seen: expected from 1"),
        (5, lambda x: x + 40, "seen: expected from 1"),
    ],
)
def test_refusals(place, change, message):
    inputs = list(make())
    inputs[place] = change(inputs[place])
    with pytest.raises(ValueError, match=message):
        packed_attention(*inputs)
