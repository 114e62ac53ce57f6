"""The native engine on ALFWorld's files: the same text as the real one, refusals, clone and save, choice of engine."""

import json
import logging
import random
import re

import numpy as np
import pytest

pytest.importorskip("alfworld")

from manus_fast.envs.alfworld import AlfWorld, diff
from manus_fast.envs.alfworld.games import make_games
from manus_fast.envs.alfworld.layout import RARE, TASK_TYPES
from manus_fast.envs.alfworld.native import NativeBatch, NativeEnv, make_world
from manus_fast.envs.alfworld.panels import find_root, find_tasks
from manus_fast.envs.alfworld.problem import read_problem
from manus_fast.envs.alfworld.rules import Rules, rules_of
from manus_fast.envs.alfworld.textworld import TextWorldEnv, read_game
from manus_fast.envs.base import Task

pytestmark = pytest.mark.alfworld


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One game of each type as they come, one with everything rare, and one of the latter in the older grammar."""
    path = tmp_path_factory.mktemp("alfworld")
    make_games(path, {"train": 6}, seed=31)
    make_games(path, {"valid_seen": 6}, seed=32, variety=RARE)
    make_games(path, {"valid_unseen": 6}, seed=33, variety=RARE, grammar="0.3")
    return path


@pytest.fixture
def root(data):
    return find_root(data)


def edited(root, tmp_path, change):
    """A task whose game file is that of a training game after `change(game)`."""
    game = read_game(root / find_tasks(root, "train")[0].data["game"])
    change(game)
    (tmp_path / "game.tw-pddl").write_text(json.dumps(game))
    return Task("edited", "pick_and_place_simple", "train", {"game": "game.tw-pddl"})


def walkthrough(root, task):
    return read_game(root / task.data["game"])["walkthrough"]


def test_same_text_as_the_real_engine(root):
    tasks = [task for split in ("train", "valid_seen", "valid_unseen") for task in find_tasks(root, split)]
    reference, candidate = TextWorldEnv(root, 10_000), NativeEnv(root, 10_000)
    expert = lambda: candidate.expert()[0]  # noqa: E731
    summary = diff.compare(root, tasks, reference, candidate, random_walks=2, random_steps=40, expert=expert)
    reference.close()
    assert summary.mismatches == 0, summary.first[0]
    assert summary.games == 18 and summary.refused == {} and set(summary.types) == set(TASK_TYPES)
    # Walkthrough, detours, expert and two random walks a game; walkthrough and expert win it.
    assert summary.walks == 90 and summary.steps > 1500 and summary.not_admissible > 50 and summary.wins >= 36
    assert {"go", "open", "close", "take", "move", "put", "examine", "look", "help", "inventory"} <= set(summary.verbs)
    assert {"use", "clean", "heat", "cool", "slice"} <= set(summary.verbs)


def test_comparison_finds_a_lie_and_says_where(root):
    class Liar(NativeEnv):
        def step(self, action):
            observation, *rest, info = super().step(action)
            if "open" in action:
                observation = observation.replace("open", "ajar", 1)
            if "take" in action:
                info = info | {"admissible": info["admissible"][1:]}
            return observation, *rest, info

    tasks = find_tasks(root, "train")
    reference = TextWorldEnv(root, 1000)
    summary = diff.compare(root, tasks, reference, Liar(root, 1000), random_walks=1)
    reference.close()
    assert summary.mismatches >= len(tasks) - 1
    for mismatch in summary.first:
        assert mismatch.step == len(mismatch.history) and mismatch.history[-1] == mismatch.command
        if mismatch.what == "observation":
            assert "open" in mismatch.command and "ajar" in mismatch.got and "ajar" not in mismatch.expected
        else:
            assert mismatch.what == "admissible" and "take" in mismatch.command and mismatch.got == "also []"
    # The same walk again: the mismatch can be looked into.
    first = summary.first[0]
    env = TextWorldEnv(root, 1000)
    env.reset(next(t for t in tasks if t.id == first.game), 0)
    answers = [env.step(command) for command in first.history]
    assert first.what != "observation" or repr(answers[-1][0]) == first.expected
    env.close()


def test_command_prints_a_summary_and_returns_whether_all_agree(data, tmp_path, capsys):
    output = tmp_path / "diff.json"
    assert diff.main(str(data), games=1, random_walks=1, random_steps=10, output=str(output)) == 0
    summary = json.loads(output.read_text())
    assert summary["games"] == 3 and summary["mismatches"] == 0 and summary["first"] == []
    assert diff.main(str(data), splits=("train",), games=1, random_walks=0) == 0
    assert json.loads(capsys.readouterr().out)["games"] == 1
    with pytest.raises(ValueError, match="data: expected games in test"):
        diff.main(str(data), splits=("test",))


def test_game_goes_with_its_rules(root):
    new, old = (read_game(root / find_tasks(root, split)[0].data["game"]) for split in ("train", "valid_unseen"))
    assert rules_of(new) == Rules(put=False, by_place=False, help=True)
    assert rules_of(old) == Rules(put=True, by_place=True, help=False)
    # Comments, spacing and case of the domain make no difference; a rule does.
    assert rules_of(new | {"pddl_domain": "; a comment\n" + new["pddl_domain"].upper()}) == rules_of(new)
    with pytest.raises(ValueError, match=r"pddl_domain: expected the rules of ALFWorld 0\.3 or 0\.4"):
        rules_of(new | {"pddl_domain": new["pddl_domain"].replace("(not (holdsAny ?a))", "", 1)})
    with pytest.raises(ValueError, match=r"grammar: expected the words of ALFWorld"):
        rules_of(new | {"grammar": new["grammar"].replace("You open the", "You pull the")})
    with pytest.raises(ValueError, match=r"grammar: expected the words of ALFWorld"):
        rules_of(new | {"grammar": new["grammar"].replace("Available commands", "Commands")})


GOAL = re.compile(r"\(:goal.*", re.DOTALL)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (GOAL, "(:goal (and (forall (?r - receptacle) (not (opened ?r))))))", "goal: expected one of ALFWorld's six"),
        (GOAL, "(:goal (exists (?o - object) (isHot ?o))))", "goal: expected one of ALFWorld's six, got another"),
        (GOAL, ")", "expected a section :goal"),
        (GOAL, "(:goal (and (exists (?o - object)", "expected a complete expression"),
        ("(:init", "(:init (flying agent1)", "init: expected facts that ALFWorld's games have, got 'flying'"),
        ("(:init", "(:init (openable nobody)", "init: expected declared names"),
        ("(:init", "(:init atLocation", "init: expected facts, got atlocation"),
        (re.compile(r"\(atLocation agent1 \S+\)"), "", "init: expected one agent at one place, got 1 and 0"),
        ("(:init", "(:init (openable Mug)", "init: expected openable of receptacle, got"),
        ("(:init", "(:init (openable)", "init: expected openable of receptacle, got"),
        ("(define", "", "PDDL: expected"),
    ],
)
def test_what_the_native_engine_does_not_play_is_refused_with_a_reason(root, tmp_path, old, new, message):
    def change(game):
        text = game["pddl_problem"]
        game["pddl_problem"] = old.sub(new, text) if isinstance(old, re.Pattern) else text.replace(old, new, 1)

    task = edited(root, tmp_path, change)
    batch = NativeBatch(tmp_path, 1)
    assert message in batch.refusal(task)
    observations, infos = batch.reset([0], [task], [0])
    assert observations == [""] and message in infos[0]["error"] and "game.tw-pddl" in infos[0]["error"]
    with pytest.raises(ValueError, match="slot: expected one with a running game"):
        batch.step([0], ["look"])
    with pytest.raises(ValueError, match=re.escape(message)):
        NativeEnv(tmp_path).reset(task, 0)


def test_garbled_problems_are_refused_and_never_worse(root):
    """Words dropped, doubled and swapped: a ValueError, or a game that can be played."""
    game = read_game(root / find_tasks(root, "valid_seen")[0].data["game"])
    words = re.findall(r"[()]|[^\s()]+", game["pddl_problem"])
    rng = random.Random(0)
    played = 0
    for _ in range(150):
        garbled = list(words)
        for _ in range(rng.randint(1, 3)):
            i, j = rng.randrange(len(garbled)), rng.randrange(len(garbled))
            match rng.randrange(3):
                case 0:
                    del garbled[i]
                case 1:
                    garbled.insert(i, garbled[j])
                case _:
                    garbled[i], garbled[j] = garbled[j], garbled[i]
        try:
            make_world(read_problem(game | {"pddl_problem": " ".join(garbled)}))
        except ValueError as error:
            assert str(error)
        else:
            played += 1
    assert 0 < played < 150


def test_truncated_file_fails_its_slot_alone(root, tmp_path):
    good = find_tasks(root, "train")[0]
    text = (root / good.data["game"]).read_text()
    (tmp_path / "whole").write_text(text)
    for i in range(1, 20):
        (tmp_path / f"cut{i}").write_text(text[: i * len(text) // 20])
    tasks = [Task(name, "x", "train", {"game": name}) for name in ["whole", *(f"cut{i}" for i in range(1, 20))]]
    batch = NativeBatch(tmp_path, 20)
    observations, infos = batch.reset(range(20), tasks, [0] * 20)
    assert "error" not in infos[0] and observations[0].startswith("-= Welcome")
    assert all("expected JSON" in info["error"] for info in infos[1:])
    assert batch.step([0], ["look"])[0][0].startswith("You are in the middle")


def test_any_names_of_goal_variables_will_do(root):
    for task in find_tasks(root, "train"):
        game = read_game(root / task.data["game"])
        goal = GOAL.search(game["pddl_problem"]).group()
        renamed = re.sub(r"\?(\w+)", r"?x\1y", goal)
        other = read_problem(game | {"pddl_problem": game["pddl_problem"].replace(goal, renamed)})
        assert other == read_problem(game) and other.goal["kind"] == task.type


def test_progress_rises_to_one_and_falls_with_what_is_undone(root):
    tasks = find_tasks(root, "train")
    batch = NativeBatch(root, 1)
    for task in tasks:
        told = [batch.reset([0], [task], [0])[1][0]["progress"]]
        told += [batch.step([0], [command])[4][0]["progress"] for command in walkthrough(root, task)]
        assert told[0] == 0.0 and told[-1] == 1.0 and all(0.0 <= share < 1.0 for share in told[:-1])
    task = next(task for task in tasks if task.type == "pick_two_obj_and_place")
    commands = walkthrough(root, task)
    placed = next(number for number, command in enumerate(commands) if command.startswith(("move", "put")))
    batch.reset([0], [task], [0])
    told = [batch.step([0], [command])[4][0]["progress"] for command in commands[: placed + 1]]
    back = re.sub(r"(?:move|put) (.+) (?:to|in/on) (.+)", r"take \1 from \2", commands[placed])
    told.append(batch.step([0], [back])[4][0]["progress"])
    assert told[-3:] == [0.25, 0.5, 0.25]


def test_clone_and_saved_states_continue_alike(root):
    task = find_tasks(root, "valid_seen")[2]
    commands = walkthrough(root, task)
    batch = NativeBatch(root, 3)
    batch.reset([0, 1], [task, find_tasks(root, "train")[0]], [0, 0])
    batch.step([0], commands[:1])
    batch.clone(0, 1)
    state = batch.save(0)
    other = NativeBatch(root, 1)
    other.restore(0, state)
    batch.restore(2, state)
    for command in commands[1:]:
        texts, rewards, terminated, _, infos = batch.step([0, 1, 2], [command] * 3)
        alone = other.step([0], [command])
        assert len(set(texts)) == 1 and texts[0] == alone[0][0]
        assert infos[0] == infos[1] == infos[2] == alone[4][0]
    assert terminated.all() and rewards.tolist() == [1.0] * 3 and infos[0]["success"]
    assert infos[0]["steps"] == len(commands) and rewards.dtype == np.float32
    for wrong in (b"", b"nonsense", state[:30], state[:-5]):
        with pytest.raises(ValueError, match="state: expected"):
            other.restore(0, wrong)
    copy = NativeEnv(root)
    copy.reset(task, 0)
    assert copy.clone().save() == copy.save()


def test_planner_solves_the_games(root):
    tasks = find_tasks(root, "train")
    batch = NativeBatch(root, len(tasks))
    batch.reset(range(len(tasks)), tasks, [0] * len(tasks))
    left = list(range(len(tasks)))
    for _ in range(50):
        actions, thoughts = batch.expert(left, "planner")
        assert all(thoughts)
        terminated = batch.step(left, actions)[2]
        left = [slot for slot, done in zip(left, terminated, strict=True) if not done]
        if not left:
            break
    assert left == []


def test_native_backend_needs_no_engine_and_masks_what_it_refuses(data, root, monkeypatch):
    def missing():
        raise ValueError("no engine")

    monkeypatch.setattr("manus_fast.envs.alfworld.engine_version", missing)
    environment = AlfWorld(backend="native", data_path=str(data))
    envs = environment.make_async(2)
    task = environment.tasks("train")[0]
    envs.send_reset(0, task, 0)
    envs.send_reset(1, Task("gone", "x", "train", {"game": "gone"}), 0)
    answers = dict(envs.poll(1.0))
    assert answers[0].info["backend"] == "native" and not answers[0].failed
    assert answers[1].failed and "expected a readable file" in answers[1].info["error"]
    envs.close()
    with pytest.raises(ValueError, match="no engine"):
        AlfWorld(backend="textworld", data_path=str(data))


def test_an_environment_reads_a_game_once(data, monkeypatch):
    from manus_fast.envs.alfworld import native

    read, real = [], native.read_game
    monkeypatch.setattr(native, "read_game", lambda path: read.append(path) or real(path))
    environment = AlfWorld(backend="native", data_path=str(data))
    task, other = environment.tasks("train")[:2]
    seen = []
    for _ in range(3):
        batch = environment.make_batch(3)
        texts, infos = batch.reset(range(3), [task, task, other], [0] * 3)
        seen.append((texts, infos[0]["admissible"]))
        batch.step([0], [infos[0]["admissible"][0]])
        batch.close()
    assert len(read) == 2 and seen[0] == seen[1] == seen[2]


@pytest.fixture
def mixed(data, root):
    """An environment on `auto`, a game that fits and one that does not."""
    odd = root / "train" / "odd"
    if not odd.exists():
        odd.mkdir()
        task = edited(root, odd, lambda game: game.update(grammar=game["grammar"].replace("You open", "You pull")))
        assert NativeBatch(odd, 1).refusal(task)
    fits = find_tasks(root, "train")[0]
    return (
        AlfWorld(data_path=str(data), workers=1),
        fits,
        Task("odd", fits.type, "train", {"game": "train/odd/game.tw-pddl"}),
    )


def test_auto_chooses_per_game_and_logs_it(mixed, caplog):
    environment, fits, odd = mixed
    envs = environment.make_async(2)
    try:
        with caplog.at_level(logging.INFO, "manus_fast"):
            envs.send_reset(0, fits, 0)
            envs.send_reset(1, odd, 0)
            answers = {}
            while len(answers) < 2:
                answers |= dict(envs.poll(30.0))
        assert answers[0].info["backend"] == "native" and answers[1].info["backend"] == "textworld"
        assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]
        assert "odd and those like it are played by the real engine" in caplog.records[1].getMessage()
        envs.send_step(0, "look")
        envs.send_step(1, "look")
        answers = {}
        while len(answers) < 2:
            answers |= dict(envs.poll(30.0))
        assert not any(result.failed for result in answers.values())
        assert envs.poll(0.0) == []
    finally:
        envs.close()


def test_auto_batch_mixes_engines(mixed):
    environment, fits, odd = mixed
    batch = environment.make_batch(3)
    infos = batch.reset([2, 0], [odd, fits], [0, 0])[1]
    assert [info["backend"] for info in infos] == ["textworld", "native"]
    batch.clone(2, 1)
    texts, *_, infos = batch.step([0, 1, 2], ["look", "inventory", "look"])
    assert texts[1] == "You are not carrying anything." and texts[0].startswith("You are in") and len(infos) == 3
    assert batch.expert([0], "planner")[0] and batch.expert([0])[1]
    with pytest.raises(ValueError, match=r"slots: expected games of the native engine, got \[1, 2\]"):
        batch.expert([0, 1, 2])
    states = [batch.save(slot) for slot in range(3)]
    batch.restore(0, states[1])
    batch.restore(1, states[0])
    assert batch.step([1, 0], ["help", "inventory"])[0] == [batch.step([1], ["help"])[0][0], texts[1]]
    with pytest.raises(ValueError, match="state: expected bytes made by save"):
        batch.restore(0, b"?")
    batch.close()
