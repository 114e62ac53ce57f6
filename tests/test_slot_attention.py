"""Attention over a slot cache: the kernel against float64, its edges and refusals."""

import pytest
import torch

from manus_fast.ops import dispatch, slot_attention


def make(n=5, heads=2, group=2, dim=32, slots=7, length=70, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(n, heads, group, dim, generator=g, dtype=dtype)
    keys = torch.randn(slots, heads, length, dim, generator=g, dtype=dtype)
    values = torch.randn(slots, heads, length, dim, generator=g, dtype=dtype)
    where = torch.randperm(slots, generator=g)[:n]
    lengths = torch.randint(1, length + 1, (n,), generator=g)
    return query, keys, values, where, lengths


def exact(query, keys, values, slots, lengths, scale):
    with dispatch.forced("reference"):
        return slot_attention(*(x.double() for x in (query, keys, values)), slots, lengths, scale)


def test_reference_by_hand():
    # scores ln 1 and ln 3 -> weights 1/4 and 3/4; the third token lies beyond the length
    query = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    keys = torch.tensor([[[[0.0, 5.0], [3.0, 0.0], [9.0, 9.0]]]], dtype=torch.float64).log1p()
    keys[0, 0, 1, 0] = torch.tensor(3.0).double().log()
    values = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [7.0, 7.0]]]], dtype=torch.float64)
    with dispatch.forced("reference"):
        output = slot_attention(query, keys, values, torch.tensor([0]), torch.tensor([2]), 1.0)
    torch.testing.assert_close(output[0, 0, 0], torch.tensor([0.25, 0.75], dtype=torch.float64))


@pytest.mark.parametrize("heads, group", [(1, 1), (2, 2), (3, 3), (2, 4), (1, 7)])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 128, 256])
def test_kernel_against_float64(heads, group, dim):
    with dispatch.forced("cpu"):
        for length in (1, 7, 16, 33, 129):
            inputs = make(heads=heads, group=group, dim=dim, length=length)
            output = slot_attention(*inputs, dim**-0.5)
            torch.testing.assert_close(output.double(), exact(*inputs, dim**-0.5), rtol=1e-5, atol=2e-6)


def test_nothing_beyond_the_length_is_seen():
    query, keys, values, slots, lengths = make()
    with dispatch.forced("cpu"):
        before = slot_attention(query, keys, values, slots, lengths, 0.2)
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            keys[slot, :, length:] = torch.nan
            values[slot, :, length:] = torch.nan
        assert torch.equal(slot_attention(query, keys, values, slots, lengths, 0.2), before)


def test_large_scores_do_not_overflow():
    query, keys, values, slots, lengths = make(length=40)
    inputs = (query * 100, keys, values, slots, lengths)
    with dispatch.forced("cpu"):
        output = slot_attention(*inputs, 1.0)
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), exact(*inputs, 1.0), rtol=1e-3, atol=1e-3)


def test_any_number_of_threads_gives_the_same_bits():
    inputs = make(n=40, slots=40)
    extension = dispatch.extension()
    threads = extension.num_threads()
    outputs = []
    with dispatch.forced("cpu"):
        for n in (1, 2, 5):
            extension.set_num_threads(n)
            outputs.append(slot_attention(*inputs, 0.2))
    extension.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_no_sequence():
    for backend in ("cpu", "reference"):
        with dispatch.forced(backend):
            assert slot_attention(*make(n=0), 1.0).shape == (0, 2, 2, 32)


def test_other_dtypes_and_sizes_run_on_the_reference():
    inputs = make(dim=24)
    torch.testing.assert_close(slot_attention(*inputs, 0.3).double(), exact(*inputs, 0.3), rtol=1e-5, atol=1e-5)
    for odd in (make(dim=24), make(dtype=torch.float64)):
        with dispatch.forced("cpu"), pytest.raises(ValueError, match="multiple of 16"):
            slot_attention(*odd, 0.3)


@pytest.mark.parametrize(
    "place, wrong, words",
    [
        (0, torch.zeros(5, 2, 32), "query"),
        (1, torch.zeros(7, 3, 70, 32), "keys"),
        (2, torch.zeros(7, 2, 60, 32), "values"),
        (1, torch.zeros(7, 2, 70, 32, dtype=torch.float64), "keys"),
        (3, torch.full((5,), 7), "slots: expected 0 … 6, got 7 … 7"),
        (3, torch.zeros(5, dtype=torch.int32), "slots"),
        (4, torch.zeros(5, dtype=torch.int64), "lengths: expected 1 … 70, got 0 … 0"),
        (4, torch.full((5,), 71), "lengths"),
        (1, torch.zeros(7, 2, 32, 70).transpose(2, 3), "contiguous"),
    ],
)
def test_refusals(place, wrong, words):
    inputs = list(make())
    inputs[place] = wrong
    with pytest.raises(ValueError, match=words):
        slot_attention(*inputs, 1.0)
