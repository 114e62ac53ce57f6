"""The memoised engine says, character by character, what the stock engine says."""

import functools
import random

import pytest

pytest.importorskip("alfworld")

from manus_fast.envs.alfworld.fast import GAMES, TEMPLATES
from manus_fast.envs.alfworld.games import make_games
from manus_fast.envs.alfworld.layout import RARE
from manus_fast.envs.alfworld.panels import find_root, find_tasks
from manus_fast.envs.alfworld.textworld import TextWorldEnv
from manus_fast.envs.pool import WorkerPool

pytestmark = pytest.mark.alfworld
WALKS = 2
STEPS = 20


def answer(pool):
    for _ in range(600):
        for _, result in pool.poll(1.0):
            return result
    raise AssertionError("no answer")


def test_same_text_on_random_walks(tmp_path):
    """Rich homes (everything rare made frequent), two walks a game so that caches are warm and shared."""
    make_games(tmp_path, {"train": 3}, seed=21, variety=RARE)
    root = find_root(tmp_path)
    rng = random.Random(2)
    fast = TextWorldEnv(root, max_steps=1000)
    compared = 0
    with WorkerPool(functools.partial(TextWorldEnv, str(root), 1000, False), slots=1, step_timeout=120) as pool:
        for _ in range(WALKS):
            for task in find_tasks(root, "train"):
                pool.send_reset(0, task, 0)
                stock, ours = answer(pool), fast.reset(task, 0)
                assert (stock.observation, stock.info) == ours
                for _ in range(STEPS):
                    # Commands that change things are drawn more often than those that only look.
                    commands = ours[-1]["admissible"]
                    acting = [c for c in commands if c.split()[0] not in ("examine", "help", "inventory", "look")]
                    command = rng.choice(acting if rng.random() < 0.7 else commands)
                    pool.send_step(0, command)
                    stock, ours = answer(pool), fast.step(command)
                    assert (stock.observation, stock.reward, stock.terminated, stock.truncated, stock.info) == ours
                    compared += 1
                    if stock.terminated:
                        break
    assert compared > 60


def test_caches_are_bounded():
    import fast_downward
    from textworld.logic import Rule

    assert Rule.parse_conjunctive_query.cache_info().maxsize == TEMPLATES
    assert fast_downward.pddl2sas.__closure__ is not None
    cells = [cell.cell_contents for cell in fast_downward.pddl2sas.__closure__]
    assert [c.cache_info().maxsize for c in cells if hasattr(c, "cache_info")] == [GAMES]


def test_planner_still_plans(tmp_path):
    """The deferred translation is made when a plan is asked for."""
    import textworld

    make_games(tmp_path, {"train": 1}, seed=3)
    root = find_root(tmp_path)
    task = find_tasks(root, "train")[0]
    env = TextWorldEnv(root)
    env.reset(task, 0)
    engine = env._env.unwrapped
    assert isinstance(engine, textworld.Environment)
    commands = engine._pddl_state.replan(engine._entity_infos)
    done = False
    for command in commands:
        done = env.step(command)[2]
    assert done
    env.close()
