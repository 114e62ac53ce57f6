"""Hidden states of some tokens only: the last layer need not compute the others.

    hidden, (predicts, ends) = hidden_at(model, ids, positions, plan, predicts, ends)

A loss reads the hidden states before trained tokens; of a row's other tokens (prompts, observations) the last layer has
to give keys and values to attend to, but no queries, no output and no MLP. With half of the tokens trained that is a
fifth of the work of a decoder of two layers, and a fiftieth of one of thirty. It is done where attention takes part of
a row's queries: on the CPU in float32 (`ops.packed_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from manus_fast.modeling.attention import AttentionPlan, PackedRows, planned_hidden
from manus_fast.modeling.lora import base_model
from manus_fast.ops.packed_attention import kernel_takes, packed_attention


def hidden_at(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    plan: AttentionPlan,
    *wanted: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """`planned_hidden` at the `wanted` positions, int64 each, at least.

    Returns:
        Hidden states [K, H], and for each of `wanted` the rows of them where its positions are.
    """
    layer = _layer_to_narrow(model, plan)
    if layer is None:
        return planned_hidden(model, input_ids, position_ids, plan), wanted
    mark = torch.zeros(len(input_ids), dtype=torch.bool)
    for index in wanted:
        mark[index] = True
    kept, rest = mark.nonzero()[:, 0], (~mark).nonzero()[:, 0]
    if not len(kept) or not len(rest):
        return planned_hidden(model, input_ids, position_ids, plan), wanted

    def narrow(layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        others = _KeysAlone()
        try:
            part = _pick((args, {**kwargs, "attention_plan": others}), rest, len(input_ids))
            layer.forward(*part[0], **part[1])
        except _Collected:
            pass
        narrowed = _SomeQueries(plan, others, kept, rest)
        return _pick((args, {**kwargs, "attention_plan": narrowed}), kept, len(input_ids))

    hook = layer.register_forward_pre_hook(narrow, with_kwargs=True)
    try:
        hidden = planned_hidden(model, input_ids, position_ids, plan)
    finally:
        hook.remove()
    where = torch.empty(len(input_ids), dtype=torch.int64)
    where[kept] = torch.arange(len(kept))
    return hidden, tuple(where[index] for index in wanted)


def _layer_to_narrow(model: PreTrainedModel, plan: AttentionPlan) -> torch.nn.Module | None:
    """The last layer, or None where all of it has to be computed: attention takes whole rows, or something else has a
    hand in the layer's call (compilation, checkpointing, hooks of who divides its weights)."""
    base = base_model(model)
    config, weight = base.config.get_text_config(), next(base.parameters())
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not isinstance(plan, PackedRows) or not kernel_takes(weight.device, weight.dtype, dim):
        return None
    layers = getattr(base.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return None
    layer = layers[-1]
    checkpointed = getattr(layer, "gradient_checkpointing", False) and layer.training
    taken = layer._compiled_call_impl is not None or layer._forward_pre_hooks or layer._forward_hooks
    return None if checkpointed or taken else layer


def _pick(x: Any, index: torch.Tensor, tokens: int) -> Any:
    """Of a layer's arguments those parts that belong to some tokens: [1, tokens, …], or [tokens]."""
    if isinstance(x, dict):
        return {name: _pick(value, index, tokens) for name, value in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(_pick(value, index, tokens) for value in x)
    if isinstance(x, torch.Tensor) and x.dim() and x.shape[min(1, x.dim() - 1)] == tokens:
        return x.index_select(min(1, x.dim() - 1), index)
    return x


class _Collected(Exception):
    """Leaves a layer when its attention has been asked for."""


class _KeysAlone:
    """The plan for tokens whose keys and values are all that is needed."""

    key: torch.Tensor
    value: torch.Tensor

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        self.key, self.value = key, value
        raise _Collected


class _SomeQueries:
    """The plan for the tokens `kept` of packed rows, beside the keys and values of the `rest`."""

    def __init__(self, plan: PackedRows, others: _KeysAlone, kept: torch.Tensor, rest: torch.Tensor):
        self._others, self._cu_keys = others, plan.cu_seqlens
        self._order = torch.cat([rest, kept]).argsort()
        self._cu_queries = torch.searchsorted(kept, plan.cu_seqlens.long()).int()
        self._seen = plan.seen()[kept]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        keys, values = (
            torch.cat([x[0], y[0]], dim=1).transpose(0, 1).index_select(0, self._order)
            for x, y in ((self._others.key, key), (self._others.value, value))
        )
        scale = query.shape[3] ** -0.5 if scale is None else scale
        query = query[0].transpose(0, 1)
        return packed_attention(query, keys, values, self._cu_queries, self._cu_keys, self._seen, scale)
