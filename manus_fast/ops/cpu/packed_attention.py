"""Causal attention of rows laid end to end on the CPU: csrc/ops/packed_attention_cpu.cpp under autograd."""

import torch
from torch.autograd.function import once_differentiable

from manus_fast.ops import dispatch


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, cu_queries, cu_keys, seen, scale):
        output = query.new_empty(query.shape)
        log_sum = query.new_empty(query.shape[:2])
        saved = (query, key, value, cu_queries.contiguous(), cu_keys.contiguous(), seen.contiguous(), output, log_sum)
        dispatch.extension().packed_attention_cpu(**_arguments(*saved, scale))
        ctx.save_for_backward(*saved)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        query, key, value = ctx.saved_tensors[:3]
        grad_output = grad_output.contiguous()
        gradients = [x.new_empty(x.shape) for x in (query, key, value)]
        dispatch.extension().packed_attention_gradient_cpu(
            **_arguments(*ctx.saved_tensors, ctx.scale), grad_output=grad_output.data_ptr(),
            grad_query=gradients[0].data_ptr(), grad_key=gradients[1].data_ptr(), grad_value=gradients[2].data_ptr(),
        )  # fmt: skip
        return *gradients, None, None, None, None


def _arguments(query, key, value, cu_queries, cu_keys, seen, output, log_sum, scale) -> dict:
    return {
        "query": query.data_ptr(), "key": key.data_ptr(), "value": value.data_ptr(),
        "query_token": query.stride(0), "query_head": query.stride(1), "key_token": key.stride(0),
        "key_head": key.stride(1), "value_token": value.stride(0), "value_head": value.stride(1),
        "cu_queries": cu_queries.data_ptr(), "cu_keys": cu_keys.data_ptr(), "seen": seen.data_ptr(),
        "rows": len(cu_queries) - 1, "heads": key.shape[1], "group": query.shape[1] // key.shape[1],
        "dim": query.shape[2], "scale": scale, "output": output.data_ptr(), "log_sum": log_sum.data_ptr(),
    }  # fmt: skip


def packed_attention(query, key, value, cu_queries, cu_keys, seen, scale):
    """`manus_fast.ops.packed_attention` on the CPU; arguments already checked."""
    return _PackedAttention.apply(query, key, value, cu_queries, cu_keys, seen, scale)
