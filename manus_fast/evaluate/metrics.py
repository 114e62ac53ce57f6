"""What a panel says about a model: success with its interval, steps, valid actions, format, tokens; and eval.json.

An episode whose environment or engine failed says nothing about the model: it is left out of every rate and counted
as `failed`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manus_fast.agent.trajectory import Trajectory
from manus_fast.envs.base import Task
from manus_fast.files import write_text
from manus_fast.paths import check_path

SCHEMA = "manus_fast.eval.v1"
_Z95 = 1.959963984540054


@dataclass
class TaskRecord:
    """One task's outcome. On a failed episode `error` is set and success and score are None."""

    id: str
    type: str
    success: bool | None
    score: float | None
    steps: int
    tokens: int
    """Sampled tokens."""
    valid_actions: int
    """Turns whose action the world took."""
    well_formed: int
    """Turns whose reply had the right form."""
    truncated: bool
    error: str | None = None

    @classmethod
    def of(cls, task: Task, trajectory: Trajectory, score: Callable[[Trajectory], float] | None = None) -> TaskRecord:
        failed = trajectory.error is not None
        own = trajectory.success if trajectory.score is None else trajectory.score
        points = None if failed else float(score(trajectory) if score else own)
        return cls(
            id=task.id,
            type=task.type,
            success=None if failed else bool(trajectory.success),
            score=points,
            steps=len(trajectory.turns),
            tokens=trajectory.sampled_tokens,
            valid_actions=sum(turn.admissible for turn in trajectory.turns),
            well_formed=sum(turn.format_ok for turn in trajectory.turns),
            truncated=trajectory.truncated,
            error=trajectory.error,
        )


@dataclass
class Rate:
    """k successes of n, with Wilson's 95 % interval; all fractions, nan where n is 0."""

    k: int
    n: int
    rate: float
    low: float
    high: float

    @classmethod
    def of(cls, outcomes: Iterable[bool]) -> Rate:
        counted = list(outcomes)
        k, n = sum(counted), len(counted)
        low, high = wilson(k, n)
        return cls(k, n, k / n if n else math.nan, low, high)


@dataclass
class Summary:
    """Figures over the valid episodes. Rates of turns are over all their turns."""

    tasks: int
    failed: int
    success: Rate
    per_type: dict[str, Rate]
    score: float
    mean_steps: float
    mean_steps_success: float
    valid_action_rate: float
    format_rate: float
    truncated_rate: float
    tokens: int
    """Sampled tokens of the whole panel, failed episodes included."""
    mean_tokens: float


@dataclass
class Report:
    """What `evaluate` returns and eval.json holds."""

    suite: str
    split: str
    model: str
    tasks: list[TaskRecord]
    summary: Summary
    settings: dict[str, Any] = field(default_factory=dict)
    """How it was played (temperature, seed, limits), for the reader of eval.json."""

    def to_json(self) -> dict[str, Any]:
        """eval.json: {schema, suite, split, model, settings, tasks, summary}; nan becomes null."""
        return _nulls({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Report:
        """Reads what `to_json` wrote. Raises ValueError on another schema; the summary is made anew from the tasks."""
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"eval.schema: expected {SCHEMA!r}, got {schema!r}")
        tasks = [TaskRecord(**item) for item in record["tasks"]]
        return cls(
            record["suite"], record["split"], record["model"], tasks, summarize(tasks), record.get("settings", {})
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes eval.json, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Raises ValueError where the file is missing or no eval.json."""
        check_path("eval", path)
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"eval: expected an eval.json, found no file at {str(path)!r}")
        try:
            return cls.from_json(json.loads(file.read_text()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"eval: expected {file} to be an eval.json, got something else ({error})") from error


def summarize(records: Sequence[TaskRecord]) -> Summary:
    """The summary of a panel's records."""
    valid = [record for record in records if record.error is None]
    turns = sum(record.steps for record in valid)
    types = sorted({record.type for record in records})
    return Summary(
        tasks=len(records),
        failed=len(records) - len(valid),
        success=Rate.of(bool(record.success) for record in valid),
        per_type={kind: Rate.of(bool(r.success) for r in valid if r.type == kind) for kind in types},
        score=_mean(record.score for record in valid),
        mean_steps=_mean(record.steps for record in valid),
        mean_steps_success=_mean(record.steps for record in valid if record.success),
        valid_action_rate=sum(record.valid_actions for record in valid) / turns if turns else math.nan,
        format_rate=sum(record.well_formed for record in valid) / turns if turns else math.nan,
        truncated_rate=_mean(record.truncated for record in valid),
        tokens=sum(record.tokens for record in records),
        mean_tokens=_mean(record.tokens for record in valid),
    )


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of k successes of n, as fractions (Wilson, JASA 22, 1927); nan for n = 0."""
    if not 0 <= k <= n:
        raise ValueError(f"k: expected 0 to n ({n}), got {k}")
    if n == 0:
        return math.nan, math.nan
    p, z2 = k / n, _Z95 * _Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # Exactly 0 and 1 at the ends, where rounding would miss them.
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


def _mean(values: Iterable[Any]) -> float:
    listed = [float(value) for value in values]
    return math.fsum(listed) / len(listed) if listed else math.nan


def _nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nulls(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_nulls(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
