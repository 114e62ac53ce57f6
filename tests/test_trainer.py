"""The trainer: what it plays, learns from, records, keeps, and goes on from. A policy of a few thousand weights plays
the household world for a few turns; where episodes of a certain kind are needed, they are made up."""

import json
import math

import numpy as np
import pytest
import torch
from learning import household_policy
from safetensors.torch import load_file

from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.finetune import FineTune
from manus_fast.learn.filters import NothingToLearnError
from manus_fast.modeling.load import load_model
from manus_fast.player import make_environment
from manus_fast.rollout.summary import repeat_rate
from manus_fast.run_config import Config
from manus_fast.trainer import Trainer

BASE = [
    "environment.name=household",
    "environment.max_steps=2",
    "environment.options={num_train: 60, num_valid: 4}",
    "agent.instructions=Household.",
    "rollout.slots=8",
    "rollout.max_turn_tokens=6",
    "rollout.max_traj_tokens=40",
    "rollout.max_length=512",
    "evaluation.tasks=2",
    "ppo.batch_size=4",
    "training.num_rollouts=4",
    "training.learning_rate=1e-3",
    "training.total_steps=16",
    "training.save_strategy=no",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return household_policy(tmp_path_factory.mktemp("model") / "tiny")


def make(folder, out, *more, **options):
    config = Config.load(None, [*BASE, f"model.path={folder}", f"training.output_dir={out}", *more])
    return Trainer(config, **options)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class MadeUp:
    """Stands in for a player's `collect`: one turn an episode, two sampled tokens, rewards from a table by group."""

    def __init__(self, trainer, rewards):
        self.trainer, self.rewards, self.asked = trainer, rewards, []
        trainer.player.collect = self

    def __call__(self, tasks, iteration, members=1, first_group=0, environment=None, ahead=()):
        self.asked.append((iteration, first_group, [task.id for task in tasks], environment))
        episodes = []
        for group, task in enumerate(tasks, first_group):
            for member in range(members):
                reward = self.rewards(iteration, group, member)
                turn = Turn(np.asarray([1, 2], np.int32), np.asarray([3, 4 + member], np.int32),
                            np.full(2, -1.0, np.float32), "stop", reward=reward or 0.0,
                            reward_parts={"environment": reward or 0.0})  # fmt: skip
                error = "the world broke" if reward is None else None
                episode = Trajectory(task.id, "", task.id, "", "train", 0, group, member)
                episode.turns, episode.success, episode.terminated = [turn], reward == 1.0, True
                episode.error = error
                episodes.append(episode)
        return episodes


def test_a_run_writes_what_it_promises(folder, tmp_path):
    out = tmp_path / "run"
    report = make(folder, out, "environment.reward_config.format_bonus=0.5", "training.save_strategy=steps").run()
    assert report.summary.success.rate in (0.0, 0.5, 1.0)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "versions.json", "metrics.jsonl", "trajectories.jsonl", "eval.json", "model"} <= names
    first = metrics(out)[0]
    assert first["train/episodes"] == 4 and first["train/iteration"] == 1 and first["step"] <= 8
    assert 0.0 <= first["train/repeat_rate"] < 1.0
    assert first["reward/step_penalty"] == pytest.approx(-0.01 * first["train/turns"]) and "time/rollout" in first
    load_model(out / "model")


def test_every_algorithm_trains_in_the_same_loop(folder, tmp_path):
    """Every preset trains for an iteration on made-up rewards, and moves the weights."""
    from manus_fast.learn.presets import PRESETS

    for name in PRESETS:
        out = tmp_path / name
        trainer = make(folder, out, f"algorithm={name}", "training.group_size=2")
        MadeUp(trainer, lambda iteration, group, member: float(member) + group)
        before = {n: w.clone() for n, w in trainer.policy.named_weights()}
        stats = trainer.update(trainer.collect())
        assert stats["update/steps"] == 1 and stats["update/rows"] == 4, name
        assert any(not torch.equal(before[n], w) for n, w in trainer.policy.named_weights()), name
        trainer.tracking.close()


def test_the_temperature_of_sampling_is_the_one_of_training(folder, tmp_path):
    trainer = make(folder, tmp_path, "rollout.temperature=0.6")
    for _ in range(2):  # after an update too
        stats = trainer.update(trainer.collect())
        assert stats["correction/gap_mean"] < 1e-5 and stats["correction/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    trainer.updater.temperature = 1.0  # what the check above would see
    assert trainer.update(trainer.collect())["correction/gap_mean"] > 1e-3
    trainer.tracking.close()


def test_dynamic_sampling_plays_new_groups_and_learns_from_those_that_differ(folder, tmp_path):
    """Two groups are wanted. In the first batch none differs, in the second and third one each."""
    trainer = make(folder, tmp_path / "run", "algorithm=dapo", "training.group_size=2", "ppo.overlong_buffer=0")
    world = MadeUp(trainer, lambda iteration, group, member: float(member) if group in (2, 5) else 1.0)
    played = trainer.collect()
    assert [(first, environment) for _, first, _, environment in world.asked] == [
        (first, trainer.player.environment) for first in (0, 2, 4)
    ]
    assert len({task for _, _, tasks, _ in world.asked for task in tasks}) > 2  # other tasks, not the same again
    assert len(played.trajectories) == 12
    stats = trainer.update(played)
    assert stats["update/rows"] == 4 and stats["filter/gen_batches"] == 3.0
    assert stats["filter/zero_variance_share"] == pytest.approx(4 / 6)
    assert trainer.counters.steps == 12 and trainer.counters.episodes == 12  # all of them were played


def test_a_run_with_nothing_to_learn_from_stops_early_and_says_so(folder, tmp_path):
    trainer = make(folder, tmp_path / "run", "algorithm=grpo", "training.group_size=2", "training.total_steps=1000",
                   "ppo.drop_zero_variance=true", "ppo.max_empty_steps=3")  # fmt: skip
    world = MadeUp(trainer, lambda iteration, group, member: 0.0)
    with pytest.raises(NothingToLearnError, match="after 3 iterations in a row"):
        trainer.run()
    assert len(world.asked) == 3


def test_worlds_that_always_break_stop_a_run(folder, tmp_path):
    trainer = make(folder, tmp_path / "run", "training.total_steps=1000")
    MadeUp(trainer, lambda iteration, group, member: None)
    with pytest.raises(NothingToLearnError, match=r"every episode failed \(the world broke\)"):
        trainer.run()
    assert trainer.counters.failed == 16 and trainer.counters.episodes == 16


def test_rewards_of_the_block_reach_the_update_and_are_logged_apart(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_rewards.py").write_text("def five(t): return 5.0\n")
    out = tmp_path / "run"
    trainer = make(
        folder, out, "rewards={environment: 1, reward_model: 2, 'trainer_rewards:five': 1}",
        reward_model=lambda rows: np.arange(len(rows), dtype=np.float32),
    )  # fmt: skip
    MadeUp(trainer, lambda iteration, group, member: 1.0)
    played = trainer.collect()
    assert [t.reward for t in played.trajectories] == [6.0, 8.0, 10.0, 12.0]
    trainer.run()
    record = metrics(out)[0]
    assert (record["reward/environment"], record["reward/reward_model"], record["reward/trainer_rewards:five"]) == (
        1,
        3,
        5,
    )
    with pytest.raises(ValueError, match=r"rewards.reward_model: expected a reward model to score with, got none"):
        make(folder, tmp_path / "none", "reward_fn=reward_model")
    assert not (tmp_path / "none").exists()


def test_a_curriculum_trains_on_its_stages_and_is_measured_on_the_real_task(folder, tmp_path):
    trainer = make(folder, tmp_path / "run", "curriculum={levels: [1, 2], rounds: [2, 3], success: 1.0, window: 4}")
    world = MadeUp(trainer, lambda iteration, group, member: float(iteration >= 1))
    report = trainer.run()
    levels = [(environment.level, environment.max_steps) for *_, environment in world.asked]
    assert levels == [(1, 2), (1, 2), (2, 3), (2, 3)]
    assert all("L2" in task for task in world.asked[-1][2])
    assert trainer.player.environment.level == 1 and all("L1" in task.id for task in report.tasks)
    stages = [record.get("curriculum/stage") for record in metrics(tmp_path / "run")]
    assert stages[:4] == [1.0, 1.0, 2.0, 2.0]


def test_a_stage_that_cannot_be_served_is_refused_before_anything_is_written(folder, tmp_path):
    with pytest.raises(ValueError, match="level: expected 1, 2 or 3, got 9"):
        make(folder, tmp_path / "run", "curriculum={levels: [1, 9], steps: 10}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


RESUMED = [
    "algorithm=rloo", "training.group_size=2", "training.save_strategy=epoch", "ppo.kl_coef=0.5", "ppo.kl_target=0.01",
    "ppo.kl_horizon=20", "ppo.ent_coef={start: 0.1, kind: cosine, warmup: 0.25}", "training.keep_checkpoints=9",
    "training.learning_rate={start: 1e-3, kind: linear, warmup: 0.25}",
    "curriculum={rounds: [2, 3], success: 1.0, window: 6}",
]  # fmt: skip


def test_a_resumed_run_is_the_run_that_was_never_cut(folder, tmp_path, monkeypatch):
    """Weights, optimizer, adaptive KL, schedules, curriculum and tasks: four iterations in one go give the same numbers
    as two, a new process' worth of objects, and two more."""
    clock = [0.0]
    monkeypatch.setattr("manus_fast.trainer.time.monotonic", lambda: clock[0])

    def world(trainer):
        return MadeUp(trainer, lambda iteration, group, member: float(member or iteration in (1, 2)))

    whole = make(folder, tmp_path / "whole", *RESUMED)
    asked = world(whole)
    whole.run()
    cut = make(folder, tmp_path / "cut", *RESUMED)
    before = world(cut)
    monkeypatch.setattr(type(cut), "done", property(lambda self: self.counters.iteration >= 2))
    cut.run()
    monkeypatch.undo()
    again = make(folder, tmp_path / "cut", *RESUMED, "training.resume=true")
    assert again.counters.iteration == 2 and again.curriculum.steps == cut.curriculum.steps
    assert again.updater.kl.at(0.0) == cut.updater.kl.at(0.0) != 0.5
    after = world(again)
    again.run()
    assert [a[:3] for a in before.asked + after.asked] == [a[:3] for a in asked.asked]
    horizons = [environment.max_steps for *_, environment in before.asked + after.asked]
    assert horizons == [environment.max_steps for *_, environment in asked.asked] and set(horizons) == {2, 3}
    exact = ("policy/loss", "policy/ref_kl", "update/kl_coef", "update/ent_coef", "update/learning_rate", "step",
             "update/grad_norm", "curriculum/stage")  # fmt: skip
    one, two = metrics(tmp_path / "whole")[:4], metrics(tmp_path / "cut")
    two = [record for record in two if "train/iteration" in record]
    assert [[r[name] for name in exact] for r in one] == [[r[name] for name in exact] for r in two]
    assert len({r["update/kl_coef"] for r in one}) == 4  # the controller did steer
    for name, weight in load_file(tmp_path / "whole" / "model" / "model.safetensors").items():
        assert torch.equal(weight, load_file(tmp_path / "cut" / "model" / "model.safetensors")[name])


def test_a_run_that_is_over_is_only_measured_when_it_is_resumed(folder, tmp_path):
    out = tmp_path / "run"
    trainer = make(folder, out, "training.save_strategy=epoch")
    MadeUp(trainer, lambda *_: 1.0)
    trainer.run()
    again = make(folder, out, "training.save_strategy=epoch", "training.resume=true")
    world = MadeUp(again, lambda *_: 1.0)
    again.run()
    assert world.asked == [] and again.counters.iteration == 4
    longer = make(folder, out, "training.save_strategy=epoch", "training.resume=true", "training.total_steps=24")
    world = MadeUp(longer, lambda *_: 1.0)
    longer.run()
    assert len(world.asked) == 2 and longer.counters.iteration == 6


def test_max_seconds_starts_no_iteration_that_would_mostly_lie_beyond_it(folder, tmp_path, monkeypatch):
    """Iterations of 10 s: of 32 s, three fit; of 36 s, the fourth does for the most part. One is always played."""
    clock = [0.0]
    monkeypatch.setattr("manus_fast.trainer.time.monotonic", lambda: clock[0])
    for limit, want in ((32, 3), (36, 4), (1, 1)):
        trainer = make(folder, tmp_path / str(limit), f"training.max_seconds={limit}", "training.total_steps=1000000")
        world = MadeUp(trainer, lambda *_: 1.0)
        add = trainer.rewards

        def slow(episodes, add=add):
            clock[0] += 10
            add(episodes)

        trainer.rewards = slow
        trainer.run()
        assert len(world.asked) == want


def test_repeated_n_grams_by_hand():
    """1 2 3 4 5 has two 4-grams; said twice, half of the four occurred before. A change of one token ends a repeat."""
    said = np.arange(1, 6)
    assert repeat_rate([said]) == 0.0 and repeat_rate([said, said]) == 0.5
    assert repeat_rate([said, np.asarray([1, 2, 3, 4, 9])]) == 0.25 and repeat_rate([said[:3], said[:3]]) == 0.0
    assert repeat_rate([np.full(8, 7)]) == pytest.approx(4 / 5)


def test_what_cannot_work_is_refused_before_anything_is_written(folder, tmp_path):
    for more, message in (
        (["algorithm=grpo", "training.group_size=1"], "training.group_size: expected an integer >= 2"),
        (["ppo.batch_size=8"], "ppo.batch_size: expected at most the 4 rows that are collected, got 8"),
        (["rewards.fromat=1"], "did you mean 'format'"),
        (["reward_fn=nowhere:f"], "rewards: expected a module that can be imported for 'nowhere:f'"),
        (["environment.reward_config.step_penalty=0.01"], "expected a number <= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(folder, tmp_path / "run", *more)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.demonstrations=4", "environment.max_steps=1"], "data.demonstrations: expected at least one episode"),
        (
            ["data.demonstrations=4", "sft.batch_size=64"],
            "sft.batch_size: expected at most the 4 rows there are, got 64",
        ),
        (["data.name=empty.jsonl"], "data.name: expected"),
    ],
)
def test_fine_tuning_without_data_leaves_no_records(folder, tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    settings = [*BASE, "environment.max_steps=30", f"model.path={folder}", f"training.output_dir={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=message):
        FineTune(Config.load(None, [*settings, *more])).run()
    assert list((tmp_path / "run").iterdir()) == []


def test_the_environments_reward_for_success_is_one_in_all():
    """The default total for a task solved in the first turn: 1 from the world, a cent off for the step."""
    environment = make_environment(Config())
    batch = environment.make_batch(1)
    (task,) = environment.tasks("train")[:1]
    batch.reset([0], [task], [0])
    total, over = 0.0, False
    while not over:
        (action,), _ = batch.expert([0])
        _, reward, terminated, truncated, _ = batch.step([0], [action])
        total, over = total + float(reward[0]), bool(terminated[0] or truncated[0])
    assert terminated[0] and total == 1.0 and math.isclose(Config().environment.reward_config.success_bonus, 0.0)


def test_an_engine_of_an_earlier_run_plays_for_the_next_as_its_own_would(folder, tmp_path):
    earlier = make(folder, tmp_path / "earlier")
    earlier.run()  # its weights are others now
    make(folder, tmp_path / "own").run()
    trainer = make(folder, tmp_path / "shared", engine=earlier.player.engine)
    assert trainer.player.engine is earlier.player.engine
    trainer.run()
    own, shared = ((tmp_path / name / "trajectories.jsonl").read_text() for name in ("own", "shared"))
    assert own == shared
    own, shared = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("own", "shared"))
    assert all(torch.equal(tensor, shared[name]) for name, tensor in own.items())
