"""Attention without padding for any Hugging Face decoder that uses the attention interface.

`use_packed_attention(model)` routes a model's attention through `_attend`, which leaves the work to the *plan* given
to the forward call. The decoder itself then sees one sequence of N tokens, so its linear layers run on flat tokens:

- `PackedRows`: training rows laid end to end. Rows never see each other and each is causal.
- `TreePlan` (tree_attention.py): the same rows with every common beginning once.
- `SlotPlan` (slot_cache.py): new tokens of many episodes, each against the cached keys and values of its slot.

No [N, N] mask exists on any path: the name is not in transformers' mask interface, which makes the model skip masks.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from manus_fast.modeling.lora import base_model
from manus_fast.ops.packed_attention import kernel_takes, packed_attention

IMPLEMENTATION = "manus_fast_packed"

# torch 2.11's varlen_attn takes fewer key heads than query heads as they come; later ones want to be told.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

# Extra arguments that models hand to their attention function and that change its result.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


class AttentionPlan(Protocol):
    """Which tokens see which; handed to the model's forward as `attention_plan`."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """query [1, Hq, N, D], key and value [1, Hkv, N, D] -> [N, Hq, D]."""
        ...


@torch.compiler.disable  # a compiled layer breaks its graph here: a plan's numbers change with every call
def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if attention_plan is None:
        raise ValueError("attention_plan: expected a call through packed_hidden or an engine, got a plain forward call")
    if attention_mask is not None:
        raise ValueError("attention_mask: expected none, since the plan says which tokens see which")
    if dropout:
        raise ValueError(f"model: expected no attention dropout, got {dropout}")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"model: expected plain causal attention, got a model that uses {name}")
    output = attention_plan.attend(module.layer_idx, query, key, value, scaling)
    return output.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switches `model` (any causal decoder) to packed attention, in place; calling it twice is fine.

    Raises:
        ValueError: the model does not use transformers' attention interface, or needs attention that packed rows do
            not offer (sliding or chunked windows).
    """
    model = base_model(model)
    name = type(model).__name__
    if not type(model)._supports_attention_backend:
        raise ValueError(f"model: expected a decoder that uses the attention interface, got {name}")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = not kinds and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds - {"full_attention"} or windowed:
        got = ", ".join(sorted(kinds - {"full_attention"})) or f"a sliding window of {config.sliding_window}"
        raise ValueError(f"model: expected full causal attention in every layer, got {got} ({name})")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Their frequencies follow the longest sequence of the batch, so a row would depend on its neighbours.
        raise ValueError(f"model: expected fixed rotary frequencies, got rope type {rope['rope_type']!r} ({name})")
    model.set_attn_implementation(IMPLEMENTATION)


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Has torch.compile fuse the element-wise work of each decoder layer, in place.

    All layers share one compiled code, whatever the number of tokens; the first call takes tens of seconds. What runs
    between the products (norms, rotary positions, gates) then reads and writes memory about half as often.

    Raises:
        ValueError: the decoder keeps no list of layers.
    """
    for layer in decoder_layers(model, "model.compile"):
        layer.compile(dynamic=True, backend=backend)


def decoder_layers(model: PreTrainedModel, key: str = "model") -> torch.nn.ModuleList:
    """The decoder's layers; without them a ValueError names `key`."""
    decoder = base_model(model)
    decoder = getattr(decoder, "base_model", decoder)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ValueError(f"{key}: expected a decoder with a list of layers, got {type(decoder).__name__}")
    return layers


def output_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The lm head, whose plain product with the hidden states is the logits.

    Raises:
        ValueError: the model scales or caps its logits after the head.
    """
    model = base_model(model)
    config = model.config.get_text_config()
    for name, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1), ("logit_scale", 1)):
        value = getattr(config, name, None)
        if value not in (None, neutral):
            raise ValueError(f"model: expected logits straight from the lm head, got {name} = {value}")
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(f"model: expected a causal language model with an lm head, got {type(model).__name__}")
    return head


def packed_hidden(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    """Hidden states of packed rows: the decoder without its lm head.

    Args:
        model: a causal LM or bare decoder after `use_packed_attention`; a PEFT wrapper is looked through.
        input_ids: int64 [N], rows laid end to end.
        position_ids: int64 [N], starting anew in each row.
        cu_seqlens: int32 [R+1] from 0 to N: where rows begin and end. Rows of length zero are allowed.
        max_length: length of the longest row.

    Returns:
        [N, H] in the model's dtype, differentiable; works under gradient checkpointing.
    """
    return planned_hidden(model, input_ids, position_ids, PackedRows(cu_seqlens, max_length))


def planned_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """`packed_hidden` under any plan: hidden states [N, H] of the tokens `input_ids`, int64 [N]."""
    if input_ids.dim() != 1 or position_ids.shape != input_ids.shape:
        raise ValueError(
            f"input_ids, position_ids: expected one shape [N], got {list(input_ids.shape)} and "
            f"{list(position_ids.shape)}"
        )
    decoder = base_model(model).base_model
    output = decoder(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        use_cache=False,
        attention_plan=plan,
    )
    return output.last_hidden_state[0]


class PackedRows:
    """The plan for packed training rows: causal inside each row."""

    def __init__(self, cu_seqlens: torch.Tensor, max_length: int):
        if cu_seqlens.dtype != torch.int32:
            raise ValueError(f"cu_seqlens: expected int32, got {cu_seqlens.dtype}")
        self.cu_seqlens = cu_seqlens
        self.max_length = max_length
        self._lengths: list[int] | None = None
        self._seen: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            spans, longest = (self.cu_seqlens, self.cu_seqlens), self.max_length
            return varlen_causal(query, key, value, *spans, longest, longest, scale)
        if self._lengths is None:  # once per forward: on CUDA this waits for the device
            self._lengths = [n for n in self.cu_seqlens.diff().tolist() if n]
            if sum(self._lengths) != query.shape[2]:
                raise ValueError(
                    f"cu_seqlens: expected rows that cover {query.shape[2]} tokens, got {sum(self._lengths)}"
                )
        if kernel_takes(query.device, query.dtype, query.shape[3]) and value.shape == key.shape:
            spans = (self.cu_seqlens, self.cu_seqlens)
            scale = query.shape[3] ** -0.5 if scale is None else scale
            return packed_attention(*(x[0].transpose(0, 1) for x in (query, key, value)), *spans, self.seen(), scale)
        rows = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            for q, k, v in zip(*(x.split(self._lengths, dim=2) for x in (query, key, value)), strict=True)
        ]
        return torch.cat(rows, dim=2)[0].transpose(0, 1)

    def seen(self) -> torch.Tensor:
        """int64 [N], on the CPU: how many tokens of its row a token sees, itself included."""
        if self._seen is None:
            starts, lengths = self.cu_seqlens[:-1].long(), self.cu_seqlens.diff().long()
            self._seen = torch.arange(1, int(self.cu_seqlens[-1]) + 1) - starts.repeat_interleave(lengths)
        return self._seen


def varlen_causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float | None,
) -> torch.Tensor:
    """torch's kernel for sequences laid end to end, in half precision on a GPU: query [1, Hq, N, D], key and value
    [1, Hkv, M, D], cu_queries and cu_keys int32 [R+1] -> [N, Hq, D]. Causal, a sequence's last query over its last key.
    """
    return varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_queries,
        cu_keys,
        longest_query,
        longest_key,
        scale=scale,
        window_size=(-1, 0),  # everything to the left, nothing to the right
        **(_GROUPED if query.shape[1] != key.shape[1] else {}),
    )
