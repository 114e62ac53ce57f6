"""Where a run's numbers go: metrics.jsonl, TensorBoard, wandb.

A tracker that fails is switched off with one warning; training goes on. After a resume the records beyond the
resumed step are dropped, so that the file reads as one run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from manus_fast.files import whole

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "trajectories.jsonl"


class Tracker(Protocol):
    """One destination. Whatever it raises switches it off."""

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A file of JSON records, one a line, written through at once.

    Args:
        path: in a folder that exists.
        key: the number in each record that says how far the run was.
        until: how far a resumed run had come: records beyond it are dropped, and what a kill left of a line; None
            begins the file anew.
    """

    def __init__(self, path: Path, key: str, until: int | None = None):
        self.last: dict[str, Any] | None = None
        """Of the records from before."""
        with whole(path) as kept:
            for self.last in _records_up_to(path, key, until) if until is not None and path.is_file() else ():
                kept.write(json.dumps(self.last) + "\n")
        self._file = path.open("a")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class JsonlTracker:
    """metrics.jsonl: {step, time, "group/name": number}, one record a line, written through at once.

    A number that isn't finite is written as null, so that every line is strict JSON. What a resumed run measures again
    where the file ends, such as its last evaluation, is not written twice.
    """

    def __init__(self, folder: Path, resume_step: int | None = None):
        self._lines = JsonLines(folder / METRICS_FILE, "step", resume_step)
        self._before = self._lines.last
        """The last record kept, until there is a new one."""
        self.seconds = float(self._before["time"]) if self._before else 0.0
        """`time` of the last record kept: a resumed run counts on from there."""

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        before, self._before = self._before, None
        if before is not None and before["step"] == step and numbers.items() <= before.items():
            return
        self._lines.write({"step": step, "time": round(seconds, 3), **numbers})

    def close(self) -> None:
        self._lines.close()


class TensorBoardTracker:
    """Event files in `folder`/tensorboard. Raises ImportError where TensorBoard isn't installed."""

    def __init__(self, folder: Path, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        before = set(threading.enumerate())
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        _quieten(set(threading.enumerate()) - before)

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
        samples_until: the iteration up to which trajectories.jsonl is kept (0: anew); None: the run has none.
        tensorboard: True, False, or None for "where it is installed".
        wandb_project: None leaves wandb out.
        config: what wandb shows beside the run.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        samples_until: int | None = None,
        tensorboard: bool | None = None,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        base = Path(folder)
        self._trackers: dict[str, Tracker] = {}
        self._samples: JsonLines | None = None
        self._step = resume_step if resume_step is not None else -1
        self._open(METRICS_FILE, lambda: JsonlTracker(base, resume_step))
        if samples_until is not None:
            try:
                self._samples = JsonLines(base / SAMPLES_FILE, "iteration", samples_until)
            except OSError as error:
                self._disable(SAMPLES_FILE, error)
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

    def sample(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds records to trajectories.jsonl; each has its "iteration"."""
        try:
            for record in records if self._samples is not None else ():
                self._samples.write(record)
        except OSError as error:  # as above
            self._samples = None
            self._disable(SAMPLES_FILE, error)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:  # as above
                self._disable(name, error)
        self._trackers.clear()
        if self._samples is not None:
            self._samples.close()
            self._samples = None

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


def _quieten(threads: set[threading.Thread]) -> None:
    """Keeps the traceback of these threads off the terminal: the tracker tells what they met at its next record."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.thread not in threads:
            before(arguments)

    threading.excepthook = hook


def _records_up_to(path: Path, key: str, until: int) -> Iterator[dict[str, Any]]:
    """Whole records (a killed run may leave half a line) whose `key` is at most `until`."""
    with path.open(errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                if record[key] <= until:
                    yield record
            except (json.JSONDecodeError, KeyError, TypeError):
                continue


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
