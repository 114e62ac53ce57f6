"""A curriculum: training begins where the task is easy and goes on, stage by stage, to where it is not.

    curriculum: {levels: [1, 2, 3], success: 0.7}                # by difficulty, once 70 % are solved
    curriculum: {rounds: [10, 20, 50], steps: 20000}             # by horizon, every 20,000 environment steps
    curriculum:                                                  # anything else
      stages:
        - {options: {receptacles: [5, 7]}, max_steps: 12, success: 0.8, steps: 50000}
        - {options: {level: 1}, max_steps: 20}

A stage ends when its episodes reach the success rate, or after its environment steps, whichever comes first. Only
training plays the stages: evaluation stays with the config's own environment. Horizon schedules are the rounds of
AgentGym-RL (Xi et al. 2025, arXiv 2509.08755, ScalingInter-RL).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manus_fast.agent.trajectory import Trajectory


@dataclass
class StageConfig:
    """One stage of the `curriculum` block."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the environment that this stage sets, over those of `environment.options`."""
    max_steps: int | None = None
    """Turns of an episode; null: as in `environment.max_steps`."""
    success: float | None = None
    """Go on once this share of the last `window` episodes was solved."""
    steps: int | None = None
    """Go on after this many environment steps in the stage."""

    def __post_init__(self) -> None:
        if self.success is not None and not 0.0 < self.success <= 1.0:
            raise ValueError(f"curriculum.success: expected null or a share in (0, 1], got {self.success}")
        for name in ("max_steps", "steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"curriculum.{name}: expected null or an integer >= 1, got {getattr(self, name)}")


@dataclass
class CurriculumConfig:
    """The config's `curriculum` block; without stages, levels and rounds there is no curriculum.

    Raises:
        ValueError: levels and rounds of different lengths or beside stages, or a stage that never ends.
    """

    levels: list[int] = field(default_factory=list)
    """Short for stages with `options: {level: …}`."""
    rounds: list[int] = field(default_factory=list)
    """Short for stages with `max_steps: …`; with levels beside it, one for each."""
    stages: list[StageConfig] = field(default_factory=list)
    success: float | None = None
    """Of stages that set neither success nor steps."""
    steps: int | None = None
    """Of stages that set neither success nor steps."""
    window: int = 256
    """Episodes over which a stage's success is measured: so many it lasts at least."""

    def __post_init__(self) -> None:
        StageConfig(success=self.success, steps=self.steps)  # raises on a number that no stage may have
        if self.window < 1:
            raise ValueError(f"curriculum.window: expected an integer >= 1, got {self.window}")
        if self.stages and (self.levels or self.rounds):
            raise ValueError("curriculum.stages: expected either stages, or levels and rounds, got both")
        if self.levels and self.rounds and len(self.levels) != len(self.rounds):
            raise ValueError(
                f"curriculum.rounds: expected as many as curriculum.levels ({len(self.levels)}), got {len(self.rounds)}"
            )
        for number, stage in enumerate(self.resolved()[:-1]):
            if stage.success is None and stage.steps is None:
                raise ValueError(f"curriculum: expected success or steps to end stage {number + 1}, got neither")

    def resolved(self) -> list[StageConfig]:
        """The stages in full."""
        stages = self.stages
        if not stages:
            count = max(len(self.levels), len(self.rounds))
            stages = [
                StageConfig(
                    options={"level": self.levels[i]} if self.levels else {},
                    max_steps=self.rounds[i] if self.rounds else None,
                )
                for i in range(count)
            ]
        return [
            replace(stage, success=self.success, steps=self.steps)
            if stage.success is None and stage.steps is None
            else stage
            for stage in stages
        ]


class Curriculum:
    """Where a run stands in its curriculum.

    Args:
        config: the block; without stages `stage` is None and nothing ever changes.
    """

    def __init__(self, config: CurriculumConfig):
        self.stages = config.resolved()
        self.index = 0
        self.steps = 0
        """Environment steps in this stage."""
        self._solved: deque[bool] = deque(maxlen=config.window)

    @property
    def stage(self) -> StageConfig | None:
        return self.stages[self.index] if self.stages else None

    @property
    def success(self) -> float | None:
        """Success over the window; None until it is full."""
        full = len(self._solved) == self._solved.maxlen
        return sum(self._solved) / len(self._solved) if full else None

    def observe(self, trajectories: Sequence[Trajectory]) -> bool:
        """Takes an iteration's episodes into account; True when the next stage begins. Failed episodes don't count."""
        stage = self.stage
        if stage is None:
            return False
        self.steps += sum(len(t.turns) for t in trajectories)
        self._solved.extend(t.success for t in trajectories if t.valid)
        reached = stage.success is not None and self.success is not None and self.success >= stage.success
        spent = stage.steps is not None and self.steps >= stage.steps
        if self.index + 1 == len(self.stages) or not (reached or spent):
            return False
        self.index, self.steps = self.index + 1, 0
        self._solved.clear()
        return True

    def metrics(self) -> dict[str, float]:
        """Named figures for tracking."""
        if self.stage is None:
            return {}
        numbers = {"curriculum/stage": float(self.index + 1), "curriculum/steps": float(self.steps)}
        return numbers if self.success is None else {**numbers, "curriculum/success": self.success}

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"index": self.index, "steps": self.steps, "solved": list(self._solved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Raises:
            ValueError: the config has fewer stages now than the run had reached.
        """
        if state["index"] >= max(1, len(self.stages)):
            raise ValueError(
                f"curriculum: expected the {state['index'] + 1} stages that the checkpoint had reached, "
                f"got {len(self.stages)}"
            )
        self.index, self.steps = int(state["index"]), int(state["steps"])
        self._solved.clear()
        self._solved.extend(bool(x) for x in state["solved"])
