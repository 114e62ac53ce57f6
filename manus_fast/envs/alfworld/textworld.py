"""One ALFWorld game in the real engine (`alfworld` over TextWorld), as an `Env`.

Wraps the engine's environment directly, with the package's own wrapper for names; the text is that of the
package's `AlfredTWEnv`. The engine is slow (tens of milliseconds a step), keeps global state and leaks a little,
so it belongs in `WorkerPool`, one thread, recycled now and then.

Importing this module needs no `alfworld`; building the environment does.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from manus_fast.envs.alfworld.grammar import grammar_of
from manus_fast.envs.base import Task

_IDLE: list[Any] = []
"""Engines of closed worlds, for the next ones: each has loaded its own copy of the planner's library, and unloading
that crashes the process."""
_BUILT = {True: 0, False: 0}
"""Engines built in this process, patched (see `fast.py`) and stock: the two cannot live together."""


def engine_version() -> str:
    """Versions of the two packages that make the text. Raises ValueError when they are not installed."""
    try:
        return f"alfworld {metadata.version('alfworld')}, textworld {metadata.version('textworld')}"
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            "environment.backend: textworld needs the package alfworld (pip install 'manus-fast[alfworld]')"
        ) from error


class TextWorldEnv:
    """Plays the game file `root / task.data["game"]`, for at most `max_steps` steps.

    info of every answer: `admissible` (sorted commands), `success`, `steps`; of a reset also `type` (task type),
    `grammar` ("0.3": `put … in/on`, "0.4": `move … to`), `backend` and `engine` (versions).
    A command that is not admissible is answered "Nothing happens." and counts as a step.
    fast: memoise what the engine computes again and again (see `fast.py`); the text is the same.
    """

    def __init__(self, root: str | os.PathLike[str], max_steps: int = 50, fast: bool = True):
        self.root = Path(root)
        self.max_steps = max_steps
        self.fast = fast
        self._engine = engine_version()
        self._env: Any = None
        self._loaded: tuple[Path, int] | None = None
        self._task: Task | None = None
        self._seed = 0
        self._actions: list[str] = []
        self._done = True

    def _build(self) -> Any:
        from manus_fast.envs.alfworld import fast

        if (self.fast and _BUILT[False]) or (not self.fast and fast.installed()):
            raise ValueError(f"fast: expected {not self.fast}, the kind of engine that runs in this process already")
        if _IDLE:
            return _IDLE.pop()
        # The planner's translator overwrites sys.argv when it is first imported.
        argv = sys.argv
        try:
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
            from textworld.envs import PddlEnv
        finally:
            sys.argv = argv
        if self.fast:
            fast.install()
        _BUILT[self.fast] += 1
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        return AlfredDemangler(PddlEnv(infos), shuffle=False)

    def reset(self, task: Task, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts the game from its beginning; the games have no chance in them, so `seed` changes nothing.

        Raises ValueError for a task without a game file and for a file that is no game.
        """
        path = self.root / str(task.data.get("game", ""))
        argv = sys.argv
        try:
            if self._env is None:
                self._env = self._build()
            # A file that was written anew is another game.
            key = (path, path.stat().st_mtime_ns) if path.is_file() else None
            if key is None or self._loaded != key:
                self._loaded = None
                self._game = read_game(path)
                self._env.load(self._game)
                self._loaded = key
            state = self._env.reset()
        finally:
            sys.argv = argv
        self._task, self._seed, self._actions, self._done = task, seed, [], False
        info = self._info(state)
        info |= {"type": task.type, "grammar": grammar_of(self._game["grammar"]), "backend": "textworld"}
        info["engine"] = self._engine
        return state.feedback, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Reward 1.0 and terminated when the goal is reached, truncated after `max_steps` steps."""
        if self._done:
            raise ValueError("step: expected a running game, got one that is over or not reset")
        state, score, done = self._env.step(action)
        self._actions.append(action)
        truncated = not done and len(self._actions) >= self.max_steps
        self._done = done or truncated
        return state.feedback, float(score), bool(done), truncated, self._info(state)

    def _info(self, state: Any) -> dict[str, Any]:
        admissible = list(state["admissible_commands"])
        return {"admissible": admissible, "success": bool(state["won"]), "steps": len(self._actions)}

    def clone(self) -> TextWorldEnv:
        """A second world in the same state, made by playing again: one reset and as many steps as were made."""
        copy = TextWorldEnv(self.root, self.max_steps, self.fast)
        if self._task is not None:
            copy.reset(self._task, self._seed)
            for action in self._actions:
                copy.step(action)
        return copy

    def save(self) -> bytes:
        """The state as the way to it: task, seed and actions."""
        if self._task is None:
            raise ValueError("save: expected a world that was reset")
        task = {"id": self._task.id, "type": self._task.type, "split": self._task.split, "data": dict(self._task.data)}
        return json.dumps({"task": task, "seed": self._seed, "actions": self._actions}).encode()

    def restore(self, state: bytes) -> None:
        """Plays a saved state again. Raises ValueError on bytes that `save` did not make."""
        try:
            saved = json.loads(state)
            task, seed, actions = Task(**saved["task"]), int(saved["seed"]), list(saved["actions"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"restore: expected the bytes of save, got {state[:40]!r}…") from error
        self.reset(task, seed)
        for action in actions:
            self.step(action)

    def close(self) -> None:
        if self._env is not None:
            _IDLE.append(self._env)
        self._env = self._loaded = None
        self._done = True


def read_game(path: Path) -> dict[str, Any]:
    """Reads a game file. Raises ValueError, naming the file, when it is absent, cut off or not a game."""
    try:
        game = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"game: expected a readable file, got {path} ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"game: expected JSON, got {path} ({error})") from error
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        if not isinstance(game, dict) or not isinstance(game.get(key), str):
            raise ValueError(f"game: expected the key {key!r} with text, got {path}")
    return game
