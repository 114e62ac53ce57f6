"""What a training process sets for itself once, at its start."""

from __future__ import annotations

from manus_fast import _C, settings


def prepare_process() -> None:
    """Takes the thread count from the settings and lets the C allocator keep freed memory. Calling it again is fine."""
    threads = settings.threads()
    if threads is not None:
        _C.set_num_threads(threads)
    _C.keep_freed_memory()
