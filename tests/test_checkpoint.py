import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from learning import random_rows, tiny_model

from manus_fast import checkpoint
from manus_fast.data.packing import pack
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy
from manus_fast.learn.update import PolicyGradientUpdate

TENSORS = {
    "optimizer": {"a": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(3.0), "h": torch.ones(2).bfloat16()},
    "best": {"a": torch.zeros(5)},
}


def names(root):
    return sorted(path.name for path in Path(root).iterdir())


def test_what_was_saved_comes_back(tmp_path):
    model = tiny_model()
    policy = Policy(model)
    folder = checkpoint.save(tmp_path, 12, scalars={"x": [1, 0.1]}, tensors=TENSORS, model=policy.model, shard_bytes=20)
    assert folder == tmp_path / "step-00000012" == checkpoint.latest(tmp_path)
    found = checkpoint.load(folder)
    assert (found.step, found.scalars) == (12, {"x": [1, 0.1]})
    for group, tensors in TENSORS.items():
        loaded = found.tensors(group)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
    assert len(list(folder.glob("optimizer-*.safetensors"))) > 1
    assert found.tensors("absent") == {}


def test_the_model_folder_is_plain_hugging_face(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model(tied=False)
    policy = Policy(model, critic="shared")
    folder = checkpoint.save(tmp_path, 1, scalars={}, model=policy.model)
    again = AutoModelForCausalLM.from_pretrained(folder / "model")
    rows = random_rows(2)
    ids = torch.from_numpy(rows[0].token_ids)
    logits = again(input_ids=ids[None]).logits[0]
    want = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    got = policy.score_all(pack(rows[:1])).log_prob[1:]
    mask = torch.from_numpy(rows[0].loss_mask[1:])
    torch.testing.assert_close(got[mask], want[mask], atol=2e-5, rtol=0)


def test_the_newest_stay(tmp_path):
    for step in (5, 10, 15, 100):
        checkpoint.save(tmp_path, step, scalars={}, keep=2)
    assert names(tmp_path) == ["step-00000015", "step-00000100"]
    checkpoint.save(tmp_path, 100, scalars={"again": True}, keep=2)
    assert checkpoint.load(tmp_path / "step-00000100").scalars == {"again": True}
    assert names(tmp_path) == ["step-00000015", "step-00000100"]
    with pytest.raises(ValueError, match=r"keep: expected None or an integer >= 1, got 0"):
        checkpoint.save(tmp_path, 1, scalars={}, keep=0)


def test_broken_ones_are_passed_over_and_removed(tmp_path):
    checkpoint.save(tmp_path, 1, scalars={}, tensors=TENSORS)
    for step in (2, 3, 4):
        checkpoint.save(tmp_path, step, scalars={}, tensors=TENSORS, keep=None)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    shard = tmp_path / "step-00000003" / "optimizer-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / ".step-00000009.partial").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000002"
    assert len(names(tmp_path)) == 5, "latest changes nothing"
    with pytest.raises(ValueError, match=r"checkpoint: expected a whole one .* optimizer-00001.safetensors"):
        checkpoint.load(tmp_path / "step-00000003")
    with pytest.raises(ValueError, match=r"got no manifest.json"):
        checkpoint.load(tmp_path / "step-00000004")
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert checkpoint.latest(tmp_path / "absent") is None


def test_a_changed_byte_is_noticed(tmp_path):
    folder = checkpoint.save(tmp_path, 1, scalars={}, tensors=TENSORS)
    shard = folder / "best-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"differs from the manifest's hash in best-00001.safetensors"):
        checkpoint.load(folder)


def test_a_whole_folder_that_missed_its_renaming_is_kept(tmp_path):
    folder = checkpoint.save(tmp_path, 7, scalars={})
    folder.rename(tmp_path / ".step-00000007.partial")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.clean(tmp_path)
    assert checkpoint.latest(tmp_path) == folder


def test_no_permission_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match=r"output_dir: .*Not a directory") as caught:
        checkpoint.save(blocked / "x", 1, scalars={})
    assert "\n" not in str(caught.value)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(ValueError, match=r"cannot write a checkpoint to .*: No space left on device"):
        checkpoint.save(tmp_path / "new", 1, scalars={}, tensors=TENSORS)
    assert names(tmp_path / "new") == []


def test_an_exception_leaves_nothing_half_written(tmp_path):
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 1, scalars={"x": object()}, tensors=TENSORS)
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match=r"expected group names of lower-case letters, got 'model'"):
        checkpoint.save(tmp_path, 1, scalars={}, tensors={"model": {}})


def test_generators_come_back_through_json():
    def draw():
        return torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), random.random()

    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    draw()
    state = json.loads(json.dumps(checkpoint.rng_state()))
    first = draw()
    draw()
    checkpoint.set_rng_state(state)
    assert draw() == first


def train(root, until, kill_at=None):
    """Five PPO iterations with a checkpoint after each; resumes from `root`. Prints "iteration loss grad_norm"."""
    config = PPOConfig(batch_size=4, epochs=2, kl_coef=0.1, kl_target=0.01, ent_coef={"start": 0.1, "kind": "linear"})
    policy = Policy(tiny_model(), critic="shared")
    backend = make_backend(policy, BackendConfig(), config.optimizer())
    update = PolicyGradientUpdate(policy, backend, config, seed=4)  # its reference: the weights before any training
    torch.manual_seed(11)
    start = 0
    checkpoint.clean(root)
    found = checkpoint.latest(root)
    if found is not None:
        saved = checkpoint.load(found)
        backend.load(saved.tensors("optimizer"))
        update.load_state_dict(saved.scalars["update"])
        checkpoint.set_rng_state(saved.scalars["rng"])
        start = saved.step
    for iteration in range(start, until):
        rows = random_rows(8, seed=int(torch.randint(1 << 30, ())))  # stands for a rollout: needs the generator
        stats = update.run(rows, iteration=iteration, progress=iteration / until, learning_rate=1e-2)
        print(iteration, repr(stats["policy/loss"]), repr(stats["update/grad_norm"]), update.kl.at(0), flush=True)
        if iteration == kill_at:
            flushed = []
            flush = checkpoint._flush

            def dying(path, flushed=flushed, flush=flush):
                flush(path)
                flushed.append(path)
                if len(flushed) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            checkpoint._flush = dying
        checkpoint.save(
            root,
            iteration + 1,
            model=policy.model,
            tensors={"optimizer": backend.tensors()},
            scalars={"update": update.state_dict(), "rng": checkpoint.rng_state()},
            keep=2,
        )


def run_training(root, *arguments):
    here = Path(__file__).resolve()
    code = f"import test_checkpoint; test_checkpoint.train({str(root)!r}, *{arguments!r})"
    paths = os.pathsep.join([str(here.parents[1]), str(here.parent)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_kill_in_the_middle_of_a_write_then_resume_gives_the_same_losses(tmp_path):
    whole = run_training(tmp_path / "whole", 5)
    assert whole.returncode == 0, whole.stderr
    lines = whole.stdout.splitlines()
    assert len(lines) == 5
    killed = run_training(tmp_path / "cut", 5, 2)
    assert killed.returncode == -signal.SIGKILL and killed.stdout.splitlines() == lines[:3]
    left = names(tmp_path / "cut")
    assert left == [".step-00000003.partial", "step-00000001", "step-00000002"]
    resumed = run_training(tmp_path / "cut", 5)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines() == lines[2:]
    assert names(tmp_path / "cut") == ["step-00000004", "step-00000005"]
