"""A run as its user starts it, killed by SIGKILL at several moments and taken up each time: its figures, weights and
files are those of a run that was never cut.

The processes of the command line are forked off one that has imported what they need, for importing takes seconds.
Where exactly a kill meets a run depends on the machine; what is asserted does not.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from learning import household_policy

from manus_fast import checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]

# Reads a command line as JSON, and answers with the id of the process that runs it; then with its exit code, or minus
# the signal that ended it.
SERVER = """
import json, os, sys
import torch.utils.tensorboard
import manus_fast.finetune, manus_fast.search_trainer
from manus_fast.cli import main
print("ready", flush=True)
for line in sys.stdin:
    words, log = json.loads(line)
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (0, 1, 2):
            os.dup2(file, descriptor)
        code = main(words)
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

COMMON = [
    "environment.options={level: 1, num_train: 60, num_valid: 4}", "agent.instructions=Household.", "rollout.slots=4",
    "rollout.max_turn_tokens=4", "rollout.max_length=512", "evaluation.tasks=2", "model.device=cpu",
]  # fmt: skip
RUNS = {
    "ppo": [
        "environment.max_steps=3", "training.num_rollouts=4", "ppo.batch_size=4", "ppo.epochs=2", "ppo.kl_coef=0.1",
        "ppo.kl_target=0.01", "training.total_steps=72", "training.save_freq=24", "evaluation.freq=24",
        "training.learning_rate={start: 0.003, end: 0.001, kind: linear}",
    ],
    "sft": [
        "environment.max_steps=30", "data.demonstrations=6", "sft.epochs=4", "sft.batch_size=2", "sft.eval_every=4",
        "sft.learning_rate=0.01", "training.save_freq=2",
    ],
}  # fmt: skip


class Server:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def run(self, words, log, kill_when=None):
        """The exit code of a command line, which is killed as soon as `kill_when` says so."""
        self.process.stdin.write(json.dumps([[str(word) for word in words], str(log)]) + "\n")
        self.process.stdin.flush()
        child = int(self._answer())
        state = Path(f"/proc/{child}")
        while kill_when is not None and state.exists():
            if kill_when():
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.0002)
        return int(self._answer())

    def _answer(self):
        return self.process.stdout.readline().strip()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return household_policy(tmp_path_factory.mktemp("model") / "tiny")


def names(out):
    return {path.name for path in out.iterdir()} if out.is_dir() else set()


def moments(out):
    """When to kill, by name. A moment may be missed where a run is quicker than who watches it, and ends then."""

    def steps(hidden=""):
        return sorted(name for name in names(out) if name.startswith(f"{hidden}step-"))

    def records():
        file = out / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    yield "the first write", lambda: bool(steps("."))
    yield "the first record", lambda: records() > 0
    before = set(steps())
    yield "a later write", lambda: bool(set(steps(".")) - {f".{name}.partial" for name in before})
    seen = records()
    yield "later records", lambda: records() >= seen + 2
    yield "removing one", lambda: any("removed" in name for name in names(out))
    yield "replacing one", lambda: any("replaced" in name for name in names(out))
    yield "the model's write", lambda: ".model.partial" in names(out)
    yield "the model", lambda: "model" in names(out)


def facts(out):
    """What two runs have in common, number for number: all but what clocks say."""

    def exact(name):
        return not name.endswith(("time", "seconds", "per_second", "idle_share", "host_share")) and name[:5] != "time/"

    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    samples = out / "trajectories.jsonl"
    return {
        "metrics": [{name: value for name, value in record.items() if exact(name)} for record in records],
        "samples": samples.read_text() if samples.exists() else None,
        "eval": (out / "eval.json").read_text().replace(str(out), "OUT"),
        "files": sorted(path.relative_to(out) for path in out.rglob("*") if "tensorboard" not in path.parts),
        "weights": {path.relative_to(out): path.read_bytes() for path in out.rglob("*.safetensors")},
    }


@pytest.mark.parametrize("command", sorted(RUNS))
def test_killed_again_and_again_a_run_ends_as_one_that_was_never_cut(server, policy, tmp_path, command):
    words = [command, *COMMON, f"model.path={policy}", *RUNS[command]]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    log = tmp_path / "log"
    assert server.run([*words, f"training.output_dir={whole}"], log) == 0, log.read_text()
    want = facts(whole)
    assert len(want["metrics"]) >= 6 and not any(path.name.startswith(".") for path in want["files"])

    kills = 0
    for moment, now in moments(cut):
        resume = ["training.resume=true"] if cut.exists() else []
        code = server.run([*words, f"training.output_dir={cut}", *resume], log, now)
        assert code in (0, -signal.SIGKILL), (moment, log.read_text())
        kills += code != 0
        # Whatever bears the name of a checkpoint or of the model is whole.
        for folder in checkpoint.folders(cut):
            checkpoint.load(folder)
        assert not (cut / "model").exists() or (cut / "model" / "model.safetensors").exists()
    assert kills >= 4
    assert server.run([*words, f"training.output_dir={cut}", "training.resume=true"], log) == 0, log.read_text()
    got = facts(cut)
    for name, value in want.items():
        assert got[name] == value, name
