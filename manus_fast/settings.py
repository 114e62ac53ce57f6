"""The one reader of environment variables with the prefix MANUS_FAST_. Nothing is cached: each call reads them afresh.

MANUS_FAST_BACKEND   auto (default) | reference | cpu | triton | cuda: which implementation the ops use.
MANUS_FAST_THREADS   threads of the C++ pool, an integer from 1; unset: as many as there are cores for this process.
MANUS_FAST_CACHE     folder for fetched models; unset: manus_fast in the user's cache folder.
MANUS_FAST_OPENAI_BASE_URL     address of an OpenAI-compatible endpoint; unset: what the openai package takes by itself.
MANUS_FAST_OPENAI_API_KEY      its key; unset: what the openai package takes by itself.
MANUS_FAST_DEEPSEEK_BASE_URL   the same two for the teacher deepseek-r1,
MANUS_FAST_DEEPSEEK_API_KEY    which has an address of its own,
MANUS_FAST_QWQ_BASE_URL        and for qwq-32b,
MANUS_FAST_QWQ_API_KEY         which has none.
"""

import os
from pathlib import Path

ENDPOINTS = {
    "openai": ("MANUS_FAST_OPENAI_BASE_URL", "MANUS_FAST_OPENAI_API_KEY"),
    "deepseek": ("MANUS_FAST_DEEPSEEK_BASE_URL", "MANUS_FAST_DEEPSEEK_API_KEY"),
    "qwq": ("MANUS_FAST_QWQ_BASE_URL", "MANUS_FAST_QWQ_API_KEY"),
}
"""Who answers → the variables with its address and its key."""

MAX_THREADS = 1024
"""Of the C++ pool, which checks it too."""

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")


def backend() -> str:
    """The backend asked for by MANUS_FAST_BACKEND. Raises ValueError for a name that is not in BACKENDS."""
    name = os.environ.get("MANUS_FAST_BACKEND", "auto").strip().lower() or "auto"
    if name not in BACKENDS:
        raise ValueError(f"MANUS_FAST_BACKEND: expected one of {', '.join(BACKENDS)}, got '{name}'")
    return name


def threads() -> int | None:
    """The thread count asked for by MANUS_FAST_THREADS, None when unset. Raises ValueError for one out of range."""
    text = os.environ.get("MANUS_FAST_THREADS", "").strip()
    if not text:
        return None
    # isdigit alone also takes digits of other scripts and superscripts, which int refuses.
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_THREADS):
        raise ValueError(f"MANUS_FAST_THREADS: expected an integer from 1 to {MAX_THREADS}, got '{text}'")
    return int(text)


def cache_folder() -> Path:
    """Where fetched models are kept: MANUS_FAST_CACHE, else the user's cache folder."""
    named = os.environ.get("MANUS_FAST_CACHE", "").strip()
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manus_fast"


def endpoint(name: str) -> tuple[str | None, str | None]:
    """Address and key of one of ENDPOINTS, None where unset."""
    url, key = (os.environ.get(variable, "").strip() for variable in ENDPOINTS[name])
    return url or None, key or None
