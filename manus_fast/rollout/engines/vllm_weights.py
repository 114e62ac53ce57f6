"""Handing weights to vLLM in place: where each Hugging Face tensor lies in its fused parameters, and copying it there.

vLLM keeps q, k and v in one matrix, gate and up in another, and pads the vocabulary. Its own loader knows where
everything goes, so the first load runs through that loader while each copy it makes is noted down; later loads repeat
the copies. Nothing touches the disk, no tensor is kept twice, and CUDA graphs go on reading the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _NoteCopies(TorchDispatchMode):
    """Remembers every copy whose source lies in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.source: torch.Tensor | None = None
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self.source is not None:
            target, source = args[0], args[1]
            if source.untyped_storage().data_ptr() == self.source.untyped_storage().data_ptr():
                self.copies.append((target, source))
        return func(*args, **(kwargs or {}))


class InPlaceWeights:
    """The weights inside a vLLM model.

    Args:
        model: vLLM's module, unquantised, its parameters laid out as they were created.
        shapes: shape of each tensor that a load gives, by Hugging Face parameter name; tied ones once.
    """

    def __init__(self, model: Any, shapes: dict[str, torch.Size]):
        self._model = model
        self._shapes = dict(shapes)
        self._plan: dict[str, list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]]] = {}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies each tensor as it comes (so that gathered ones may be freed at once), casting to vLLM's dtype.

        Raises:
            ValueError: an unknown name, another shape, a tensor that is missing or given twice. The weights are then a
                mixture: load again.
        """
        missing = set(self._shapes)
        with torch.no_grad():
            if self._plan:
                for name, tensor in self._checked(tensors, missing):
                    for target, size, stride, offset in self._plan[name]:
                        target.copy_(tensor.as_strided(size, stride, tensor.storage_offset() + offset))
            else:
                self._first(self._checked(tensors, missing))
        if missing:
            raise ValueError(f"tensors: expected all parameters, got none for {', '.join(sorted(missing))}")

    def _checked(
        self, tensors: Iterable[tuple[str, torch.Tensor]], missing: set[str]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name not in self._shapes:
                raise ValueError(f"tensors: expected names of the model's parameters, got {name!r}")
            if name not in missing:
                raise ValueError(f"tensors: expected each parameter once, got {name!r} again")
            if tensor.shape != self._shapes[name]:
                raise ValueError(
                    f"tensors: expected {name} of shape {list(self._shapes[name])}, got {list(tensor.shape)}"
                )
            missing.discard(name)
            yield name, tensor.detach().contiguous()

    def _first(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads through vLLM's own loader and notes where everything went."""
        plan: dict[str, list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]]] = {}
        note = _NoteCopies()

        def watched() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                note.source, note.copies = tensor, []
                yield name, tensor
                # The loader comes back for the next tensor only after it has placed this one.
                placed = sum(source.numel() for _, source in note.copies)
                if placed != tensor.numel():
                    raise ValueError(
                        f"tensors: expected vLLM to copy all {tensor.numel()} numbers of {name}, it copied {placed}"
                    )
                plan[name] = [
                    (target, tuple(source.shape), source.stride(), source.storage_offset() - tensor.storage_offset())
                    for target, source in note.copies
                ]
                note.source = None

        with note:
            self._model.load_weights(watched())
        self._check_whole(plan)
        if len(plan) == len(self._shapes):
            self._plan = plan

    def _check_whole(self, plan: dict[str, list[tuple[torch.Tensor, Any, Any, int]]]) -> None:
        """Every parameter of vLLM's must have been written to, or it still holds what it was created with."""
        written = {target.untyped_storage().data_ptr() for copies in plan.values() for target, *_ in copies}
        left = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.untyped_storage().data_ptr() not in written
        ]
        if left:
            raise ValueError(f"tensors: expected a source for every parameter of vLLM's, got none for {left}")
