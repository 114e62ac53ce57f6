"""Handing a low-rank adapter (LoRA) to vLLM as an adapter, without a file and without adding it to the weights.

Added to weights in bfloat16, what an adapter has learned is rounded away where it is smaller than a 256th of a weight;
kept apart it is computed as the trainer computes it. Every request carries the one adapter, which is empty at first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from manus_fast.rollout.engines.vllm_core import RANGE, version_text

# Ranks that vLLM has kernels for.
_RANKS = (8, 16, 32, 64, 128, 256)
_NAME, _NUMBER = "policy", 1
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")


def adapter_options(rank: int) -> dict[str, Any]:
    """What an engine is opened with, so that it can take adapters of up to `rank`.

    Raises:
        ValueError: a rank that vLLM has no room for.
    """
    room = next((size for size in _RANKS if size >= rank), None)
    if rank < 1 or room is None:
        raise ValueError(f"adapter_rank: expected an integer from 1 to {_RANKS[-1]}, got {rank}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


class InPlaceAdapter:
    """The adapter inside a vLLM engine.

    Args:
        runner: vLLM's model runner, of an engine opened with `adapter_options`.
        rank: of adapters, at most.
        shapes: shape of the model's tensors by Hugging Face parameter name.

    Raises:
        ValueError: a vLLM that reads adapters in another place than the versions that this was written for.
    """

    def __init__(self, runner: Any, rank: int, shapes: Mapping[str, torch.Size]):
        if not callable(getattr(runner.lora_manager, "_load_adapter", None)):
            raise ValueError(
                f"rollout.vllm_adapters: expected a vLLM ({RANGE}) whose {type(runner.lora_manager).__name__} has "
                f"_load_adapter, got vLLM {version_text()}, which has none"
            )
        from vllm.lora.request import LoRARequest

        self._manager, self._rank, self._shapes = runner.lora_manager, rank, dict(shapes)
        self._tensors: dict[str, torch.Tensor] = {}
        layer, (height, width) = next((n, s) for n, s in self._shapes.items() if ".layers." in n and len(s) == 2)
        stem = f"base_model.model.{layer.removesuffix('.weight')}.lora_"
        self._none = {f"{stem}A.weight": torch.zeros(1, width), f"{stem}B.weight": torch.zeros(height, 1)}
        self._manager._load_adapter = self._built
        self.request = LoRARequest(_NAME, _NUMBER, "in memory")
        """What requests name the adapter by."""
        self._again = LoRARequest(_NAME, _NUMBER, "in memory", load_inplace=True)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces the adapter; with no tensors there is none.

        Args:
            tensors: by PEFT's names; B with the adapter's scaling (alpha / rank) in it.

        Raises:
            ValueError: a name that is no adapter's, a pair without its other half, a shape that does not fit.
        """
        self._check(tensors)
        # vLLM writes into what it is given, and asks again for an adapter that it has forgotten.
        self._tensors = {name.replace(".default.", "."): tensor.detach().clone() for name, tensor in tensors.items()}
        self._manager.add_adapter(self._again)

    def _built(self, _request: Any) -> Any:
        """In place of vLLM's reading of a folder."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self._manager
        return LoRAModel.from_lora_tensors(
            _NUMBER,
            {name: tensor.clone() for name, tensor in (self._tensors or self._none).items()},
            PEFTHelper(r=self._rank, lora_alpha=self._rank, target_modules=[]),
            device=str(manager.device),
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
        )

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pairs: dict[str, dict[str, torch.Size]] = {}
        for name, tensor in tensors.items():
            found = _TENSOR.fullmatch(name)
            if found is None or f"{found[1]}.weight" not in self._shapes:
                raise ValueError(f"tensors: expected names of adapters of the model's layers, got {name!r}")
            pairs.setdefault(found[1], {})[found[2]] = tensor.shape
        for layer, pair in pairs.items():
            if len(pair) < 2:
                raise ValueError(f"tensors: expected lora_A and lora_B of {layer}, got lora_{next(iter(pair))} alone")
            (rank, width), (height, other) = pair["A"], pair["B"]
            if torch.Size((height, width)) != self._shapes[f"{layer}.weight"] or rank != other or rank > self._rank:
                raise ValueError(
                    f"tensors: expected an adapter of rank <= {self._rank} for {layer} of shape "
                    f"{list(self._shapes[f'{layer}.weight'])}, got {list(pair['B'])} times {list(pair['A'])}"
                )
