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


def fresh(slots=3, **options):
    env = envs.make("household", **options)
    batch = env.make_batch(slots)
    tasks = env.tasks("train")[:slots]
    infos = batch.reset(range(slots), tasks, [0] * slots)[1]
    return env, batch, tasks, infos


@pytest.mark.parametrize(
    "action",
    [
        "",
        " ",
        "\n",
        "x" * 1_000_000,
        "go to",
        "Go to " + "countertop 1",
        "épée",
        "冷蔵庫を開ける",
        "look\0",
        "go to \ud800",
        "\u0000",
    ],
)
def test_text_that_is_no_command_gives_nothing_happens(action):
    _, batch, _, infos = fresh()
    before = batch.state_hash(1)
    texts, reward, terminated, truncated, new = batch.step([1], [action])
    assert texts == ["Nothing happens."]
    assert reward[0] == 0 and not terminated[0] and not truncated[0]
    assert batch.state_hash(1) == before
    assert new[0]["admissible"] == infos[1]["admissible"]


def test_space_around_a_command_is_ignored_as_in_alfworld():
    _, batch, _, _ = fresh()
    assert batch.step([0], [" \tinventory\r\n"])[0] == ["You are not carrying anything."]


@pytest.mark.parametrize("action", [None, 3, b"look", ["look"]])
def test_an_action_that_is_no_text_is_refused(action):
    _, batch, _, _ = fresh()
    with pytest.raises(ValueError, match=r"actions\[1\]: expected a str"):
        batch.step([0, 1], ["look", action])
    assert batch.step([0], ["inventory"])[0] == ["You are not carrying anything."]


@pytest.mark.parametrize("slots", [[3], [-1], [0, 0], [2**31 - 1]])
def test_slots_that_do_not_exist_or_repeat_are_refused(slots):
    env, batch, tasks, _ = fresh()
    states = [batch.save(slot) for slot in range(3)]
    with pytest.raises(ValueError, match="slot"):
        batch.step(slots, ["look"] * len(slots))
    with pytest.raises(ValueError, match="slot"):
        batch.reset(slots, [tasks[0]] * len(slots), [0] * len(slots))
    with pytest.raises(ValueError, match="slot"):
        batch.expert(slots)
    if slots != [0, 0]:
        with pytest.raises(ValueError, match="slot"):
            batch.clone(0, slots[0])
        with pytest.raises(ValueError, match="slot"):
            batch.restore(slots[0], states[0])
    assert [batch.save(slot) for slot in range(3)] == states
    empty = env.make_batch(1)
    for call in (lambda: empty.step([0], ["look"]), lambda: empty.save(0), lambda: empty.clone(0, 0)):
        with pytest.raises(ValueError, match="reset it first"):
            call()


def test_lengths_that_differ_are_refused():
    _, batch, tasks, _ = fresh()
    with pytest.raises(ValueError, match="as many tasks"):
        batch.reset([0, 1], tasks[:1], [0, 0])
    with pytest.raises(ValueError, match="one per slot"):
        batch.step([0, 1], ["look"])


def test_clone_and_restore_continue_alike():
    env, batch, _, _ = fresh(level=2)
    for _ in range(3):
        batch.step([0], batch.expert([0], "explorer")[0])
    state = batch.save(0)
    assert len(state) < 3072
    batch.clone(0, 1)
    other = env.make_batch(1)
    other.restore(0, state)
    assert batch.admissible(0) == batch.admissible(1) == other.admissible(0)

    def finish(which, slot):
        record = []
        while True:
            actions, thoughts = which.expert([slot], "explorer")
            text, _, terminated, truncated, infos = which.step([slot], actions)
            record.append((actions, thoughts, text, infos))
            if terminated[0] or truncated[0]:
                return record

    record = finish(batch, 0)
    assert finish(batch, 1) == record
    assert finish(other, 0) == record
    batch.restore(0, state)
    assert batch.save(0) == state
    assert finish(batch, 0) == record


def test_a_single_world_clones():
    env = envs.make("household")
    world = env.make()
    world.reset(env.tasks("train")[4], 0)
    world.step("look")
    twin = world.clone()
    action, _ = world.expert("planner")
    assert world.step(action) == twin.step(action)
    assert world.expert() == twin.expert()


def test_bytes_that_are_no_state_are_refused():
    _, batch, _, _ = fresh()
    state = batch.save(0)
    for other in (b"", b"short", b"x" * len(state), state[:-1], state[:100] + b"?" + state[101:]):
        with pytest.raises(ValueError, match="state: expected"):
            batch.restore(0, other)
    assert batch.save(0) == state


def test_tasks_of_another_environment_are_refused():
    _, batch, tasks, _ = fresh()
    for task in (
        Task("a", "pick_and_place_simple", "train", {"game": "x"}),
        Task("b", "chess", "train", tasks[0].data),
        Task("c", tasks[0].type, "test", tasks[0].data),
        Task("d", tasks[0].type, "train", {**tasks[0].data, "room": "garage"}),
        Task("e", tasks[0].type, "train", {**tasks[0].data, "seed": "zero"}),
        Task("f", tasks[0].type, "train", {**tasks[0].data, "seed": -1}),
    ):
        with pytest.raises(ValueError):
            batch.reset([0], [task], [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 4}, "level"),
        ({"level": "hard"}, "level"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": 70_000}, "max_steps"),
        ({"task_types": ["pick_and_place_simple", "cook"]}, "cook"),
        ({"task_types": []}, "at least one"),
        ({"receptacles": [9, 6]}, "receptacles"),
        ({"receptacles": 2}, "receptacles"),
        ({"objects": 0}, "objects"),
        ({"objects": [1, 300]}, "objects"),
        ({"copies": 0}, "copies"),
        ({"num_train": 0}, "num_train"),
        ({"num_valid": 0}, "num_valid"),
        ({"layouts": 0}, "layouts"),
        ({"seed": -1}, "seed"),
        ({"expert": "oracle"}, "expert"),
        ({"grammar": "drop"}, "grammar"),
        ({"backend": "textworld"}, "backend"),
    ],
)
def test_options_that_cannot_be_served_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("household", **options)


def test_knobs_and_task_types():
    env = envs.make(
        "household", receptacles=[12, 12], objects=9, copies=1, task_types=["look_at_obj_in_light"], num_valid=20
    )
    tasks = env.tasks("valid_unseen")
    assert len(tasks) == 20 and {task.type for task in tasks} == {"look_at_obj_in_light"}
    batch = env.make_batch(20)
    texts, infos = batch.reset(range(20), tasks, [0] * 20)
    assert {info["admissible"].__len__() for info in infos} == {12 + 3}  # go to each; help, inventory, look
    assert all("desklamp" in text for text in texts)


def test_the_older_grammar():
    _, batch, _, _ = fresh(1, grammar="put", task_types=["pick_and_place_simple"])
    spoken = []
    while True:
        actions, _ = batch.expert([0], "planner")
        text, _, terminated, _, _ = batch.step([0], actions)
        spoken.append((actions[0], text[0]))
        if terminated[0]:
            break
    action, text = spoken[-1]
    name, place = action.removeprefix("put ").split(" in/on ")
    assert text == f"You put the {name} in/on the {place}."


def test_memory_stays_flat_over_many_games():
    resource = pytest.importorskip("resource")
    env = envs.make("household", level=3, max_steps=60_000)
    batch = env.make_batch(64)
    tasks = env.tasks("train")

    def rounds(start, n):
        for i in range(start, start + n):
            infos = batch.reset(range(64), tasks[64 * i : 64 * i + 64], [0] * 64)[1]
            batch.step(range(64), [info["admissible"][i % 3] for info in infos])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds(0, 20)
    assert rounds(20, 60) - before < 4 * 1024  # KiB


def test_brief_thoughts_are_subgoals():
    env = envs.make("household", thoughts="brief", expert="planner", task_types=["pick_heat_then_place_in_recep"])
    batch = env.make_batch(1)
    batch.reset([0], env.tasks("train")[:1], [0])
    thoughts = []
    while True:
        actions, (thought,) = batch.expert([0])
        thoughts.append(thought.split()[0])
        if batch.step([0], actions)[2][0]:
            break
    assert list(dict.fromkeys(thoughts)) == ["take", "heat", "put"]
    with pytest.raises(ValueError, match="thoughts"):
        envs.make("household", thoughts="long")


def test_progress_counts_the_subgoals_of_a_shortest_plan():
    milestones = {
        "pick_and_place_simple": [0, 1 / 2, 1],
        "look_at_obj_in_light": [0, 1 / 2, 1],
        "pick_two_obj_and_place": [0, 1 / 4, 2 / 4, 3 / 4, 1],
    }
    household = Household(max_steps=50)
    batch = household.make_batch(1)
    for i in range(60):
        task = household.tasks("train")[i]
        _, infos = batch.reset([0], [task], [0])
        seen, over = [infos[0]["progress"]], False
        while not over:
            _, _, terminated, truncated, infos = batch.step([0], batch.expert([0], "planner")[0])
            over = terminated[0] or truncated[0]
            assert (infos[0]["progress"] == 1) == infos[0]["success"] == terminated[0]
            if infos[0]["progress"] != seen[-1]:
                seen.append(infos[0]["progress"])
        np.testing.assert_allclose(seen, milestones.get(task.type, [0, 1 / 3, 2 / 3, 1]), rtol=1e-6)


def test_losing_an_object_loses_its_progress():
    household = Household(max_steps=50, grammar="move")
    batch = household.make_batch(1)
    task = next(t for t in household.tasks("train")[:200] if t.type == "pick_and_place_simple")
    batch.reset([0], [task], [0])
    infos = [{"progress": 0.0}]
    while infos[0]["progress"] == 0:
        action = batch.expert([0], "planner")[0]
        _, _, _, _, infos = batch.step([0], action)
    thing, place = action[0].removeprefix("take ").split(" from ")
    _, _, terminated, _, infos = batch.step([0], [f"move {thing} to {place}"])
    assert infos[0]["progress"] == 0 and not terminated[0]
