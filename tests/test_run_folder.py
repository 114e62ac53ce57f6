"""A run's folder: one writer at a time, no mixing with an earlier run, and what resuming finds there."""

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manus_fast import checkpoint
from manus_fast.ranks import Ranks
from manus_fast.run_config import Config
from manus_fast.run_folder import LOCK_FILE, Lock, open_run

HOLDER = """
import sys, time
from pathlib import Path
from manus_fast.run_folder import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked tmp_path."""
    root = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def checkpoints(root, *steps):
    for step in steps:
        checkpoint.save(root, step, scalars={"x": step}, tensors={"t": {"a": torch.full((64,), float(step))}}, keep=9)


def resumed(root):
    return open_run(root, resume=True, ranks=Ranks())


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, holder):
    with pytest.raises(ValueError, match=rf"no other run writes to, got .*, which process {holder.pid} on \S+ writes"):
        resumed(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with resumed(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / LOCK_FILE).read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ValueError, match=r"folder that can be written to, got .* \(No space left on device\)"):
            Lock(tmp_path)
    assert list(tmp_path.iterdir()) == []
    Lock(tmp_path).release()


def test_one_process_shares_a_lock_and_leaves_nothing(tmp_path):
    one, two = Lock(tmp_path), Lock(tmp_path / ".." / tmp_path.name)
    one.release()
    assert (tmp_path / LOCK_FILE).exists()
    two.release()
    two.release()
    assert list(tmp_path.iterdir()) == []
    lock = Lock(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()
    del lock
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_the_parents_alone(tmp_path):
    """A forked child, such as a worker that outlives a killed parent, neither keeps the lock nor takes it away."""
    lock = Lock(tmp_path)
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        lock.release()
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert (tmp_path / LOCK_FILE).exists()
    lock.release()
    Lock(tmp_path).release()
    os.write(wait[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (*ready, *wait):
        os.close(descriptor)


def test_a_new_run_does_not_mix_with_checkpoints(tmp_path):
    checkpoints(tmp_path / "run", 10, 20)
    checkpoints(tmp_path / "rounds" / "round1", 5)
    for name, there in (("run", "step-00000020"), ("rounds", "round1/step-00000005")):
        with pytest.raises(ValueError, match=rf"without checkpoints, got .* with {there} \(go on from there by"):
            open_run(tmp_path / name, resume=False, ranks=Ranks())
        assert not (tmp_path / name / LOCK_FILE).exists()
    with resumed(tmp_path / "run") as run:
        assert run.newest == tmp_path / "run" / "step-00000020"
    assert [folder.name for folder in checkpoint.folders(tmp_path / "run")] == ["step-00000020", "step-00000010"]


def test_resuming_where_nothing_is_says_so(tmp_path, caplog):
    with resumed(tmp_path / "new") as run:
        assert run.newest is None
    assert "no checkpoint is in" in caplog.text


def truncate(folder):
    os.truncate(next(folder.glob("t-*.safetensors")), 30)


def flip(folder):
    file = next(folder.glob("t-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def manifest(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "30 bytes instead of"),
        (flip, "content that differs"),
        (manifest(""), "unreadable manifest.json"),
        (manifest("[]"), "schema None"),
        (manifest(json.dumps({"schema": checkpoint.SCHEMA})), "a manifest.json without sizes and hashes"),
        (manifest(json.dumps({"schema": checkpoint.SCHEMA, "files": {}})), "a manifest.json without state.json"),
        (lambda folder: (folder / "state.json").unlink(), "no state.json"),
    ],
)
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_taken(tmp_path, caplog, damage, message):
    checkpoints(tmp_path, 10, 20)
    damage(tmp_path / "step-00000020")
    with resumed(tmp_path) as run:
        assert run.newest == tmp_path / "step-00000010"
    (record,) = caplog.records
    assert message in record.getMessage() and "goes on from step-00000010" in record.getMessage()
    # What the run saves next is the newest, and stays however few are kept.
    checkpoint.save(tmp_path, 11, scalars={}, keep=1)
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-00000011"]
    damage_all = tmp_path / "all"
    checkpoints(damage_all, 1)
    damage(damage_all / "step-00000001")
    with pytest.raises(ValueError, match=r"expected a whole checkpoint in .*, got 1 damaged .*remove them"):
        resumed(damage_all)
    assert (damage_all / "step-00000001").is_dir()


def test_a_save_keeps_itself_beside_later_steps(tmp_path):
    checkpoints(tmp_path, 20)
    checkpoint.save(tmp_path, 11, scalars={}, keep=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000011"


def test_a_checkpoint_of_another_kind_of_run_is_one_sentence(tmp_path):
    checkpoints(tmp_path, 1)
    found = checkpoint.load(tmp_path / "step-00000001")
    assert found.part("x") == 1
    with pytest.raises(ValueError, match=r"expected a checkpoint with updater in .*, got one of another kind .*with x"):
        found.part("updater")


class Part:
    def __init__(self, *names, error=None):
        self.names, self.error = names, error

    def save_pretrained(self, folder):
        folder.mkdir(exist_ok=True)
        for name in self.names:
            (folder / name).write_text(name)
        if self.error is not None:
            raise self.error


def test_a_model_folder_is_replaced_as_a_whole(tmp_path):
    target = tmp_path / "model"
    checkpoint.save_model(target, Part("a", "b"), Part("c"))
    assert {path.name for path in target.iterdir()} == {"a", "b", "c"}
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
            checkpoint.save_model(target, Part("d", error=error))
        assert caught.type is KeyboardInterrupt or str(caught.value) == (
            f"output_dir: cannot write the model to {target}: No space left on device"
        )
        assert {path.name for path in target.iterdir()} == {"a", "b", "c"}
        assert list(tmp_path.iterdir()) == [target]
    (tmp_path / ".model.partial").mkdir()  # of a run that was killed
    (tmp_path / ".model.partial" / "old").write_text("")
    checkpoint.save_model(target, Part("d"))
    assert [path.name for path in target.iterdir()] == ["d"] and list(tmp_path.iterdir()) == [target]


def test_a_signal_between_two_renames_brings_the_earlier_model_back(tmp_path, monkeypatch):
    target = tmp_path / "model"
    checkpoint.save_model(target, Part("a"))
    rename = Path.rename

    def interrupted(path, to):
        if path.name == ".model.partial":
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_model(target, Part("b"))
    assert [path.name for path in target.iterdir()] == ["a"] and list(tmp_path.iterdir()) == [target]


def test_a_demo_is_refused_where_another_one_runs(tmp_path, holder):
    from manus_fast import demo

    config = Path(__file__).resolve().parents[1] / "configs" / "demo_household.yaml"
    (tmp_path / "sft").mkdir()
    with pytest.raises(ValueError, match="no other run writes to"):
        demo.run(config, tmp_path)
    assert (tmp_path / "sft").is_dir()


def test_a_model_folder_takes_the_place_of_whatever_is_there(tmp_path):
    target, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("")
    for make in (
        lambda: target.write_text("a file"),
        lambda: target.symlink_to(elsewhere),
        lambda: target.symlink_to(tmp_path / "nowhere"),
    ):
        make()
        checkpoint.save_model(target, Part("a"))
        assert target.is_dir() and not target.is_symlink() and [path.name for path in target.iterdir()] == ["a"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model"]
        (target / "a").unlink()
        target.rmdir()
    assert (elsewhere / "mine").exists()


def test_the_folder_of_a_run_is_named_and_may_begin_with_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Config.load(None, ["training.output_dir=~/runs"]).training.output_dir == "/home/somebody/runs"
    with pytest.raises(ValueError, match=r"training.output_dir: expected a folder, got none"):
        Config.load(None, ['training.output_dir=""'])
