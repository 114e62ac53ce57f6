"""A key/value cache with one slot per episode, and the attention plan that decodes and prefills in one forward call.

Layout per layer: [slots, Hkv, length, D]. The cache of the first n slots is a view [n, Hkv, L, D] that attention reads
without copying, each head's tokens side by side; all new tokens of a step are written by one index copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from manus_fast.ops.slot_attention import kernel_takes, slot_attention

# Lengths are rounded up to a multiple of this, so that kernels meet few shapes and CUDA's mask alignment holds.
_BLOCK = 32


class SlotCache:
    """Keys and values of `slots` episodes of at most `length` tokens. Memory is taken at the first use of a layer."""

    def __init__(self, slots: int, length: int):
        self.slots = slots
        self.length = -(-length // _BLOCK) * _BLOCK
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two buffers [slots, Hkv, length, D] of a layer, shaped after its first keys and values [1, Hkv, N, D]."""
        buffers = self._layers.get(index)
        if buffers is None:
            # Zeros, not empty: masked positions are multiplied by 0, which a stray NaN would survive.
            buffers = tuple(x.new_zeros(self.slots, x.shape[1], self.length, x.shape[3]) for x in (key, value))
            self._layers[index] = buffers
        return buffers

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot to another in all layers."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[target, :, :length] = buffer[source, :, :length]

    def free(self) -> None:
        self._layers.clear()


@dataclass(frozen=True)
class Prefill:
    """`count` new tokens of `slot`, the first of them at position `start`."""

    slot: int
    start: int
    count: int


class SlotPlan:
    """One step: the flat batch is one token for each of `decode`'s slots, then the tokens of each prefill in order.

    Args:
        cache: where keys and values live.
        decode: int64 [n] slots in ascending order that compute one token.
        decode_positions: int64 [n] position of that token in its slot.
        prefills: slots that compute several tokens.
        device: where the model runs.
        dtype: of the attention mask, the model's own.
    """

    def __init__(
        self,
        cache: SlotCache,
        decode: np.ndarray,
        decode_positions: np.ndarray,
        prefills: list[Prefill],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.cache = cache
        self.prefills = prefills
        self.decodes = len(decode)
        self._token_slots = np.concatenate([decode, *(np.full(p.count, p.slot) for p in prefills)])
        self._token_positions = np.concatenate(
            [decode_positions, *(np.arange(p.start, p.start + p.count) for p in prefills)]
        )
        self._where: dict[int, torch.Tensor] = {}
        self._masks = [_prefill_mask(p, device, dtype) for p in prefills]
        self._decode_slots, self._decode_positions = decode, decode_positions
        self._device, self._dtype = device, dtype
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        self._padded: _PaddedDecode | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        keys, values = self.cache.layer(layer, key, value)
        where = self._rows(keys.shape[1])
        keys.view(-1, keys.shape[3]).index_copy_(0, where, key[0].flatten(0, 1))
        values.view(-1, values.shape[3]).index_copy_(0, where, value[0].flatten(0, 1))
        outputs = []
        if self.decodes:
            outputs.append(self._decode(query[0, :, : self.decodes], keys, values, scale))
        at = self.decodes
        for prefill, mask in zip(self.prefills, self._masks, strict=True):
            slot, end = prefill.slot, prefill.start + prefill.count
            output = F.scaled_dot_product_attention(
                query[:, :, at : at + prefill.count],
                keys[slot : slot + 1, :, :end],
                values[slot : slot + 1, :, :end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
            outputs.append(output[0].transpose(0, 1))
            at += prefill.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _rows(self, heads: int) -> torch.Tensor:
        """int64 [heads * N]: where each head of each new token lies in a buffer seen as [slots * heads * length, D]."""
        where = self._where.get(heads)
        if where is None:
            row = (self._token_slots * heads + np.arange(heads)[:, None]) * self.cache.length + self._token_positions
            where = self._where[heads] = torch.from_numpy(row.reshape(-1)).to(self._device)
        return where

    def _decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """query [Hq, n, D] -> [n, Hq, D]; the query heads of a group become the rows of one small matrix."""
        query = query.transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        dim = query.shape[-1]
        if kernel_takes(self._device, self._dtype, dim) and values.shape[-1] == dim:
            if self._seen is None:
                self._seen = (torch.from_numpy(self._decode_slots), torch.from_numpy(self._decode_positions + 1))
            output = slot_attention(query.contiguous(), keys, values, *self._seen, scale or dim**-0.5)
        else:
            if self._padded is None:
                slots, positions = self._decode_slots, self._decode_positions
                self._padded = _PaddedDecode(slots, positions, self.cache.length, self._device, self._dtype)
            output = self._padded(query, keys, values, scale)
        return output.flatten(1, 2)


class _PaddedDecode:
    """Decoding by SDPA with a mask, over a view of the cache: for devices and dtypes without the kernel."""

    def __init__(self, slots: np.ndarray, positions: np.ndarray, most: int, device: torch.device, dtype: torch.dtype):
        used = int(positions.max()) + 1
        self._length = min(most, -(-used // _BLOCK) * _BLOCK)
        self._span = int(slots[-1]) + 1
        # Reading the view costs the whole span, gathering costs a read, a write and a read of the slots in use.
        self._gather = 3 * len(slots) < self._span
        whole = len(slots) == self._span
        self._slots = None if whole else torch.from_numpy(slots).to(device)
        if whole or self._gather:
            last = positions
        else:
            last = np.zeros(self._span, np.int64)  # a slot without a token sees position 0 and is dropped later
            last[slots] = positions
        seen = np.arange(self._length)[None, :] <= last[:, None]
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
        self._mask = mask.to(device)[:, None, None, :]

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """query [n, Hkv, G, D] -> [n, Hkv, G, D]."""
        k, v = keys[: self._span, :, : self._length], values[: self._span, :, : self._length]
        if self._gather:
            k, v = k[self._slots], v[self._slots]
        elif self._slots is not None:
            query = query.new_zeros(self._span, *query.shape[1:]).index_copy_(0, self._slots, query)
        output = F.scaled_dot_product_attention(query, k, v, attn_mask=self._mask, scale=scale)
        return output if self._slots is None or self._gather else output[self._slots]


def _prefill_mask(prefill: Prefill, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """None where plain causal attention is right: nothing cached before the new tokens."""
    if prefill.start == 0:
        return None
    shape = (prefill.count, prefill.start + prefill.count)
    return torch.full(shape, float("-inf"), dtype=dtype, device=device).triu_(prefill.start + 1)
