"""Environment variables of this package, and how many cores it takes for its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manus_fast import _C, settings
from manus_fast.versions import cores


@pytest.mark.parametrize("text", ["0", "-1", "²", "٣", "1.5", "x", "1025", "9" * 5000])
def test_threads_that_make_no_sense(monkeypatch, text):
    monkeypatch.setenv("MANUS_FAST_THREADS", text)
    with pytest.raises(ValueError, match="MANUS_FAST_THREADS: expected an integer from 1 to 1024, got"):
        settings.threads()


def test_threads(monkeypatch):
    monkeypatch.setenv("MANUS_FAST_THREADS", " 1024 ")
    assert settings.threads() == settings.MAX_THREADS == 1024
    monkeypatch.setenv("MANUS_FAST_THREADS", "")
    assert settings.threads() is None
    with pytest.raises(ValueError, match="num_threads: expected an integer from 1 to 1024, got 1025"):
        _C.set_num_threads(settings.MAX_THREADS + 1)


def test_cores_are_those_of_the_process():
    """In a container, or under taskset, a process has fewer than the machine."""
    allowed = len(os.sched_getaffinity(0))
    assert cores() == min(allowed, _C.quota_cores() or allowed)
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from manus_fast import _C, versions; "
    code += "print(versions.cores(), _C.num_threads())"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n"


def quota(tmp_path, cgroups, files):
    (tmp_path / "cgroup").write_text(cgroups)
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return _C.quota_cores(str(tmp_path / "cgroup"), str(tmp_path / "fs"))


@pytest.mark.parametrize(
    ("cgroups", "files", "want"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 0),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
        # A group has no more than those above it; the path of a host that is not mounted here ends at the root.
        ("0::/a/b\n", {"cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 3),
        ("0::/kubepods/x\n", {"cpu.max": "150000 100000\n"}, 2),
        (
            "12:memory:/m\n4:cpu,cpuacct:/d\n",
            {"cpu/d/cpu.cfs_quota_us": "400000", "cpu/d/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:cpu,cpuacct:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 0),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 0),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 0),
        ("not a line\n", {}, 0),
        ("", {}, 0),
    ],
)
def test_a_quota_of_cpu_time_counts_as_cores(tmp_path, cgroups, files, want):
    assert quota(tmp_path, cgroups, files) == want


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert _C.quota_cores(str(tmp_path / "none"), str(tmp_path)) == 0
