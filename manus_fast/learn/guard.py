"""Steps whose loss or gradient is not finite: skipped, counted, kept for inspection, and fatal when they go on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from manus_fast.data.packing import PackedRows
from manus_fast.learn.policy import ScoreOutput

if TYPE_CHECKING:
    from manus_fast.learn.backend import Backend

log = logging.getLogger("manus_fast.learn")

# What a step is made from, in the order in which it comes about, and what a forward pass gives.
_INPUTS = {
    "reward": "the reward",
    "ref_log_prob": "the reference's log-probability",
    "value": "the old value",
    "weight": "the importance weight",
    "advantage": "the advantage",
    "returns": "the return",
}
_OUTPUTS = ("the log-probability", "the entropy", "the value", "the loss")
_MAX_SAVED = 10


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row were not finite."""


class FiniteGuard:
    """Decides, once per optimizer step and with one wait for the device, whether the step may be taken.

    Args:
        limit: bad steps in a row after which `check` raises.
        folder: where the batches of bad steps are saved (the first ten); None saves none.
    """

    def __init__(self, limit: int, folder: Path | None = None):
        self.limit = limit
        self.folder = folder
        self.skipped = 0
        self.in_row = 0

    @staticmethod
    def flags(output: ScoreOutput | None, loss: torch.Tensor) -> torch.Tensor:
        """bool [4] on the device: whether log-probabilities, entropy, values and loss of a micro-batch are finite."""
        tensors = (None, None, None) if output is None else (output.log_prob, output.entropy, output.value)
        good = torch.ones((), dtype=torch.bool, device=loss.device)
        return torch.stack([good if x is None else torch.isfinite(x.detach()).all() for x in (*tensors, loss)])

    def check(
        self,
        flags: list[torch.Tensor],
        norm: torch.Tensor,
        backend: Backend,
        batch: PackedRows,
        constants: Mapping[str, torch.Tensor | float] | None = None,
        **where: int,
    ) -> bool:
        """True when the step may be taken. Otherwise the gradients are discarded and the batch is saved.

        Args:
            flags: of the step's micro-batches.
            norm: of the gradient over all ranks.
            batch: the mini-batch.
            constants: numbers that the whole collection shares, by the name they have in a message.
            where: what the saved batch says of its place in the run.

        Raises:
            NonFiniteError: this was the `limit`-th bad step in a row; names the first bad tensor.
        """
        table = torch.stack(flags)
        bad = (~table).any().reshape(1) | ~torch.isfinite(norm).reshape(1)
        if backend.sum(bad.to(torch.float32)).item() == 0:
            self.in_row = 0
            return True
        table = backend.merge(table.float(), lambda parts: parts) > 0  # so that every rank names the same
        culprit = self._culprit(table, backend, batch, constants or {})
        backend.discard()
        self.skipped += 1
        self.in_row += 1
        saved = self._save(batch, culprit, where, backend.rank)
        log.warning("optimizer step skipped: %s is not finite%s", culprit, f" (batch in {saved})" if saved else "")
        if self.in_row >= self.limit:
            kept = f", batches in {self.folder}" if saved else ""
            raise NonFiniteError(
                f"training stopped after {self.in_row} optimizer steps in a row that were not finite: "
                f"the first bad tensor is {culprit}{kept}"
            )
        return False

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_row": self.in_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_row = int(state["skipped"]), int(state["in_row"])

    @staticmethod
    def _culprit(
        table: torch.Tensor, backend: Backend, batch: PackedRows, constants: Mapping[str, torch.Tensor | float]
    ) -> str:
        """The first bad tensor in the order of computation: a weight, an input, an output, a gradient."""
        for name, parameter in backend.policy.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                return f"the weight {name}"
        for field, name in _INPUTS.items():
            tensor = getattr(batch, field)
            if tensor is not None:
                bad = batch.trainable[~torch.isfinite(tensor[batch.trainable])]
                if len(bad):
                    return f"{name} of a token of episode {int(batch.episode[batch.row[bad[0]]])}"
        for name, value in constants.items():
            if not bool(torch.isfinite(torch.as_tensor(value))):
                return name
        for number, name in enumerate(_OUTPUTS):
            if not bool(table[:, number].all()):
                return name
        name = backend.first_bad_gradient()
        return "the norm of the gradient" if name is None else f"the gradient of {name}"

    def _save(self, batch: PackedRows, culprit: str, where: dict[str, int], rank: int) -> Path | None:
        if self.folder is None or self.skipped > _MAX_SAVED or rank != 0:
            return None
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
        tensors = {n: t.cpu().contiguous() for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        path = self.folder / f"bad-step-{self.skipped}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"first_bad": culprit, "where": json.dumps(where)})
        except (OSError, SafetensorError) as error:
            log.warning("the batch of a skipped step could not be saved: %s", error)
            return None
        return path
