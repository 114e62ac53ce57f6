"""Attention of one token per sequence over a slot cache on the CPU: csrc/ops/slot_attention_cpu.cpp."""

import torch

from manus_fast.ops import dispatch


def slot_attention(query, keys, values, slots, lengths, scale):
    """The arguments of `manus_fast.ops.slot_attention`, checked; float32 on the CPU, D a multiple of 16 up to 256."""
    output = torch.empty_like(query)
    dispatch.extension().slot_attention_cpu(
        query=query.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(), slots=slots.data_ptr(),
        lengths=lengths.data_ptr(), n=query.shape[0], heads=query.shape[1], group=query.shape[2], length=keys.shape[2],
        dim=query.shape[3], scale=scale, output=output.data_ptr(),
    )  # fmt: skip
    return output
