"""Without a CUDA device, Triton kernels are tested in Triton's interpreter, chosen before triton is imported."""

import importlib.util
import os

import pytest

# Environments play without torch, and so do most of their tests.
if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped where there is none, whether or not they say so themselves."""
    if importlib.util.find_spec("torch") is not None and torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
