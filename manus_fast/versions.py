"""Which versions made a run: written beside it, and shown by `manus-fast info`. Imports none of the packages."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import manus_fast
from manus_fast.files import write_text

VERSIONS_FILE = "versions.json"
PACKAGES = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "omegaconf", "tensorboard", "wandb",
    "deepspeed", "vllm", "flash-attn", "peft", "alfworld", "textworld",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Version by package, None where it isn't installed; Python and manus_fast come first."""
    found: dict[str, str | None] = {"manus_fast": manus_fast.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def cores() -> int:
    """CPU cores that this process may run on: in a container, under taskset or under a quota of CPU time fewer than the
    machine has."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        from manus_fast import _C
    except ImportError:  # `manus-fast doctor` says so, and shows this number beside it
        return count
    return min(count, _C.quota_cores() or count)


def git_commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside a checkout or without git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def write_versions(folder: str | os.PathLike[str]) -> None:
    """Writes versions.json: packages, commit, machine."""
    record: dict[str, Any] = {
        "packages": {name: version for name, version in versions().items() if version is not None},
        "commit": git_commit(),
        "platform": platform.platform(),
        "cpus": cores(),
    }
    write_text(Path(folder) / VERSIONS_FILE, json.dumps(record, indent=2) + "\n")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
