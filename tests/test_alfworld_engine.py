"""The real engine: same text as the package's own environment, generated games, clone, failures, worker pool."""

import functools
import json
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from manus_fast.envs import base
from manus_fast.envs.alfworld import AlfWorld
from manus_fast.envs.alfworld.games import compose, make_games, proves
from manus_fast.envs.alfworld.grammar import translate, with_words
from manus_fast.envs.alfworld.layout import TASK_TYPES, Variety, Vocabulary, sample_layout, scenes
from manus_fast.envs.alfworld.panels import find_root, find_tasks
from manus_fast.envs.alfworld.pddl import demangle, entities
from manus_fast.envs.alfworld.textworld import TextWorldEnv
from manus_fast.envs.base import Task
from manus_fast.envs.pool import WorkerPool

pytestmark = pytest.mark.alfworld
COUNTS = {"train": 6, "valid_seen": 12, "valid_unseen": 6}


class PackageEnv:
    """The package's `AlfredTWEnv`, unpatched, one game at a time: what our text is compared with."""

    def reset(self, task, seed):
        from alfworld.agents.environment import get_environment

        folder = str(Path(task.data["path"]).parent)
        dataset = {"data_path": folder, "eval_id_data_path": folder, "eval_ood_data_path": folder}
        config = {
            "dataset": dataset | {"num_train_games": -1, "num_eval_games": -1},
            "env": {
                "task_types": [1, 2, 3, 4, 5, 6],
                "domain_randomization": False,
                "expert_type": "handcoded",
                "goal_desc_human_anns_prob": 0,
            },
            "general": {"training_method": "dqn"},
            "rl": {"training": {"max_nb_steps_per_episode": 50}},
        }
        self.env = get_environment("AlfredTWEnv")(config, train_eval="eval_in_distribution").init_env(batch_size=1)
        observations, infos = self.env.reset()
        return observations[0], {"admissible": infos["admissible_commands"][0], "success": infos["won"][0]}

    def step(self, action):
        observations, scores, dones, infos = self.env.step([action])
        info = {"admissible": infos["admissible_commands"][0], "success": infos["won"][0]}
        return observations[0], float(scores[0]), bool(infos["won"][0]), bool(dones[0] and not infos["won"][0]), info

    def close(self):
        pass


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("alfworld")
    make_games(path, COUNTS, seed=11)
    return path


def walkthrough(root, task):
    return json.loads((root / task.data["game"]).read_text())["walkthrough"]


def answer(pool):
    for _ in range(600):
        for _, result in pool.poll(1.0):
            return result
    raise AssertionError("no answer")


def test_registered_and_panels_are_complete(data):
    environment = base.make("alfworld", data_path=str(data), backend="textworld", max_steps=None)
    assert isinstance(environment, AlfWorld) and environment.max_steps == 50
    for split, count in COUNTS.items():
        tasks = environment.tasks(split)
        assert len({t.id for t in tasks}) == len(tasks) == count
        assert {t.type for t in tasks} == set(TASK_TYPES)
    assert "move O to R" in environment.instructions


def test_text_is_that_of_the_package(data):
    """Every string of stock AlfredTWEnv in a fresh process against ours, patched: walkthroughs with random detours."""
    root = find_root(data)
    ours = TextWorldEnv(root)
    rng = random.Random(5)
    with WorkerPool(PackageEnv, slots=1) as pool:
        for task in find_tasks(root, "train"):
            pool.send_reset(0, Task(task.id, task.type, "", {"path": str(root / task.data["game"])}), 0)
            theirs = answer(pool)
            observation, info = ours.reset(task, 0)
            assert (observation, info["admissible"]) == (theirs.observation, theirs.info["admissible"])
            detour = [rng.choice(info["admissible"]) for _ in range(3)]
            commands = ["nonsense", "look", *detour, "inventory", "help", *walkthrough(root, task)]
            commands += [rng.choice(info["admissible"]) for _ in range(3)]
            for command in commands:
                pool.send_step(0, command)
                theirs = answer(pool)
                observation, reward, terminated, _, info = ours.step(command)
                assert (observation, info["admissible"]) == (theirs.observation, theirs.info["admissible"]), command
                assert (reward, terminated) == (theirs.reward, theirs.terminated)
                if terminated:
                    break
    ours.close()


def test_names_are_those_of_the_package():
    from alfworld.agents.utils.misc import Demangler

    class Info:
        def __init__(self, id):
            self.id = id

    vocabulary = Vocabulary.of_package()
    for trial in range(20):
        layout = sample_layout(3, 401 + trial, trial, "pick_and_place_simple", vocabulary)
        ids = entities(layout) | {"agent1", "mugtype", "sinkbasintype"}
        theirs = Demangler(game_infos={id: Info(id) for id in ids})
        assert demangle(ids) == {id: theirs.demangle_alfred_name(id) for id in ids}


def test_episode_ends_with_the_goal_or_with_the_steps(data):
    root = find_root(data)
    task = find_tasks(root, "valid_seen")[0]
    env = TextWorldEnv(root, max_steps=200)
    commands = walkthrough(root, task)
    assert proves(env, task, commands)
    with pytest.raises(ValueError, match="step: expected a running game"):
        env.step("look")
    _, info = env.reset(task, 0)
    assert info["grammar"] == "0.4" and info["backend"] == "textworld" and info["engine"].startswith("alfworld 0.4")
    assert info["type"] == task.type and not info["success"] and info["admissible"] == sorted(set(info["admissible"]))
    observation, reward, terminated, truncated, info = env.step("fly to the moon")
    assert (observation, reward, terminated, truncated) == ("Nothing happens.", 0.0, False, False)
    short = TextWorldEnv(root, max_steps=2)
    short.reset(task, 0)
    assert short.step("look")[2:4] == (False, False)
    assert short.step("look")[2:4] == (False, True)
    short.close()
    env.close()


def test_reaching_the_goal_with_the_last_step_is_a_success(data):
    root = find_root(data)
    task = find_tasks(root, "valid_seen")[0]
    commands = walkthrough(root, task)
    env = TextWorldEnv(root, max_steps=len(commands))
    env.reset(task, 0)
    for command in commands:
        last = env.step(command)
    assert last[1:4] == (1.0, True, False) and last[4]["success"]
    env.close()


def test_old_grammar_is_played_and_recorded(data, tmp_path):
    root = find_root(data)
    task = find_tasks(root, "valid_seen", ("pick_and_place_simple",))[0]
    game = json.loads((root / task.data["game"]).read_text())
    game["grammar"] = with_words(game["grammar"], "0.3")
    (tmp_path / "game.tw-pddl").write_text(json.dumps(game))
    env = TextWorldEnv(tmp_path)
    old = Task("old", task.type, "", {"game": "game.tw-pddl"})
    _, info = env.reset(old, 0)
    assert info["grammar"] == "0.3"
    commands = [translate(command, "0.3") for command in game["walkthrough"]]
    assert " in/on " in commands[-1]
    for command in commands:
        observation, _, terminated, _, _ = env.step(command)
    put, target = commands[-1].removeprefix("put ").split(" in/on ")
    assert terminated and observation == f"You put the {put} in/on the {target}."
    env.close()


def test_clone_and_saved_state_continue_alike(data):
    root = find_root(data)
    task = find_tasks(root, "valid_seen")[3]
    env = TextWorldEnv(root)
    commands = walkthrough(root, task)
    env.reset(task, 7)
    for command in commands[:2]:
        env.step(command)
    state = env.save()
    copy = env.clone()
    assert copy.save() == state
    rest = [env.step(command) for command in commands[2:]]
    assert rest[-1][2] and [copy.step(command) for command in commands[2:]] == rest
    other = TextWorldEnv(root)
    other.restore(state)
    assert [other.step(command) for command in commands[2:]] == rest
    with pytest.raises(ValueError, match="restore: expected the bytes of save"):
        other.restore(b"\x00\x01")
    for each in (env, copy, other):
        each.close()


def test_engine_leaves_argv_alone(data):
    before = list(sys.argv)
    root = find_root(data)
    env = TextWorldEnv(root)
    env.reset(find_tasks(root, "train")[0], 0)
    env.step("look")
    env.close()
    assert sys.argv == before


def test_pool_plays_and_masks_broken_games(data, tmp_path):
    """A truncated file, a goal that is no PDDL and a killed worker are failures of their episodes alone."""
    import os
    import signal

    root = find_root(data)
    environment = AlfWorld(backend="textworld", data_path=str(data), workers=2, recycle_after=2)
    tasks = environment.tasks("train")
    text = (root / tasks[0].data["game"]).read_text()
    broken = root / "train" / "broken"
    broken.mkdir()
    (broken / "cut").write_text(text[: len(text) // 2])
    game = json.loads(text)
    game["pddl_problem"] = game["pddl_problem"].split("(:goal")[0]
    (broken / "goalless").write_text(json.dumps(game))

    def play(pool, slots):
        for slot in slots:
            pool.send_reset(slot, tasks[slot], 0)
        won, left = set(), {slot: list(walkthrough(root, tasks[slot])) for slot in slots}
        while left:
            for slot, result in pool.poll(60.0):
                assert not result.failed, result.info
                if result.terminated:
                    won.add(slot)
                    del left[slot]
                else:
                    pool.send_step(slot, left[slot].pop(0))
        return won

    pool = environment.make_async(4)
    try:
        assert play(pool, range(4)) == {0, 1, 2, 3}
        for name, message in (("cut", "expected JSON"), ("goalless", "")):
            pool.send_reset(0, Task(name, "x", "train", {"game": f"train/broken/{name}"}), 0)
            result = answer(pool)
            assert result.failed and message in result.info["error"]
        pool.send_reset(1, tasks[1], 0)
        assert not answer(pool).failed
        pool.send_step(1, "look")
        os.kill(pool._home[1].process.pid, signal.SIGKILL)
        assert answer(pool).info["error"] == "the worker died (signal SIGKILL)"
        assert play(pool, range(4)) == {0, 1, 2, 3}
        assert pool.recycled >= 2 and pool.restarts == 1
    finally:
        pool.close()


def test_games_are_the_same_for_the_same_seed(tmp_path):
    a = make_games(tmp_path / "a", {"valid_unseen": 2}, seed=4)
    b = make_games(tmp_path / "b", {"valid_unseen": 2}, seed=4)
    c = make_games(tmp_path / "c", {"valid_unseen": 2}, seed=5)
    for left, right in zip(a, b, strict=True):
        assert left.relative_to(tmp_path / "a") == right.relative_to(tmp_path / "b")
        assert left.read_bytes() == right.read_bytes()
    assert [p.read_bytes() for p in a] != [p.read_bytes() for p in c]
    assert {p.parts[-3].rsplit("-", 1)[1] for p in a} <= {str(n) for n in [*range(1, 7), *range(201, 207)]} | {
        str(n) for n in [*range(301, 307), *range(401, 407)]
    }
    with pytest.raises(ValueError, match="counts: expected train, valid_seen, valid_unseen"):
        make_games(tmp_path, {"test": 1}, seed=1)
    with pytest.raises(ValueError, match="task_types: expected some of"):
        make_games(tmp_path, {"train": 1}, seed=1, task_types=("juggle",))


def test_layouts_cover_the_vocabulary_and_the_rare_cases():
    vocabulary = Vocabulary.of_package()
    layouts = [
        sample_layout(1, scene, trial, task_type, vocabulary)
        for task_type in TASK_TYPES
        for scene in scenes(vocabulary.rooms[task_type], unseen=False)
        for trial in range(2)
    ]
    assert None not in layouts
    things = [t for layout in layouts for t in layout.things]
    furniture = [r for layout in layouts for r in layout.receptacles]
    assert {t.cls for t in things} == vocabulary.objects
    assert {r.cls for r in furniture} == vocabulary.receptacles
    assert {s for t in things for s in t.facts} >= {"isSliced", "isClean", "isHot", "isCool", "toggleable"}
    assert any(len(t.inside) == 2 for t in things) and any(t.within for t in things)
    assert any(not t.inside and not t.within and "pickupable" in t.facts for t in things)
    assert any(r.opened for r in furniture) and any(r.location is None for r in furniture)
    assert any(r.cls in vocabulary.openable and not r.openable for r in furniture)
    shared = [{r.location for r in layout.receptacles if r.location} for layout in layouts]
    assert any(len(s) < len(layout.receptacles) - 3 for s, layout in zip(shared, layouts, strict=True))
    plain = Variety(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    calm = sample_layout(1, 10, 0, "pick_and_place_simple", vocabulary, plain)
    assert len({r.location for r in calm.receptacles}) == len(calm.receptacles)


def test_engine_agrees_with_a_goal_that_is_not_reached(data, tmp_path):
    """A walkthrough that stops short, or that has a command too many, is not accepted as a proof."""
    vocabulary = Vocabulary.of_package()
    layout = sample_layout(2, 12, 0, "pick_cool_then_place_in_recep", vocabulary)
    game = compose(layout, "x", 0, vocabulary)
    (tmp_path / "game.tw-pddl").write_text(json.dumps(game))
    env = TextWorldEnv(tmp_path)
    task = Task("x", layout.goal.type, "", {"game": "game.tw-pddl"})
    assert proves(env, task, game["walkthrough"])
    assert not proves(env, task, [*game["walkthrough"][:-1], "look"])
    assert not proves(env, task, [*game["walkthrough"], "look"])
    assert not proves(env, task, ["look around", *game["walkthrough"]])
    env.close()


def test_stock_engine_cannot_be_asked_for_in_a_patched_process(data):
    root = find_root(data)
    task = find_tasks(root, "train")[0]
    fast = TextWorldEnv(root)
    fast.reset(task, 0)
    fast.close()
    with pytest.raises(ValueError, match="fast: expected True, the kind of engine"):
        TextWorldEnv(root, fast=False).reset(task, 0)
    with WorkerPool(functools.partial(TextWorldEnv, str(root), 50, False), slots=1) as pool:
        pool.send_reset(0, task, 0)
        assert not answer(pool).failed
