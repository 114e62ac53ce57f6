"""Values that change during training: learning rate, entropy and KL coefficients, and the adaptive KL controller.

A schedule is a pure function of progress, so a resumed run needs no state beyond the counter it already has; the KL
controller does have state, and gives it to the checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

KINDS = ("constant", "linear", "cosine")


@dataclass
class Schedule:
    """From `start` to `end` over the course of training, after a linear warm-up from 0 and before a hold at `end`.

    In YAML either a number (constant) or a mapping: `{start: 3e-4, kind: cosine, end: 0, warmup: 0.03, hold: 0.2}`.
    """

    start: float
    kind: str = "constant"
    """constant | linear | cosine."""
    end: float = 0.0
    """Value at the end of training (linear and cosine)."""
    warmup: float = 0.0
    """Share of training, in [0, 1), over which the value rises linearly from 0 to `start`."""
    hold: float = 0.0
    """Share of training, in [0, 1), at its end, over which the value stays at `end` (linear and cosine)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule.kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("warmup", "hold"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"schedule.{name}: expected a share in [0, 1), got {getattr(self, name)}")
        if self.kind == "constant" and self.hold:
            raise ValueError(f"schedule.hold: expected 0 with kind constant, which has no end, got {self.hold}")
        if not self.warmup + self.hold < 1.0:
            raise ValueError(f"schedule.hold: expected warmup + hold below 1, got {self.warmup} + {self.hold}")
        for name in ("start", "end"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"schedule.{name}: expected a finite number >= 0, got {getattr(self, name)}")

    def at(self, progress: float) -> float:
        """The value at `progress` in [0, 1] of training; outside it is clamped."""
        progress = min(max(progress, 0.0), 1.0)
        if progress < self.warmup:
            return self.start * progress / self.warmup
        if self.kind == "constant":
            return self.start
        held = 1.0 - self.hold
        if progress >= held:
            return self.end
        done = (progress - self.warmup) / (held - self.warmup)
        if self.kind == "cosine":
            done = 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (self.end - self.start) * done

    @property
    def always_zero(self) -> bool:
        """True when the value is 0 throughout, so that what it multiplies need never be computed."""
        return self.start == 0.0 and (self.kind == "constant" or self.end == 0.0)


KEYS = tuple(field.name for field in fields(Schedule))


def schedule(value: Any, key: str) -> Schedule:
    """Reads a config value: a Schedule, a number, or a mapping with Schedule's fields.

    Raises:
        ValueError: none of these; names `key`.
    """
    if isinstance(value, Schedule):
        return value
    try:
        if isinstance(value, dict):
            if "start" not in value or not set(value) <= set(KEYS):
                raise ValueError(f"schedule: expected {', '.join(KEYS)}, got {', '.join(map(str, value))}")
            return Schedule(**{k: v if k == "kind" else float(v) for k, v in value.items()})
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Schedule(float(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from None
    raise ValueError(f"{key}: expected a number or a schedule mapping, got {value!r}")


class KLController:
    """The KL coefficient: fixed by a schedule, or steered so that the measured KL stays near a target.

    Adaptive rule of Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2:
    coefficient ← coefficient · (1 + error · n / horizon), error = clip(KL / target - 1, -0.2, 0.2), n = episodes seen.

    Args:
        coefficient: fixed schedule; its start is the adaptive controller's first value.
        target: KL per token to steer to, or None for the schedule alone.
        horizon: episodes over which a full error changes the coefficient by a factor e^0.2.
    """

    def __init__(self, coefficient: Schedule, target: float | None = None, horizon: int = 10_000):
        if target is not None and not target > 0:
            raise ValueError(f"ppo.kl_target: expected None or a number above 0, got {target}")
        if target is not None and coefficient.always_zero:
            raise ValueError("ppo.kl_coef: expected a number above 0 where ppo.kl_target is set, got 0")
        if horizon < 1:
            raise ValueError(f"ppo.kl_horizon: expected an integer >= 1, got {horizon}")
        self.schedule = coefficient
        self.target = target
        self.horizon = horizon
        self._value = coefficient.start

    def at(self, progress: float) -> float:
        """The coefficient to use now."""
        return self.schedule.at(progress) if self.target is None else self._value

    def update(self, kl: float, episodes: int) -> None:
        """Tells the controller the mean KL of the last iteration; a non-finite one is ignored."""
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self._value *= max(0.0, 1.0 + error * episodes / self.horizon)

    def state_dict(self) -> dict[str, float]:
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._value = float(state["value"])
