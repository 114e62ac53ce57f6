"""Steps whose loss or gradient is not finite: skipped, counted, kept for inspection, and fatal when they go on."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from manus_fast.data.packing import PackedRows
from manus_fast.learn.policy import ScoreOutput

if TYPE_CHECKING:
    from manus_fast.learn.backend import Backend

log = logging.getLogger("manus_fast.learn")

_CHECKED = ("log_prob", "entropy", "value", "loss")
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
        **where: int,
    ) -> bool:
        """True when the step may be taken. Otherwise the gradients are discarded and the batch is saved.

        Raises:
            NonFiniteError: this was the `limit`-th bad step in a row; names the first bad tensor.
        """
        table = torch.stack(flags)
        bad = (~table).any().reshape(1) | ~torch.isfinite(norm).reshape(1)
        if backend.sum(bad.to(torch.float32)).item() == 0:
            self.in_row = 0
            return True
        culprit = self._culprit(table, backend)
        backend.discard()
        self.skipped += 1
        self.in_row += 1
        saved = self._save(batch, culprit, where)
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
    def _culprit(table: torch.Tensor, backend: Backend) -> str:
        """The first bad tensor in the order of computation: a weight, an output, a gradient."""
        for name, parameter in backend.policy.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                return f"the weight {name}"
        for number, name in enumerate(_CHECKED):
            if not bool(table[:, number].all()):
                return name
        name = backend.first_bad_gradient()
        return "the norm of the gradient" if name is None else f"the gradient of {name}"

    def _save(self, batch: PackedRows, culprit: str, where: dict[str, int]) -> Path | None:
        if self.folder is None or self.skipped > _MAX_SAVED:
            return None
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
        tensors = {n: t.cpu().contiguous() for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        path = self.folder / f"bad-step-{self.skipped}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"first_bad": culprit, "where": json.dumps(where)})
        except OSError as error:
            log.warning("the batch of a skipped step could not be saved: %s", error)
            return None
        return path
