"""The household environment from Python: splits, experts, slots, clones, bad input."""

import numpy as np
import pytest

from manus_fast import _C, envs
from manus_fast.envs.base import Env, EnvBatch, Task
from manus_fast.envs.household import SPLITS, TASK_TYPES, Household


def play(batch, tasks, kind):
    """Plays all tasks with an expert; returns which were won, the lengths and the longest thought in words."""
    slots = list(range(len(tasks)))
    batch.reset(slots, tasks, [0] * len(tasks))
    won, length, words = np.zeros(len(tasks), bool), np.zeros(len(tasks), int), 0
    while slots:
        actions, thoughts = batch.expert(slots, kind)
        words = max(words, *(len(thought.split()) for thought in thoughts), 0)
        _, reward, terminated, truncated, infos = batch.step(slots, actions)
        assert (reward == terminated).all()
        assert [info["success"] for info in infos] == terminated.tolist()
        length[slots] += 1
        won[slots] = terminated
        slots = [s for s, done in zip(slots, terminated | truncated, strict=True) if not done]
    return won, length, words


@pytest.mark.parametrize("level", [1, 2, 3])
def test_planner_wins_every_generated_task_of_all_six_types(level):
    env = envs.make("household", level=level, max_steps=20)
    tasks = [env.tasks(split)[i] for split in env.splits for i in range(140)] + env.tasks("train")[140:700]
    assert {task.type for task in tasks} == set(TASK_TYPES)
    won, length, words = play(env.make_batch(len(tasks)), tasks, "planner")
    assert won.all()
    assert words <= 12
    # Walk, open, take; walk, process; walk, open, put: no task with one object needs more than 8 commands.
    single = np.array([task.type != "pick_two_obj_and_place" for task in tasks])
    assert length[single].max() <= 8
    assert length.max() <= 11


@pytest.mark.parametrize("kind", ["explorer", "sweep"])
def test_explorers_search_and_win_within_fifty_steps(kind):
    env = envs.make("household", level=3, max_steps=50)
    tasks = env.tasks("valid_unseen")[:512]
    batch = env.make_batch(len(tasks))
    won, length, words = play(batch, tasks, kind)
    assert won.mean() > 0.97
    assert words <= 12
    planned = play(batch, tasks, "planner")[1]
    assert (length >= planned).all()


@pytest.mark.parametrize("kind", ["planner", "explorer", "sweep"])
def test_experts_recover_from_whatever_was_played_before(kind):
    env = envs.make("household", level=2, max_steps=200)
    tasks = env.tasks("train")[:300]
    batch = env.make_batch(len(tasks))
    infos = batch.reset(range(300), tasks, [0] * 300)[1]
    rng = np.random.default_rng(1)
    alive = set(range(300))
    for _ in range(30):
        slots = sorted(alive)
        actions = [infos[s]["admissible"][rng.integers(len(infos[s]["admissible"]))] for s in slots]
        texts, _, terminated, _, new = batch.step(slots, actions)
        assert "Nothing happens." not in texts  # what is called admissible is
        for slot, done, info in zip(slots, terminated, new, strict=True):
            infos[slot] = info
            if done:
                alive.discard(slot)
    assert len(alive) > 200
    slots = sorted(alive)
    for _ in range(100):
        actions, _ = batch.expert(slots, kind)
        _, _, terminated, truncated, _ = batch.step(slots, actions)
        slots = [s for s, done in zip(slots, terminated | truncated, strict=True) if not done]
        if not slots:
            break
    assert slots == []


def test_protocol_and_registry():
    env = envs.make("household")
    assert isinstance(env, Household)
    batch = env.make_batch(2)
    assert isinstance(batch, EnvBatch)
    assert isinstance(env.make(), Env)
    task = env.tasks("train")[0]
    observations, infos = batch.reset([1], [task], [0])
    assert observations[0].startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. ")
    assert "\n\nYour task is to: " in observations[0] and observations[0].endswith(".")
    assert infos[0]["admissible"] == sorted(set(infos[0]["admissible"]))
    assert infos[0]["success"] is False


def test_tasks_are_lazy_stable_and_rebuild_the_same_game():
    env, other = envs.make("household", level=2), envs.make("household", level=2)
    tasks = env.tasks("train")
    assert len(tasks) == 100_000 and len(env.tasks("valid_seen")) == 140 and len(env.tasks("valid_unseen")) == 512
    assert tasks[99_999] == other.tasks("train")[99_999] == tasks[-1]
    assert len({task.id for task in tasks[:2000]}) == 2000
    with pytest.raises(IndexError):
        tasks[100_000]
    with pytest.raises(ValueError, match="split"):
        env.tasks("test")
    batch = env.make_batch(2)
    copy = Task(tasks[7].id, tasks[7].type, "train", dict(tasks[7].data))
    first, second = batch.reset([0, 1], [tasks[7], copy], [1, 2])[0]
    assert first == second


def test_max_steps_truncates_and_does_not_terminate():
    env = envs.make("household", max_steps=2)
    batch = env.make_batch(1)
    batch.reset([0], [env.tasks("train")[0]], [0])
    _, _, terminated, truncated, _ = batch.step([0], ["look"])
    assert not terminated[0] and not truncated[0]
    text, reward, terminated, truncated, _ = batch.step([0], ["dance"])
    assert text == ["Nothing happens."]
    assert reward[0] == 0 and not terminated[0] and truncated[0]
    with pytest.raises(ValueError, match="episode is over"):
        batch.step([0], ["look"])


def test_results_do_not_depend_on_threads():
    env = envs.make("household", level=2)
    tasks = env.tasks("train")[:300]
    threads = _C.num_threads()
    runs = []
    for n in (1, 2):
        _C.set_num_threads(n)
        batch = env.make_batch(300)
        record = [batch.reset(range(300), tasks, [0] * 300)]
        live = list(range(300))
        for _ in range(5):
            actions, thoughts = batch.expert(live, "explorer")
            texts, reward, terminated, _, infos = batch.step(live, actions)
            record.append((actions, thoughts, texts, reward.tolist(), infos))
            live = [s for s, done in zip(live, terminated, strict=True) if not done]
        runs.append(record)
    _C.set_num_threads(threads)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("level", [1, 3])
def test_splits_share_no_layout_and_no_game(level):
    env = envs.make("household", level=level, num_train=12_000, num_valid=1500)
    layouts, games = {}, {}
    for split in SPLITS:
        tasks = list(env.tasks(split))
        batch = env.make_batch(len(tasks))
        texts, _ = batch.reset(range(len(tasks)), tasks, [0] * len(tasks))
        # What the introduction lists is all that can be known of a layout.
        layouts[split] = {(task.data["room"], text.split("\n\n")[1]) for task, text in zip(tasks, texts, strict=True)}
        games[split] = {batch.fingerprint(slot) for slot in range(len(tasks))}
    assert len(layouts["valid_unseen"]) > 100
    assert not layouts["train"] & layouts["valid_unseen"]
    assert layouts["valid_seen"] <= layouts["train"]
    assert not games["train"] & games["valid_seen"]
    assert not games["train"] & games["valid_unseen"]
