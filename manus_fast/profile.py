"""Where a run's wall time goes: named phases, summed until read, and shown as NVTX ranges to Nsight Systems.

    phases = Phases()
    with phases("rollout"):
        ...
    tracking.log(step, phases.take())      # {"time/rollout": seconds}

A phase that ends with work still queued on a GPU counts the time until it was queued; pass `synchronize` where the
figure has to include it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by phase. A phase inside another counts for both; a name may be entered many times, not within itself.

    Args:
        synchronize: wait for the GPU at both ends of each phase, where CUDA is in use.
    """

    def __init__(self, synchronize: bool = False):
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._open: set[str] = set()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name in self._open:
            raise ValueError(f"phase: expected {name!r} not to be entered within itself")
        cuda = _cuda()
        self._open.add(name)
        if cuda is not None:
            if self._synchronize:
                cuda.synchronize()
            cuda.nvtx.range_push(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            if cuda is not None:
                if self._synchronize:
                    cuda.synchronize()
                cuda.nvtx.range_pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._open.discard(name)

    def take(self, prefix: str = "time/") -> dict[str, float]:
        """The seconds since the last call, by name, and starts again at zero."""
        taken = {prefix + name: seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken


def _cuda():
    """torch.cuda where this process uses it already; a timer is no reason to import torch or start a CUDA context."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
