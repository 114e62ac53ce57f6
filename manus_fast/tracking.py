"""Where a run's numbers go: metrics.jsonl, TensorBoard, wandb.

A tracker that fails is switched off with one warning; training goes on. After a resume the records beyond the
resumed step are dropped, so that the file reads as one run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """One destination. Whatever it raises switches it off."""

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """metrics.jsonl: {step, time, "group/name": number}, one record a line, written through at once.

    A number that isn't finite is written as null, so that every line is strict JSON.
    """

    def __init__(self, folder: Path, resume_step: int | None = None):
        path = folder / METRICS_FILE
        kept = _records_up_to(path, resume_step) if resume_step is not None and path.is_file() else []
        self.seconds = float(json.loads(kept[-1])["time"]) if kept else 0.0
        """`time` of the last record kept: a resumed run counts on from there."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(path)
        self._file = path.open("a")

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(seconds, 3), **numbers}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Event files in `folder`/tensorboard. Raises ImportError where TensorBoard isn't installed."""

    def __init__(self, folder: Path, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A wandb run whose id is kept in `folder`, so that a resumed run goes on in the same one."""

    def __init__(self, folder: Path, resume_step: int | None, project: str, config: Mapping[str, Any]):
        import wandb

        file = folder / "wandb_id"
        run_id = file.read_text().strip() if resume_step is not None and file.is_file() else wandb.util.generate_id()
        file.write_text(run_id + "\n")
        self._run = wandb.init(
            project=project, id=run_id, resume="allow", dir=str(folder), config=dict(config), name=folder.name
        )
        # An axis of our own: wandb's step may only grow, and a resume goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, "time": seconds, **values})

    def close(self) -> None:
        self._run.finish()


class Tracking:
    """All trackers of a run behind one `log`.

    Args:
        folder: the run's folder, which exists.
        resume_step: the step a resumed run continues from (records beyond it are dropped); None starts afresh.
        tensorboard: True, False, or None for "where it is installed".
        wandb_project: None leaves wandb out.
        config: what wandb shows beside the run.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        tensorboard: bool | None = None,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        base = Path(folder)
        self._trackers: dict[str, Tracker] = {}
        self._step = resume_step if resume_step is not None else -1
        self._open(METRICS_FILE, lambda: JsonlTracker(base, resume_step))
        if tensorboard or (tensorboard is None and _installed("tensorboard")):
            self._open("TensorBoard", lambda: TensorBoardTracker(base, resume_step))
        if wandb_project is not None:
            self._open("wandb", lambda: WandbTracker(base, resume_step, wandb_project, config or {}))
        file = self._trackers.get(METRICS_FILE)
        self._start = time.monotonic() - (file.seconds if isinstance(file, JsonlTracker) else 0.0)

    def add(self, name: str, tracker: Tracker) -> None:
        """Adds a destination of your own."""
        self._trackers[name] = tracker

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Records numbers.

        Args:
            step: environment steps so far (or optimizer steps, where no environment is); never smaller than before.
            values: "group/name" → number (a 0-d tensor or NumPy scalar will do).

        Raises:
            ValueError: a step that goes back, a name without a group, a value that is no number.
        """
        if step < self._step:
            raise ValueError(f"step: expected at least {self._step} (the step logged before), got {step}")
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if "/" not in name:
                raise ValueError(f"values: expected names of the form group/name, got {name!r}")
            try:
                numbers[name] = value if type(value) in (int, float) else float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"values[{name!r}]: expected a number, got {value!r}") from error
        self._step = step
        seconds = time.monotonic() - self._start
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, seconds, numbers)
            except Exception as error:  # whatever a tracker raises must not stop training
                self._disable(name, error)

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:  # as above
                self._disable(name, error)
        self._trackers.clear()

    def _open(self, name: str, make: Any) -> None:
        try:
            self._trackers[name] = make()
        except Exception as error:  # as above
            self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        first = (str(error).strip().splitlines() or [""])[0]
        _log.warning("%s is switched off for the rest of this run: %s: %s", name, type(error).__name__, first)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def prepare_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a run's folder and makes sure that it can be written to, leaving nothing behind.

    Raises:
        ValueError: it is a file, or this user may not write there.
    """
    path = Path(folder)
    probe = path / f".writable.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"training.output_dir: expected a folder that can be written to, got {str(path)!r} ({error.strerror})"
        ) from error
    return path


def _records_up_to(path: Path, step: int) -> list[str]:
    """Whole records (a killed run may leave half a line) up to and including a step."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
            if record["step"] <= step:
                kept.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return kept


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
