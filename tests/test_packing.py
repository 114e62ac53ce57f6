import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import random_rows

from manus_fast.data.packing import PackedRows, micro_batch_rows, micro_batches, pack


def test_tokens_lie_end_to_end_with_their_own_positions():
    rows = random_rows(5)
    packed = pack(rows)
    assert packed.tokens == sum(len(row) for row in rows)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_length == max(len(row) for row in rows)
    for number, row in enumerate(rows):
        start, end = packed.cu_seqlens[number : number + 2].tolist()
        assert np.array_equal(packed.token_ids[start:end].numpy(), row.token_ids)
        assert packed.position_ids[start:end].tolist() == list(range(len(row)))
        assert (packed.row[start:end] == number).all()
        assert not packed.loss_mask[start]
    assert torch.equal(packed.trainable, packed.loss_mask.nonzero().squeeze(1))


def test_selecting_rows_is_packing_them():
    rows = random_rows(7)
    packed = pack(rows)
    packed.value = torch.arange(packed.tokens, dtype=torch.float32)
    packed.last_value = torch.arange(packed.rows, dtype=torch.float32)
    order = [4, 0, 6]
    chosen = packed.select(order)
    fresh = pack([rows[i] for i in order])
    for name in ("token_ids", "position_ids", "loss_mask", "turn_id", "rollout_log_prob", "reward", "row", "cu_seqlens",
                 "episode", "terminated", "trainable"):  # fmt: skip
        assert torch.equal(getattr(chosen, name), getattr(fresh, name)), name
    spans = [torch.arange(packed.cu_seqlens[i], packed.cu_seqlens[i + 1]) for i in order]
    assert torch.equal(chosen.value, torch.cat(spans).float())
    assert chosen.last_value.tolist() == [4.0, 0.0, 6.0]
    assert chosen.advantage is None
    again = chosen.select([2])
    assert torch.equal(again.token_ids, pack([rows[6]]).token_ids)
    assert torch.equal(again.trainable, pack([rows[6]]).trainable)


def test_selecting_a_row_that_is_not_there():
    with pytest.raises(ValueError, match=r"index: expected rows in \[0, 2\), got 0..2"):
        pack(random_rows(2)).select([0, 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda row: row.loss_mask.__setitem__(0, True), "loss_mask: expected False at position 0"),
        (lambda row: setattr(row, "reward", row.reward[1:]), r"rows\[1\].reward: expected length"),
        (lambda row: setattr(row, "token_ids", row.token_ids[:0]), r"rows\[1\]: expected at least one token"),
    ],
)
def test_bad_rows_are_refused(spoil, message):
    rows = random_rows(2)
    spoil(rows[1])
    with pytest.raises(ValueError, match=message):
        pack(rows)
    with pytest.raises(ValueError, match=r"expected at least one row"):
        pack([])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(1, 120),
)
def test_micro_batches_hold_every_row_once_within_the_limits(lengths, max_rows, max_tokens):
    packs = micro_batches(lengths, max_rows=max_rows, max_tokens=max_tokens)
    assert sorted(np.concatenate(packs).tolist()) == list(range(len(lengths)))
    for rows in packs:
        assert max_rows is None or len(rows) <= max_rows
        assert max_tokens is None or len(rows) == 1 or sum(lengths[i] for i in rows) <= max_tokens


def test_micro_batches_are_even():
    """By hand: 100 | 50, 40, 1, 1, 1 | 50, 30, 30."""
    lengths = [100, 1, 1, 1, 50, 50, 30, 30, 40]
    loads = [sum(lengths[i] for i in rows) for rows in micro_batches(lengths, max_tokens=120)]
    assert sorted(loads) == [93, 100, 110]
    assert [len(rows) for rows in micro_batches([5] * 8, max_rows=4)] == [4, 4]
    assert micro_batches([], max_rows=4) == []


def test_micro_batch_size_must_divide():
    assert micro_batch_rows(64, 2, 4) == 8
    with pytest.raises(ValueError, match=r"ppo.batch_size: expected a multiple of .* 2 × 3 = 6, got 64"):
        micro_batch_rows(64, 2, 3)


def test_moving_keeps_fields():
    packed = pack(random_rows(2)).to("cpu")
    assert isinstance(packed, PackedRows) and packed.value is None and packed.rows == 2
