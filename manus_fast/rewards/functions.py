"""Rewards that a user writes: `module:function`, or `path/to/file.py:function`, as a name in the `rewards` block.

The function takes a finished `Trajectory` and returns one number, which lands on the last turn, or one number a turn:

    def short_thoughts(trajectory):                       # rewards: {environment: 1, "my_rewards:short_thoughts": 0.1}
        return [float(len(turn.thought) < 80) for turn in trajectory.turns]

None or nan means that the episode cannot be judged: it is masked and counted, never a reward of zero.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from manus_fast.agent.trajectory import Trajectory

RewardFunction = Callable[[Trajectory], float | Sequence[float] | None]


def load_function(name: str) -> RewardFunction:
    """The function that "module:function" names. The working directory counts as a place of modules.

    Raises:
        ValueError: no such module, a module that fails to import, no such function (the nearest one is named), or
            something that cannot be called.
    """
    where, _, attribute = name.rpartition(":")
    module = _module(where, name)
    function = getattr(module, attribute, None)
    if function is None:
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = difflib.get_close_matches(attribute, public, 1, 0.4)
        hint = f": did you mean '{where}:{near[0]}'?" if near else f", which has no function {attribute!r}"
        raise ValueError(f"rewards: expected a function of {where}, got {name!r}{hint}")
    if not callable(function):
        raise ValueError(f"rewards: expected {name!r} to be a function, got a {type(function).__name__}")
    return function


def _module(where: str, name: str) -> ModuleType:
    here = os.getcwd()
    try:
        if where.endswith(".py"):
            return _from_file(Path(where))
        added = here not in sys.path
        if added:
            sys.path.insert(0, here)  # a console script's path begins with its own folder, not with the user's
        try:
            return importlib.import_module(where)
        finally:
            if added:
                sys.path.remove(here)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ValueError(
            f"rewards: expected a module that can be imported for {name!r}, got {type(error).__name__}: {error}"
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
