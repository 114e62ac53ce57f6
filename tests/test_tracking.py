"""Trackers record what they are given, survive each other's failures, and read as one run after a resume."""

import json
import logging
import sys
import time
import types

import numpy as np
import pytest
import torch

from manus_fast.profile import Phases
from manus_fast.progress import Progress
from manus_fast.run_folder import prepare_folder
from manus_fast.tracking import Tracking


def records(folder):
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_metrics_file(tmp_path):
    tracking = Tracking(tmp_path, tensorboard=False)
    tracking.log(0, {"eval/success": 0.25})
    tracking.log(64, {"ppo/kl": torch.tensor(0.5), "rollout/reward": np.float32(1.5), "ppo/loss": float("nan")})
    # Written through: no close is needed to read what was logged.
    first, second = records(tmp_path)
    assert first["step"] == 0 and first["eval/success"] == 0.25 and first["time"] >= 0
    assert second == {"step": 64, "time": second["time"], "ppo/kl": 0.5, "rollout/reward": 1.5, "ppo/loss": None}
    assert second["time"] >= first["time"]
    tracking.close()


def test_steps_may_repeat_but_not_go_back(tmp_path):
    tracking = Tracking(tmp_path, tensorboard=False)
    tracking.log(5, {"a/b": 1})
    tracking.log(5, {"a/c": 1})
    with pytest.raises(ValueError, match=r"step: expected at least 5 .*, got 4"):
        tracking.log(4, {"a/b": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [({"loss": 1.0}, "group/name"), ({"a/b": "x"}, "expected a number"), ({"a/b": None}, "number")],
)
def test_bad_values(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        Tracking(tmp_path, tensorboard=False).log(0, values)


def test_resume_drops_what_lies_beyond_and_a_torn_line(tmp_path):
    tracking = Tracking(tmp_path, tensorboard=False)
    for step in (0, 10, 20, 30):
        tracking.log(step, {"a/b": step})
    tracking.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "ti')
    resumed = Tracking(tmp_path, resume_step=20, tensorboard=False)
    resumed.log(30, {"a/b": -30})
    resumed.close()
    assert [(record["step"], record["a/b"]) for record in records(tmp_path)] == [(0, 0), (10, 10), (20, 20), (30, -30)]
    times = [record["time"] for record in records(tmp_path)]
    assert times == sorted(times)
    with pytest.raises(ValueError, match="step: expected at least 20"):
        Tracking(tmp_path, resume_step=20, tensorboard=False).log(10, {"a/b": 0})


def test_samples_are_cut_back_to_the_resumed_iteration(tmp_path):
    def run(until, *iterations):
        with Tracking(tmp_path, samples_until=until, tensorboard=False) as tracking:
            for iteration in iterations:
                tracking.sample({"iteration": iteration, "n": n} for n in range(2))
        return [json.loads(line)["iteration"] for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]

    assert run(0, 1, 2, 3) == [1, 1, 2, 2, 3, 3]
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write('{"iteration": 4, "te')
    assert run(2, 3) == [1, 1, 2, 2, 3, 3]
    assert run(0, 1) == [1, 1]


def test_tensorboard_on_a_full_disk_is_one_warning(tmp_path, monkeypatch, caplog, capfd):
    """Its writer is a thread, whose traceback would stand between the lines of a run."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_):
        raise OSError(28, "No space left on device")

    tracking = Tracking(tmp_path, tensorboard=True)
    monkeypatch.setattr(RecordWriter, "write", full)
    for step in range(100):
        tracking.log(step, {"a/b": 1})
        time.sleep(0.01)
        if caplog.records:
            break
    tracking.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("TensorBoard is switched off") and "No space left" in record.getMessage()
    assert "Traceback" not in capfd.readouterr().err


def test_samples_on_a_full_disk_are_switched_off(tmp_path, caplog):
    with Tracking(tmp_path, samples_until=0, tensorboard=False) as tracking:
        tracking._samples._file.close()
        tracking._samples._file = open("/dev/full", "a")  # noqa: SIM115 (the tracker closes it)
        for _ in range(2):
            tracking.sample([{"iteration": 1}])
        tracking.log(1, {"a/b": 1})
    (record,) = caplog.records
    assert record.getMessage().startswith("trajectories.jsonl is switched off") and "No space left" in caplog.text
    assert len(records(tmp_path)) == 1
    (tmp_path / "trajectories.jsonl").unlink()
    Tracking(tmp_path, tensorboard=False).sample([{"iteration": 1}])
    assert not (tmp_path / "trajectories.jsonl").exists()


def test_a_fresh_run_starts_a_fresh_file(tmp_path):
    for _ in range(2):
        tracking = Tracking(tmp_path, tensorboard=False)
        tracking.log(0, {"a/b": 1})
        tracking.close()
    assert len(records(tmp_path)) == 1


class Broken:
    calls = 0

    def log(self, step, seconds, values):
        Broken.calls += 1
        raise OSError("disk full\nsecond line")

    def close(self):
        raise AssertionError("switched off, so never closed")


def test_a_tracker_that_fails_is_switched_off_with_one_warning(tmp_path, caplog):
    tracking = Tracking(tmp_path, tensorboard=False)
    tracking.add("broken", Broken())
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracking.log(step, {"a/b": step})
    tracking.close()
    assert Broken.calls == 1
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "broken is switched off for the rest of this run: OSError: disk full"
    ]


def test_a_metrics_file_that_cannot_be_written_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").mkdir()
    tracking = Tracking(tmp_path, tensorboard=False)
    tracking.log(0, {"a/b": 1})
    tracking.close()
    assert "metrics.jsonl is switched off" in caplog.text


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracking = Tracking(tmp_path, tensorboard=True)
    for step in (0, 10, 20):
        tracking.log(step, {"ppo/kl": step / 10})
    tracking.close()
    resumed = Tracking(tmp_path, tensorboard=True, resume_step=10)
    resumed.log(20, {"ppo/kl": 7.0})
    resumed.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("ppo/kl")] == [(0, 0.0), (10, 1.0), (20, 7.0)]


class FakeRun:
    def __init__(self):
        self.logged = []

    def define_metric(self, name, step_metric):
        self.metric = (name, step_metric)

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


def test_wandb_goes_on_in_the_same_run_after_a_resume(tmp_path, monkeypatch):
    started = []

    def init(**arguments):
        started.append((arguments, FakeRun()))
        return started[-1][1]

    fake = types.SimpleNamespace(init=init, util=types.SimpleNamespace(generate_id=lambda: f"id{len(started)}"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume in (None, 5):
        tracking = Tracking(tmp_path, tensorboard=False, wandb_project="p", resume_step=resume, config={"seed": 1})
        tracking.log(7, {"a/b": 2})
        tracking.close()
    assert [arguments["id"] for arguments, _ in started] == ["id0", "id0"]
    assert started[0][0]["config"] == {"seed": 1} and started[0][0]["project"] == "p"
    assert all(run.logged[0]["step"] == 7 and run.logged[0]["a/b"] == 2 and run.finished for _, run in started)


def test_wandb_that_is_not_there_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracking = Tracking(tmp_path, tensorboard=False, wandb_project="p")
    tracking.log(0, {"a/b": 1})
    tracking.close()
    assert len(records(tmp_path)) == 1
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "wandb is switched off for the rest of this run"
    ]


def test_prepare_folder(tmp_path):
    folder = prepare_folder(tmp_path / "a" / "b")
    assert folder.is_dir() and not list(folder.iterdir())
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"training.output_dir: expected a folder that can be written to"):
            prepare_folder(bad)


def test_plain_progress_lines(capsys):
    with Progress("ppo", total=100, interval=0, terminal=False) as progress:
        progress.update(10, reward=0.5, success=0.25, tokens_per_second=1234.5)
        progress.update(100, reward=1.0)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "ppo: 10 of 100 steps · reward 0.5 · success 25.0 % · 1,234 tok/s · time left unknown"
    assert last.startswith("ppo: 100 of 100 steps · reward 1 · done in")


def test_plain_progress_keeps_quiet_between_intervals(capsys):
    with Progress("sft", total=100, interval=1000, terminal=False) as progress:
        for done in range(1, 100):
            progress.update(done)
        progress.update(100)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_time_left_counts_from_where_a_resumed_run_began(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("manus_fast.progress.time.monotonic", lambda: clock[0])
    progress = Progress("ppo", total=1000, terminal=False)
    progress.update(500)
    clock[0] += 10
    assert progress._left(600, clock[0]) == "40 s left"


def test_a_run_that_time_ends_shows_real_steps_and_the_time_left(monkeypatch, capsys):
    """120 of 200 s are spent (20 of them before a resume) at 3,000 of 10 million steps."""
    clock = [100.0]
    monkeypatch.setattr("manus_fast.progress.time.monotonic", lambda: clock[0])
    progress = Progress("ppo", total=10_000_000, terminal=False, max_seconds=200, seconds=20)
    clock[0] += 100
    progress.update(3000, reward=0.5)
    clock[0] += 85
    progress.update(6000)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "ppo: 3,000 steps · reward 0.5 · 1 min 20 s left"
    assert last == "ppo: 6,000 steps · done in 3 min 05 s"


def test_only_the_time_that_counts_is_counted_where_it_is_told(monkeypatch, capsys):
    """Of a training that its own seconds end, 60 here: checks between steps are not among them."""
    clock = [100.0]
    monkeypatch.setattr("manus_fast.progress.time.monotonic", lambda: clock[0])
    progress = Progress("sft", total=1_000_000, terminal=False, max_seconds=60)
    for wall, spent in ((80, 30.0), (80, 60.0)):
        clock[0] += wall
        progress.update(100, spent=spent)
    assert capsys.readouterr().err.splitlines() == ["sft: 100 steps · 30 s left", "sft: 100 steps · done in 2 min 40 s"]


def test_steps_are_counted_down_where_they_end_a_run_before_its_time_does(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr("manus_fast.progress.time.monotonic", lambda: clock[0])
    progress = Progress("ppo", total=1000, terminal=False, max_seconds=1000)
    for done in (0, 500):
        clock[0] += 10
        progress.update(done)
    assert capsys.readouterr().err.splitlines()[-1] == "ppo: 500 of 1,000 steps · 10 s left"


def test_progress_bar_on_a_terminal(capsys):
    with Progress("ppo", total=100, terminal=True) as progress:
        progress.update(50, reward=0.5)
        progress.say("saved")
    shown = capsys.readouterr().err
    assert "50/100" in shown and "reward 0.5" in shown and "saved" in shown


def test_phases_sum_and_start_again(monkeypatch):
    clock = iter([0.0, 2.0, 2.0, 3.0, 5.0, 6.5, 7.0, 8.0])
    monkeypatch.setattr("manus_fast.profile.time.perf_counter", lambda: next(clock))
    phases = Phases()
    for _ in range(2):
        with phases("rollout"):
            pass
    assert phases.take() == {"time/rollout": 3.0}
    with pytest.raises(KeyError), phases("update"):
        raise KeyError
    assert phases.take() == {"time/update": 1.5}
    assert phases.take() == {}
    with pytest.raises(ValueError, match="within itself"), phases("a"), phases("a"):
        pass
