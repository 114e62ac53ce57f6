"""Worker processes: every fault of an environment is a failure of its slot, and the pool goes on."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from manus_fast.envs.base import Task
from manus_fast.envs.pool import WorkerPool

TASK = Task("t", "echo", "train")


class Echo:
    """A world whose actions are the faults under test. Observations carry the pid, the seed and a step count."""

    def reset(self, task, seed):
        self.steps = 0
        self.seed = seed
        if task.id == "hang":
            time.sleep(60)
        return f"{os.getpid()} {seed}", {"task": task.id}

    def step(self, action):
        self.steps += 1
        match action:
            case "hang":
                time.sleep(60)
            case "spin":
                while True:
                    pass
            case "raise":
                raise LookupError("no such\nthing")
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(7)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "print":
                print("noise on stdout")
                print("noise on stderr", file=sys.stderr)
                os.write(1, b"raw noise\n")
                os.write(2, b"raw noise\n")
            case "None":
                return None
            case "short":
                return "text", 0.0
            case "bytes":
                return b"text", 0.0, False, False, {}
            case "nan":
                return "text", math.nan, False, False, {}
            case "lambda":
                return "text", 0.0, False, False, {"f": lambda: 0}
            case "child":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
                return f"{child.pid}", 0.0, False, False, {}
        done = action == "win"
        return f"{os.getpid()} {self.seed} {self.steps}", float(done), done, False, {"success": done}

    def clone(self):
        raise NotImplementedError

    def close(self):
        pass


def broken():
    raise RuntimeError("no data here")


def slow_start():
    time.sleep(60)


def collect(pool, count, timeout=30.0):
    """Polls until `count` answers are in; {slot: result}."""
    answers = {}
    end = time.monotonic() + timeout
    while len(answers) < count:
        assert time.monotonic() < end, f"got only {answers}"
        for slot, result in pool.poll(1.0):
            assert slot not in answers
            answers[slot] = result
    return answers


def reset(pool, *slots, seed=5):
    for slot in slots:
        pool.send_reset(slot, TASK, seed)
    return collect(pool, len(slots))


def step(pool, slot, action):
    pool.send_step(slot, action)
    return collect(pool, 1)[slot]


def gone(pid):
    """True once no process, not even a zombie, has this pid."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def children():
    """Pids whose parent is this process, zombies included."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == os.getpid():
                found.add(int(entry))
    return found


def test_episodes_run_side_by_side_and_in_any_order():
    with WorkerPool(Echo, slots=5, workers=2) as pool:
        first = reset(pool, *range(5))
        pids = {slot: first[slot].observation.split()[0] for slot in first}
        assert len(set(pids.values())) == 2 and pids[0] == pids[2] == pids[4] and pids[1] == pids[3]
        assert all(first[slot].info == {"task": "t"} and first[slot].reward == 0.0 for slot in first)
        for slot in range(5):
            pool.send_step(slot, "go")
        for slot, result in collect(pool, 5).items():
            assert result.observation == f"{pids[slot]} 5 1" and not result.failed
        won = step(pool, 3, "win")
        assert won.terminated and won.reward == 1.0 and won.info["success"]
        assert step(pool, 1, "go").observation == f"{pids[1]} 5 2"
        assert pool.restarts == pool.recycled == 0


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("raise", "LookupError: no such thing"),
        ("sys.exit", "SystemExit: 3"),
        ("None", "TypeError: step: expected (observation, reward, terminated, truncated, info), got NoneType"),
        ("short", "TypeError: step: expected (observation, reward, terminated, truncated, info), got tuple"),
        ("bytes", "TypeError: step: expected a str and a dict, got bytes, dict"),
        ("nan", "ValueError: step: expected a finite reward, got nan"),
        ("lambda", "the environment's answer cannot be pickled"),
    ],
)
def test_fault_fails_its_slot_and_spares_the_worker(action, text):
    with WorkerPool(Echo, slots=2, workers=1) as pool:
        pid = reset(pool, 0, 1)[0].observation.split()[0]
        bad = step(pool, 0, action)
        assert bad.info["error"].startswith(text)
        assert math.isnan(bad.reward) and bad.truncated and not bad.terminated
        assert step(pool, 1, "go").observation == f"{pid} 5 1"
        assert reset(pool, 0)[0].observation == f"{pid} 5"
        assert pool.restarts == 0


@pytest.mark.parametrize(
    ("action", "text"),
    [("os._exit", "the worker died (exit code 7)"), ("segfault", "the worker died (signal SIGSEGV)")],
)
def test_dead_worker_is_replaced_and_its_other_episodes_are_lost(action, text):
    with WorkerPool(Echo, slots=4, workers=2) as pool:
        pids = {slot: r.observation.split()[0] for slot, r in reset(pool, 0, 1, 2, 3).items()}
        assert step(pool, 0, action).info["error"] == text
        lost = step(pool, 2, "go")
        assert lost.failed and lost.info["error"] == f"the episode was lost: {text}"
        assert step(pool, 1, "go").observation == f"{pids[1]} 5 1"
        again = reset(pool, 0, 2)
        assert not again[0].failed and again[0].observation.split()[0] not in pids.values()
        assert step(pool, 2, "go").observation.endswith("5 1")
        assert pool.restarts == 1


def test_kill_9_in_the_middle_of_a_step_and_queued_calls():
    with WorkerPool(Echo, slots=3, workers=1) as pool:
        pid = int(reset(pool, 0, 1)[0].observation.split()[0])
        pool.send_step(0, "hang")
        pool.send_step(1, "go")
        pool.send_reset(2, TASK, 9)
        assert pool.poll(0.3) == []
        os.kill(pid, signal.SIGKILL)
        answers = collect(pool, 3)
        assert answers[0].info["error"] == "the worker died (signal SIGKILL)"
        assert answers[1].info["error"] == "the episode was lost: the worker died (signal SIGKILL)"
        # A reset needs nothing of the old process: it simply runs in the new one.
        assert not answers[2].failed and answers[2].observation.split()[1] == "9"
        assert gone(pid)


@pytest.mark.parametrize("action", ["hang", "spin"])
def test_call_past_its_time_is_killed(action):
    with WorkerPool(Echo, slots=2, workers=2, step_timeout=0.5) as pool:
        pids = {slot: int(r.observation.split()[0]) for slot, r in reset(pool, 0, 1).items()}
        start = time.monotonic()
        pool.send_step(0, action)
        pool.send_step(1, "go")
        answers = collect(pool, 2)
        assert answers[0].info["error"] == "step ran longer than 0.5 s, its worker was killed"
        assert not answers[1].failed
        assert 0.5 <= time.monotonic() - start < 10.0
        assert gone(pids[0])
        assert not reset(pool, 0)[0].failed


def test_reset_past_its_time():
    with WorkerPool(Echo, slots=1, reset_timeout=0.5) as pool:
        pool.send_reset(0, Task("hang", "echo", "train"), 1)
        assert collect(pool, 1)[0].info["error"] == "reset ran longer than 0.5 s, its worker was killed"
        assert not reset(pool, 0)[0].failed


def test_worker_is_recycled_only_when_its_episodes_are_over():
    with WorkerPool(Echo, slots=2, workers=1, recycle_after=2) as pool:
        old = int(reset(pool, 0, 1)[0].observation.split()[0])
        step(pool, 0, "win")
        new = int(reset(pool, 0)[0].observation.split()[0])
        assert new != old and pool.recycled == 1 and pool.restarts == 0
        # Slot 1 still plays in the old process, which leaves when slot 1 moves on.
        assert step(pool, 1, "go").observation == f"{old} 5 1"
        assert int(reset(pool, 1)[1].observation.split()[0]) == new
        for _ in range(100):
            pool.poll(0.0)
            if old not in children():
                break
            time.sleep(0.05)
        assert gone(old)


def test_what_a_world_prints_goes_nowhere_or_to_its_log(capfd, tmp_path):
    for log_dir in (None, tmp_path):
        with WorkerPool(Echo, slots=1, log_dir=log_dir) as pool:
            reset(pool, 0)
            assert not step(pool, 0, "print").failed
            assert step(pool, 0, "raise").failed
    assert capfd.readouterr() == ("", "")
    text = (tmp_path / "worker-0.log").read_text()
    assert "noise on stdout" in text and "noise on stderr" in text and text.count("raw noise") == 2


def test_close_ends_busy_and_idle_workers_and_what_they_started(capfd):
    before = children()
    pool = WorkerPool(Echo, slots=3)
    pids = [int(r.observation.split()[0]) for r in reset(pool, 0, 1, 2).values()]
    grandchild = int(step(pool, 1, "child").observation)
    pool.send_step(0, "hang")
    pool.send_step(1, "hang")
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 5.0
    assert all(gone(pid) for pid in [*pids, grandchild])
    assert children() == before
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="got a closed one"):
        pool.send_reset(0, TASK, 1)


def test_what_a_dead_worker_started_dies_too():
    with WorkerPool(Echo, slots=1) as pool:
        reset(pool, 0)
        grandchild = int(step(pool, 0, "child").observation)
        assert step(pool, 0, "os._exit").failed
        assert gone(grandchild)


def test_workers_end_with_their_parent():
    script = textwrap.dedent("""
        import os, signal, test_pool
        from manus_fast.envs.pool import WorkerPool
        pool = WorkerPool(test_pool.Echo, slots=2)
        pids = [r.observation.split()[0] for r in test_pool.reset(pool, 0, 1).values()]
        pool.send_step(1, "hang")
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert run.returncode == -signal.SIGKILL and run.stderr == ""
    assert all(gone(int(pid)) for pid in run.stdout.split())


def test_factory_that_cannot_work_is_an_error_not_a_failed_episode():
    with WorkerPool(broken, slots=1) as pool:
        pool.send_reset(0, TASK, 1)
        with pytest.raises(
            RuntimeError, match="cannot start: the environment could not be built: RuntimeError: no data"
        ):
            collect(pool, 1)
    with WorkerPool(slow_start, slots=1, start_timeout=0.3) as pool:
        pool.send_reset(0, TASK, 1)
        with pytest.raises(RuntimeError, match=r"was not ready within 0\.3 s"):
            collect(pool, 1)
    with pytest.raises(ValueError, match="factory: expected a picklable callable"):
        WorkerPool(lambda: Echo(), slots=1)


def test_misuse_is_named():
    with pytest.raises(ValueError, match="slots: expected a positive number, got 0"):
        WorkerPool(Echo, slots=0)
    with pytest.raises(ValueError, match="recycle_after: expected a positive number, got -1"):
        WorkerPool(Echo, slots=1, recycle_after=-1)
    with WorkerPool(Echo, slots=1) as pool:
        assert pool.poll(5.0) == []
        with pytest.raises(ValueError, match="slot: expected one with a running episode, got 0"):
            pool.send_step(0, "go")
        with pytest.raises(ValueError, match="slot: expected 0 … 0, got 1"):
            pool.send_reset(1, TASK, 1)
        pool.send_reset(0, TASK, 1)
        with pytest.raises(ValueError, match="slot: expected one without a call in flight, got 0"):
            pool.send_reset(0, TASK, 1)
        collect(pool, 1)
        step(pool, 0, "win")
        with pytest.raises(ValueError, match="running episode"):
            pool.send_step(0, "go")


def test_environments_import_without_torch():
    code = (
        "import sys, manus_fast.envs, manus_fast.envs.pool, manus_fast.envs.worker; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
