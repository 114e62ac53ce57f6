"""Without a CUDA device, Triton kernels are tested in Triton's interpreter, chosen before triton is imported."""

import importlib.util
import os

# The environment that has alfworld has no torch: its tests need none.
if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
