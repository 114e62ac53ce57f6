"""Attention of one token per sequence over a slot cache, sequence by sequence."""

import torch


def slot_attention(query, keys, values, slots, lengths, scale):
    """The arguments of `manus_fast.ops.slot_attention`, checked."""
    rows = []
    for row, slot, length in zip(query, slots.tolist(), lengths.tolist(), strict=True):
        k, v = keys[slot, :, :length], values[slot, :, :length]
        rows.append(torch.softmax(row @ k.transpose(1, 2) * scale, dim=-1) @ v)
    return torch.stack(rows) if rows else torch.empty_like(query)
