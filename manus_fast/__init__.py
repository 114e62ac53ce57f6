"""manus_fast: trains language models into agents that act in text environments.

The names below are imported when they are first used, so that `import manus_fast` and the command line start at once.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Config": "manus_fast.run_config",
    "ExpertIteration": "manus_fast.expert_iteration",
    "FineTune": "manus_fast.finetune",
    "Panel": "manus_fast.evaluate",
    "Player": "manus_fast.player",
    "PreferenceRounds": "manus_fast.preference_rounds",
    "PreferenceTune": "manus_fast.preference",
    "TeacherPlayer": "manus_fast.teacher",
    "Report": "manus_fast.evaluate",
    "RewardModel": "manus_fast.rewards.model",
    "RewardTune": "manus_fast.preference",
    "Trainer": "manus_fast.trainer",
    "compare": "manus_fast.evaluate",
    "load_config": "manus_fast.config",
    "load_model": "manus_fast.modeling.load",
    "make_environment": "manus_fast.player",
    "make_panel": "manus_fast.evaluate",
    "make_policy": "manus_fast.modeling.tiny",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'manus_fast' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
