"""Game files of our own in ALFWorld's format, for training without the download and for testing engines.

Layout of the output, as `alfworld-download` has it:
`OUT/json_2.1.1/SPLIT/TYPE-Object-None-Receptacle-SCENE/trial_…/{game.tw-pddl,traj_data.json}`.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manus_fast.envs.alfworld.grammar import downgrade, translate
from manus_fast.envs.alfworld.layout import RARE, TASK_TYPES, Layout, Variety, Vocabulary, sample_layout, scenes
from manus_fast.envs.alfworld.panels import GAMES_FOLDER, SPLITS
from manus_fast.envs.alfworld.pddl import demangle, describe_goal, entities, write_problem
from manus_fast.envs.alfworld.plan import plan
from manus_fast.envs.alfworld.textworld import TextWorldEnv, engine_version
from manus_fast.envs.base import Task

_MAX_TRIES = 50
"""Layouts drawn for one game before giving up."""


def _folder(layout: Layout, trial: str) -> str:
    goal = layout.goal
    target = goal.receptacle or goal.toggle
    return f"{goal.type}-{goal.object}-None-{target}-{layout.scene}/trial_{trial}"


def _trajectory(layout: Layout, trial: str, description: str) -> dict[str, Any]:
    goal = layout.goal
    parameters = {
        "object_target": goal.object,
        "parent_target": goal.receptacle,
        "toggle_target": goal.toggle,
        "mrecep_target": "",
        "object_sliced": False,
    }
    return {
        "task_id": f"trial_{trial}",
        "task_type": goal.type,
        "pddl_params": parameters,
        "scene": {"scene_num": layout.scene, "floor_plan": f"FloorPlan{layout.scene}"},
        "turk_annotations": {"anns": [{"task_desc": description}]},
    }


def compose(layout: Layout, trial: str, choice: int, vocabulary: Vocabulary, grammar: str = "0.4") -> dict[str, Any]:
    """The content of `game.tw-pddl`, with a walkthrough not yet proved. Raises ValueError if the goal has no plan."""
    from alfworld import info

    walkthrough = plan(layout, demangle(entities(layout)))
    if walkthrough is None:
        raise ValueError("layout: expected a goal within reach")
    domain, rules = Path(info.ALFRED_PDDL_PATH).read_text(), Path(info.ALFRED_TWL2_PATH).read_text()
    if grammar == "0.3":
        domain, rules = downgrade(domain, rules)
    return {
        "pddl_domain": domain,
        "grammar": rules.replace("UNKNOWN GOAL", describe_goal(layout, choice)),
        "pddl_problem": write_problem(layout, trial, vocabulary),
        "solvable": True,
        "walkthrough": [translate(command, grammar) for command in walkthrough],
    }


def proves(env: Any, task: Task, walkthrough: Sequence[str]) -> bool:
    """Whether the engine `env` reaches the goal with exactly the last command, every command being admissible."""
    _, info = env.reset(task, 0)
    if info["success"]:
        return False
    for i, command in enumerate(walkthrough):
        if command not in info["admissible"]:
            return False
        _, reward, done, _, info = env.step(command)
        if done != (i == len(walkthrough) - 1) or reward != float(done):
            return False
    return True


def _draw(
    seed: int, split: str, task_type: str, vocabulary: Vocabulary, index: int, variety: Variety
) -> Iterator[tuple]:
    """Layouts for one game, in a fixed order."""
    rng = random.Random(f"{seed}/{split}/{index}")
    numbers = scenes(vocabulary.rooms[task_type], unseen=split == "valid_unseen")
    for attempt in range(_MAX_TRIES):
        # Trials of the splits never coincide, though train and valid_seen share scenes.
        trial = (SPLITS.index(split) * 1_000_000 + index) * _MAX_TRIES + attempt
        layout = sample_layout(seed, rng.choice(numbers), trial, task_type, vocabulary, variety)
        choice = rng.randrange(2)
        if layout is not None:
            yield layout, choice


def make_games(
    out_dir: str | os.PathLike[str],
    counts: Mapping[str, int],
    seed: int,
    *,
    task_types: Sequence[str] = TASK_TYPES,
    variety: Variety | None = None,
    grammar: str = "0.4",
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes games into `out_dir` and returns their files, sorted; the same for the same arguments on any machine.

    counts: split -> number of games, spread evenly over `task_types`. A game is written only after its
    walkthrough has reached the goal in the real engine. Raises ValueError on an unknown split or type, and
    RuntimeError when no provable game of a type turns up.
    """
    for split, count in counts.items():
        if split not in SPLITS or count < 0:
            raise ValueError(f"counts: expected {', '.join(SPLITS)} with numbers ≥ 0, got {split!r}: {count!r}")
    for task_type in task_types:
        if task_type not in TASK_TYPES:
            raise ValueError(f"task_types: expected some of {', '.join(TASK_TYPES)}, got {task_type!r}")
    if grammar not in ("0.3", "0.4"):
        raise ValueError(f"grammar: expected '0.3' or '0.4', got {grammar!r}")
    vocabulary = Vocabulary.of_package()
    root = Path(out_dir) / GAMES_FOLDER
    engine = TextWorldEnv(root)
    written: list[Path] = []
    for split, count in counts.items():
        rejected: Counter[str] = Counter()
        for index in range(count):
            task_type = task_types[index % len(task_types)]
            trial = f"S{seed}_{index:06d}"
            for layout, choice in _draw(seed, split, task_type, vocabulary, index, variety or Variety()):
                folder = root / split / _folder(layout, trial)
                game = compose(layout, trial, choice, vocabulary, grammar)
                if _write(root, folder, game, engine, task_type, split):
                    text = describe_goal(layout, choice)
                    (folder / "traj_data.json").write_text(json.dumps(_trajectory(layout, trial, text), indent=1))
                    written.append(folder / "game.tw-pddl")
                    break
                rejected[task_type] += 1
            else:
                raise RuntimeError(f"no provable game of type {task_type} within {_MAX_TRIES} layouts")
        if report is not None:
            report(f"{split}: {count} games, {sum(rejected.values())} layouts rejected")
    engine.close()
    return sorted(written)


def _write(root: Path, folder: Path, game: Mapping[str, Any], env: Any, task_type: str, split: str) -> bool:
    """Proves `game` from a temporary file and moves it into place; False, and no trace, when the proof fails."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "game.tw-pddl"
    draft = folder / "draft"
    draft.write_text(json.dumps(game))
    task = Task("draft", task_type, split, {"game": str(draft.relative_to(root))})
    if not proves(env, task, game["walkthrough"]):
        draft.unlink()
        folder.rmdir()
        return False
    draft.replace(path)
    return True


def main(
    out: str,
    *,
    train: int = 100,
    valid_seen: int = 20,
    valid_unseen: int = 20,
    seed: int = 0,
    task_types: Sequence[str] = TASK_TYPES,
    grammar: str = "0.4",
    rare: bool = False,
) -> int:
    """`manus-fast env make-games OUT`: writes games into `out`, prints a line per split, returns 0.

    rare: everything rare is frequent (`layout.RARE`). Some 3 games a second.
    Raises ValueError on a bad argument or without the package alfworld."""
    engine_version()
    counts = {"train": train, "valid_seen": valid_seen, "valid_unseen": valid_unseen}
    variety = RARE if rare else None
    paths = make_games(out, counts, seed, task_types=task_types, variety=variety, grammar=grammar, report=print)
    print(f"{len(paths)} games in {Path(out) / GAMES_FOLDER}; train on them with environment.options.data_path={out}")
    return 0
