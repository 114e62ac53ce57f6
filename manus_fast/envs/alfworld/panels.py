"""Finding ALFWorld's games and turning them into task panels that are the same on every machine."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from manus_fast.envs.alfworld.layout import TASK_TYPES
from manus_fast.envs.base import Task
from manus_fast.paths import check_path

GAMES_FOLDER = "json_2.1.1"
"""What `alfworld-download` calls the folder of games."""
SPLITS = ("train", "valid_seen", "valid_unseen")
PUBLISHED = {"valid_seen": 140, "valid_unseen": 134}
"""Games in the evaluation panels of the published data."""
_PUBLISHED_TRIAL = "trial_T20"
"""How the published games' folders begin; those of `make_games` do not."""
_log = logging.getLogger(__name__)


def find_root(data_path: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the splits: `data_path`, else `$ALFWORLD_DATA`, else `~/.cache/alfworld` (the default
    of `alfworld-download`), or `json_2.1.1` inside it. Raises ValueError, naming the places, where there is none."""
    if data_path is not None:
        check_path("environment.options.data_path", data_path)
        candidates, source = [Path(data_path).expanduser()], "environment.options.data_path"
    else:
        # Not an option of ours: the variable belongs to the package alfworld and its download script.
        named = os.environ.get("ALFWORLD_DATA")
        candidates, source = [Path(named or "~/.cache/alfworld").expanduser()], "$ALFWORLD_DATA"
    for candidate in candidates:
        for root in (candidate / GAMES_FOLDER, candidate):
            if any((root / split).is_dir() for split in SPLITS):
                return root
    raise ValueError(
        f"{source}: expected a folder with {GAMES_FOLDER}/train, valid_seen or valid_unseen, got {candidates[0]} "
        "(alfworld-download fetches the published games, manus-fast env make-games writes new ones)"
    )


def find_tasks(root: Path, split: str, task_types: tuple[str, ...] = TASK_TYPES) -> list[Task]:
    """The playable games of a split, one task each, sorted by path.

    Taken are the games that the package itself takes: a `traj_data.json` of one of the six types beside a
    `game.tw-pddl` marked solvable, no movable-receptacle or sliced goal. Task.id is the game's folder below the
    root, Task.data["game"] its file: the same on every machine. Raises ValueError on an unknown split, or when
    the split is absent. A published panel that is not whole is logged: its figures would compare with nobody's.
    """
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    if not (root / split).is_dir():
        raise ValueError(f"split: expected a folder {split} in {root}, got none")
    tasks = []
    for path in sorted((root / split).rglob("game.tw-pddl"), key=lambda p: p.relative_to(root).as_posix()):
        folder = path.parent.relative_to(root).as_posix()
        if "movable" in folder or "Sliced" in folder:
            continue
        task_type = _task_type(path)
        if task_type in task_types and _solvable(path):
            data = {"game": path.relative_to(root).as_posix()}
            tasks.append(Task(f"alfworld/{folder}", task_type, split, data))
    published = sum(task.id.rsplit("/", 1)[1].startswith(_PUBLISHED_TRIAL) for task in tasks)
    if published and set(task_types) == set(TASK_TYPES) and len(tasks) != PUBLISHED.get(split, len(tasks)):
        whole = PUBLISHED[split]
        _log.warning(
            "alfworld: %s holds %d games, and the published panel %d: download it anew", split, len(tasks), whole
        )
    return tasks


def _task_type(path: Path) -> str | None:
    """The type that the trajectory beside a game names; None without one. Raises ValueError on a broken file."""
    trajectory = path.parent / "traj_data.json"
    if not trajectory.is_file():
        return None
    try:
        return json.loads(trajectory.read_text())["task_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"traj_data.json: expected JSON with a task_type, got {trajectory} ({error})") from error


def _solvable(path: Path) -> bool:
    """Reads the flag near the end of the file alone: a split has thousands of files of 100 kB.

    A file that is cut off keeps its place in the panel, for that is the same on every machine; it is logged."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        tail = file.read().decode(errors="replace")
    if '"solvable"' not in tail:
        try:
            game = json.loads(path.read_text())
        except ValueError:
            game = None
        if not isinstance(game, dict):
            _log.warning("alfworld: %s is no whole game: its episodes will fail", path)
            return True
        return bool(game.get("solvable"))
    return tail.rsplit('"solvable"', 1)[1].lstrip(" :").startswith("true")
