"""The one reader of environment variables with the prefix MANUS_FAST_. Nothing is cached: each call reads them afresh.

MANUS_FAST_BACKEND   auto (default) | reference | cpu | triton | cuda: which implementation the ops use.
MANUS_FAST_THREADS   threads of the C++ pool, an integer >= 1; unset leaves the pool at the machine's core count.
MANUS_FAST_CACHE     folder for fetched models; unset: manus_fast in the user's cache folder.
"""

import os
from pathlib import Path

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")


def backend() -> str:
    """The backend asked for by MANUS_FAST_BACKEND. Raises ValueError for a name that is not in BACKENDS."""
    name = os.environ.get("MANUS_FAST_BACKEND", "auto").strip().lower() or "auto"
    if name not in BACKENDS:
        raise ValueError(f"MANUS_FAST_BACKEND: expected one of {', '.join(BACKENDS)}, got '{name}'")
    return name


def threads() -> int | None:
    """The thread count asked for by MANUS_FAST_THREADS, None when unset. Raises ValueError when it is not >= 1."""
    text = os.environ.get("MANUS_FAST_THREADS", "").strip()
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"MANUS_FAST_THREADS: expected an integer >= 1, got '{text}'")
    return int(text)


def cache_folder() -> Path:
    """Where fetched models are kept: MANUS_FAST_CACHE, else the user's cache folder."""
    named = os.environ.get("MANUS_FAST_CACHE", "").strip()
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manus_fast"
