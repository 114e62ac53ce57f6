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
    assert cores() == len(os.sched_getaffinity(0))
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from manus_fast import _C, versions; "
    code += "print(versions.cores(), _C.num_threads())"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n"
