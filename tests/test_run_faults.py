"""What becomes of a run that fails, is refused or is cut: its records are closed, its folder is released."""

import json
import shutil

import pytest
from learning import household_policy
from test_trainer import BASE, MadeUp, make

from manus_fast import cli
from manus_fast.finetune import FineTune
from manus_fast.run_config import Config
from manus_fast.run_folder import LOCK_FILE

SFT = ["environment.max_steps=30", "data.demonstrations=4", "sft.epochs=1", "sft.batch_size=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return household_policy(tmp_path_factory.mktemp("model") / "tiny")


class Watched:
    """A tracker that knows whether it was closed."""

    closed = False

    def log(self, step, seconds, values):
        pass

    def close(self):
        self.closed = True


def test_a_run_that_fails_closes_its_records_and_releases_its_folder(folder, tmp_path, monkeypatch):
    trainer = make(folder, tmp_path / "ppo")
    watched = Watched()
    trainer.tracking.add("watched", watched)
    monkeypatch.setattr(trainer.updater, "run", lambda *_a, **_k: 1 / 0)
    MadeUp(trainer, lambda *_: 1.0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert watched.closed and not (tmp_path / "ppo" / LOCK_FILE).exists()

    watched = Watched()
    config = Config.load(None, [*BASE, *SFT, f"model.path={folder}", f"training.output_dir={tmp_path / 'sft'}"])
    tune = FineTune(config)
    monkeypatch.setattr(tune, "validate", lambda: tune.tracking.add("watched", watched) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tune.run()
    assert watched.closed and not (tmp_path / "sft" / LOCK_FILE).exists()


def test_trajectories_after_the_checkpoint_are_not_kept_twice(folder, tmp_path):
    def run(*more):
        trainer = make(folder, tmp_path, "training.save_strategy=epoch", "training.save_trajectories=2", *more)
        MadeUp(trainer, lambda *_: 1.0)
        trainer.run()
        lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()
        return [json.loads(line)["iteration"] for line in lines]

    assert run() == [1, 1, 2, 2, 3, 3, 4, 4]
    shutil.rmtree(tmp_path / "step-00000016")  # as if killed before the last one was written
    assert run("training.resume=true") == [1, 1, 2, 2, 3, 3, 4, 4]


def test_going_on_by_an_algorithm_with_other_weights_names_what_differs(folder, tmp_path):
    make(folder, tmp_path, "training.save_strategy=epoch", "training.total_steps=8").run()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    group = "training.group_size=2"
    for more, message in (
        (("algorithm=grpo", group), r"expected algorithm ppo, as the run in .* was begun with, got grpo \("),
        (("ppo.advantage=rloo", group), "expected ppo.advantage turn, as .* got rloo"),
        (("ppo.critic=separate",), "expected ppo.critic shared, as .* got separate"),
        (("model.lora={rank: 2}",), "expected model.lora null, as"),
    ):
        with pytest.raises(ValueError, match=message):
            make(folder, tmp_path, "training.resume=true", *more)
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    # What loads is gone on with: the advantage of every token, and a rate of another kind.
    make(folder, tmp_path, "training.resume=true", "ppo.advantage=token", "training.learning_rate=1e-4")


def test_folders_of_other_runs_are_refused(folder, tmp_path, capsys):
    def run(command, *more):
        words = [command, f"model.path={folder}", f"training.output_dir={tmp_path}", *BASE, *SFT, *more]
        return cli.main([*words, "training.save_strategy=steps"]), capsys.readouterr().err

    assert run("sft")[0] == 0
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for command, more, message in (
        ("sft", (), "expected a folder without checkpoints"),
        ("ppo", (), "expected a folder without checkpoints"),
        ("ppo", ("training.resume=true",), "expected a checkpoint with updater in"),
        ("dpo", ("training.resume=true", "dpo.rounds=1"), "expected a checkpoint with dpo_rounds in"),
        ("sft", ("training.resume=true", "model.lora={rank: 2}"), "weights: expected"),
    ):
        code, said = run(command, *more)
        assert code == 2 and message in said and said.count("\n") == 1, said
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
