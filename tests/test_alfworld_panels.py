"""What ALFWorld's environment does without its engine: finding games, panels, grammars, names, plans."""

import json
import math

import pytest

from manus_fast.envs.alfworld.grammar import grammar_of, translate, with_words
from manus_fast.envs.alfworld.layout import TASK_TYPES, Goal, Layout, Receptacle, Thing, room_of, scenes
from manus_fast.envs.alfworld.panels import PUBLISHED, find_root, find_tasks
from manus_fast.envs.alfworld.pddl import demangle, entities
from manus_fast.envs.alfworld.plan import plan
from manus_fast.envs.alfworld.textworld import read_game
from manus_fast.envs.base import Task
from manus_fast.envs.batch import EnvList

MOVE = 'action PutObject {\n    template :: "move {o} to {r}";\n}\n"rhs": "You move the {o.name} to the {r.name}."'
PUT = 'action PutObject {\n    template :: "put {o} in/on {r}";\n}\n"rhs": "You put the {o.name} in/on the {r.name}."'


def add_game(root, folder, task_type="pick_and_place_simple", solvable=True, **extra):
    path = root / folder
    path.mkdir(parents=True)
    (path / "traj_data.json").write_text(json.dumps({"task_type": task_type}))
    game = {"pddl_domain": "d", "grammar": MOVE, "pddl_problem": "p" * 70000, "solvable": solvable, "walkthrough": []}
    (path / "game.tw-pddl").write_text(json.dumps(game | extra))
    return path


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "json_2.1.1"
    for split in ("valid_seen", "train"):
        add_game(root, f"{split}/b-Mug-None-Desk-301/trial_2")
        add_game(root, f"{split}/b-Mug-None-Desk-301/trial_10")
        add_game(root, f"{split}/a-Mug-None-Desk-301/trial_1", "pick_two_obj_and_place")
    add_game(root, "train/c-Mug-None-Desk-301/trial_1", solvable=False)
    add_game(root, "train/c-Mug-None-Desk-301/trial_2", solvable=None)
    add_game(root, "train/d-AppleSliced-None-Desk-301/trial_1")
    add_game(root, "train/pick_and_place_with_movable_recep-Mug-Bowl-Desk-301/trial_1")
    add_game(root, "train/e-Mug-None-Desk-301/trial_1", "pick_and_place_with_movable_recep")
    (add_game(root, "train/f-Mug-None-Desk-301/trial_1") / "traj_data.json").unlink()
    return tmp_path


def test_root_is_found_in_its_usual_places(data, monkeypatch):
    root = data / "json_2.1.1"
    assert find_root(data) == root and find_root(root) == root
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    assert find_root() == root
    monkeypatch.setenv("ALFWORLD_DATA", str(data / "nowhere"))
    with pytest.raises(ValueError, match=r"\$ALFWORLD_DATA: expected a folder with json_2.1.1/train.*nowhere"):
        find_root()


def test_panel_is_sorted_and_holds_each_playable_game_once(data):
    tasks = find_tasks(find_root(data), "train")
    games = [
        "train/a-Mug-None-Desk-301/trial_1",
        "train/b-Mug-None-Desk-301/trial_10",
        "train/b-Mug-None-Desk-301/trial_2",
    ]
    assert [t.id for t in tasks] == [f"alfworld/{g}" for g in games]
    assert [t.data["game"] for t in tasks] == [f"{g}/game.tw-pddl" for g in games]
    assert [t.type for t in tasks] == ["pick_two_obj_and_place", *["pick_and_place_simple"] * 2]
    assert {t.split for t in tasks} == {"train"}
    assert len(find_tasks(find_root(data), "train", ("pick_two_obj_and_place",))) == 1


def test_panel_errors_name_the_matter(data):
    root = find_root(data)
    with pytest.raises(ValueError, match="split: expected one of train, valid_seen, valid_unseen, got 'test'"):
        find_tasks(root, "test")
    with pytest.raises(ValueError, match="split: expected a folder valid_unseen"):
        find_tasks(root, "valid_unseen")
    (root / "train/a-Mug-None-Desk-301/trial_1/traj_data.json").write_text('{"task_ty')
    with pytest.raises(ValueError, match=r"traj_data\.json: expected JSON with a task_type"):
        find_tasks(root, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"pddl_domain": "x", "gram', "expected JSON"),
        ('{"grammar": "g"}', "expected the key 'pddl_domain'"),
        ("[]", "key"),
    ],
)
def test_broken_game_file_is_named(tmp_path, text, message):
    path = tmp_path / "game.tw-pddl"
    with pytest.raises(ValueError, match="expected a readable file"):
        read_game(path)
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_game(path)
    assert str(path) in str(error.value)


def test_both_grammars_are_told_apart_and_turned_into_each_other():
    assert grammar_of(MOVE) == "0.4" and grammar_of(PUT) == "0.3"
    assert with_words(MOVE, "0.3") == PUT and with_words(PUT, "0.4") == MOVE and with_words(PUT, "0.3") == PUT
    assert translate("move mug 1 to desk 2", "0.3") == "put mug 1 in/on desk 2"
    assert translate("put mug 1 in/on desk 2", "0.4") == "move mug 1 to desk 2"
    assert translate("take mug 1 from desk 2", "0.3") == "take mug 1 from desk 2"
    with pytest.raises(ValueError, match="grammar: expected the action PutObject as"):
        grammar_of('action PutObject { template :: "drop {o}"; }')


def test_names_count_down_in_sorted_order_and_basins_are_their_own_class():
    names = demangle(
        [
            "apple_bar__plus_01_dot_00_bar_b",
            "apple_bar__minus_01_dot_00_bar_a",
            "sink_bar_a",
            "sink_bar_a_bar_sinkbasin",
            "sink_bar_b_bar_sinkbasin",
            "agent1",
        ]
    )
    # "_minus_" sorts before "_plus_": the first gets the highest number.
    assert names["apple_bar__minus_01_dot_00_bar_a"] == "apple 2"
    assert names["apple_bar__plus_01_dot_00_bar_b"] == "apple 1"
    assert names["sink_bar_a"] == "sink 1"
    assert names["sink_bar_a_bar_sinkbasin"] == "sinkbasin 2"
    assert names["agent1"] == "agent1 "


def test_scenes_of_the_splits_do_not_meet():
    rooms = ("Kitchen", "LivingRoom", "Bedroom", "Bathroom")
    seen, unseen = scenes(rooms, unseen=False), scenes(rooms, unseen=True)
    assert len(seen) == 96 and len(unseen) == 24 and not set(seen) & set(unseen)
    assert [room_of(n) for n in (1, 230, 301, 430)] == ["Kitchen", "LivingRoom", "Bedroom", "Bathroom"]
    with pytest.raises(ValueError, match="scene: expected"):
        room_of(31)


def layout(goal):
    receptacles = (
        Receptacle("Desk_bar_1", "Desk", "loc_bar_1", False),
        Receptacle("Drawer_bar_1", "Drawer", "loc_bar_1", True),
        Receptacle("Microwave_bar_1", "Microwave", "loc_bar_2", True),
    )
    facts = frozenset({"pickupable", "heatable"})
    things = (
        Thing("Mug_bar_1", "Mug", "loc_bar_1", ("Drawer_bar_1",), None, facts),
        Thing("Mug_bar_2", "Mug", "loc_bar_1", ("Drawer_bar_1",), None, facts),
        Thing("DeskLamp_bar_1", "DeskLamp", "loc_bar_1", ("Desk_bar_1",), None, frozenset({"toggleable"})),
    )
    return Layout(301, receptacles, things, ("loc_bar_0", "loc_bar_1", "loc_bar_2"), "loc_bar_0", goal, frozenset())


FETCH = "go to drawer 1; open drawer 1; take mug 2 from drawer 1"


@pytest.mark.parametrize(
    ("goal", "commands"),
    [
        # Desk and drawer stand at one place: no second "go to" between them.
        (Goal("pick_and_place_simple", "Mug", "Desk"), f"{FETCH}; move mug 2 to desk 1"),
        (
            Goal("pick_two_obj_and_place", "Mug", "Microwave"),
            f"{FETCH}; go to microwave 1; open microwave 1; move mug 2 to microwave 1; "
            "go to drawer 1; take mug 1 from drawer 1; go to microwave 1; move mug 1 to microwave 1",
        ),
        (
            Goal("pick_heat_then_place_in_recep", "Mug", "Desk"),
            f"{FETCH}; go to microwave 1; heat mug 2 with microwave 1; go to desk 1; move mug 2 to desk 1",
        ),
        (Goal("look_at_obj_in_light", "Mug", toggle="DeskLamp"), f"{FETCH}; use desklamp 1"),
        (Goal("pick_cool_then_place_in_recep", "Mug", "Desk"), None),
        (Goal("pick_and_place_simple", "Mug", "Bed"), None),
        (Goal("look_at_obj_in_light", "Mug", toggle="FloorLamp"), None),
    ],
)
def test_plans(goal, commands):
    home = layout(goal)
    assert plan(home, demangle(entities(home))) == (commands and commands.split("; "))


class Counter:
    """A world that counts to three, breaks on request, and can be cloned and saved."""

    def __init__(self, count=0):
        self.count = count

    def reset(self, task, seed):
        if task.id == "broken":
            raise OSError("no disk")
        self.count = seed
        return str(seed), {}

    def step(self, action):
        if action == "break":
            raise RuntimeError("bug")
        if action in ("None", "nan"):
            return None if action == "None" else ("x", math.nan, False, False, {})
        self.count += 1
        return str(self.count), 1.0, self.count >= 3, False, {}

    def clone(self):
        return Counter(self.count)

    def save(self):
        return str(self.count).encode()

    def restore(self, state):
        self.count = int(state)

    def close(self):
        pass


def test_list_of_worlds_masks_failures_clones_and_restores():
    batch = EnvList(Counter, 3)
    task, broken = Task("t", "count", "train"), Task("broken", "count", "train")
    observations, infos = batch.reset([0, 1, 2], [task, broken, task], [0, 0, 1])
    assert observations == ["0", "", "1"] and infos[1] == {"error": "OSError: no disk"}
    observations, rewards, terminated, truncated, infos = batch.step([0, 1, 2], ["go", "go", "break"])
    assert observations == ["1", "", ""] and rewards[0] == 1.0 and all(math.isnan(r) for r in rewards[1:])
    assert terminated.tolist() == [False] * 3 and truncated.tolist() == [False, True, True]
    assert infos[2] == {"error": "RuntimeError: bug"} and "expected one that was reset" in infos[1]["error"]
    batch.clone(0, 2)
    state = batch.save(2)
    assert batch.step([2], ["go"])[0] == ["2"] and batch.step([2], ["go"])[2].tolist() == [True]
    batch.restore(1, state)
    assert batch.step([1, 0], ["go", "go"])[0] == ["2", "2"]
    assert batch.step([], [])[0] == []
    batch.reset([0, 1, 2], [task] * 3, [0] * 3)
    observations, _, _, _, infos = batch.step([0, 1, 2], ["None", "go", "nan"])
    assert observations == ["", "1", ""] and [sorted(info) for info in infos] == [["error"], [], ["error"]]
    assert "got NoneType" in infos[0]["error"] and "expected a finite reward, got nan" in infos[2]["error"]
    batch.close()
    with pytest.raises(ValueError, match="slots: expected an integer >= 1"):
        EnvList(Counter, 0)


def test_rollout_workers_of_a_run_reach_the_pool(data, monkeypatch):
    pytest.importorskip("torch")
    from manus_fast.envs import alfworld
    from manus_fast.player import make_environment
    from manus_fast.run_config import Config

    made = []
    monkeypatch.setattr(alfworld, "engine_version", lambda: "")
    monkeypatch.setattr(alfworld, "WorkerPool", lambda factory, **options: made.append(options))
    settings = ["environment.name=alfworld", "environment.backend=textworld", "training.rollout_workers=3"]
    settings.append(f"environment.options.data_path={data}")
    make_environment(Config.load(None, settings)).make_async(8)
    make_environment(Config.load(None, [*settings, "environment.options.workers=5"])).make_async(8)
    make_environment(Config.load(None, settings)).make_async(2)
    assert [options["workers"] for options in made] == [3, 5, 2]
    for key in ("training.rollout_workers", "environment.options.workers"):
        with pytest.raises(ValueError, match=f"{key}: expected null or an integer >= 1, got 0"):
            make_environment(Config.load(None, [*settings, f"{key}=0"]))
    # Worlds that are stepped in threads take no notice.
    assert not hasattr(make_environment(Config.load(None, ["training.rollout_workers=3"])), "workers")


@pytest.mark.parametrize(("split", "count"), [("valid_seen", 140), ("valid_unseen", 134)])
def test_published_panels_are_whole_or_it_is_said(tmp_path, caplog, split, count):
    """140 and 134 games of the six types, as published, between those that the package does not play either."""
    root = tmp_path / "json_2.1.1"
    short = {"pddl_problem": "p"}
    for i in range(count):
        add_game(
            root, f"{split}/{TASK_TYPES[i % 6]}-Mug-None-Desk-{i}/trial_T20190907_{i:06d}", TASK_TYPES[i % 6], **short
        )
    for i in range(0, 30, 3):
        folder = f"{split}/pick_and_place_simple-Mug-None-Desk-{i}/trial_T20190908_{i:06d}"
        add_game(root, folder, solvable=False)
        add_game(root, f"{split}/pick_and_place_with_movable_recep-Mug-Bowl-Desk-{i}/trial_T20190909_{i:06d}")
        add_game(root, f"{split}/pick_and_place_simple-AppleSliced-None-Desk-{i}/trial_T20190909_{i:06d}")
    tasks = find_tasks(root, split)
    assert len(tasks) == len({task.id for task in tasks}) == count == PUBLISHED[split]
    assert [task.id for task in tasks] == sorted(task.id for task in tasks) and caplog.records == []
    find_tasks(root, split, TASK_TYPES[:2])
    assert caplog.records == []
    (root / tasks[5].data["game"]).unlink()
    assert len(find_tasks(root, split)) == count - 1
    assert f"{split} holds {count - 1} games, and the published panel {count}" in caplog.text
