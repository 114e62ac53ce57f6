"""Checkpoints that are whole or absent: a folder `step-XXXXXXXX` of safetensors and JSON, loadable anywhere.

    step-00001000/
      model/                        a plain Hugging Face folder
      optimizer-00001.safetensors   one group of tensors by name, in shards (any number of groups)
      state.json                    counters, schedules, random-number generators
      manifest.json                 size and SHA-256 of every file, written last

A checkpoint is written into a hidden folder, flushed to disk and renamed, so a kill at any moment leaves the earlier
ones as they were; `latest` believes a folder only when its manifest and all sizes agree.

    save(root, step, model=policy.model, tokenizer=tokenizer, tensors={"optimizer": backend.tensors()},
         scalars={"update": update.state_dict(), "rng": rng_state()}, keep=3)
    checkpoint = load(latest(root))
    backend.load(checkpoint.tensors("optimizer")); set_rng_state(checkpoint.scalars["rng"])
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

SCHEMA = "manus_fast.checkpoint.v1"

_FOLDER = re.compile(r"step-(\d+)")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    step: int
    scalars: dict[str, Any]

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.folder / "model"

    def tensors(self, group: str, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """All tensors of a group by name; empty when it was not saved."""
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(self.folder.glob(f"{group}-[0-9]*.safetensors")):
            tensors.update(load_file(path, device=str(device)))
        return tensors


def save(
    root: str | os.PathLike[str],
    step: int,
    *,
    scalars: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    keep: int | None = 3,
    shard_bytes: int = 2 << 30,
) -> Path:
    """Writes a checkpoint and removes older ones.

    Args:
        root: holds the checkpoints; made when missing.
        step: goes into the folder's name; an existing checkpoint of that step is replaced.
        scalars: JSON-compatible state.
        tensors: groups of tensors by name, from any device.
        model, tokenizer: saved by their `save_pretrained` into `model/`.
        keep: how many of the newest checkpoints stay; None keeps all.
        shard_bytes: size of a safetensors file, which only a single larger tensor exceeds.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: the folder cannot be written (permission, space): nothing half-written stays. Or a bad group name.
    """
    root = Path(root)
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected None or an integer >= 1, got {keep}")
    for group in tensors or {}:
        if not _GROUP.fullmatch(group) or group in ("model", "state", "manifest"):
            raise ValueError(f"tensors: expected group names of lower-case letters, got {group!r}")
    target = root / f"step-{step:08d}"
    partial = root / f".{target.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        clean(root)
        partial.mkdir()
        for group, named in (tensors or {}).items():
            _write_group(partial, group, named, shard_bytes)
        for part in (model, tokenizer):
            if part is not None:
                part.save_pretrained(partial / "model")
        (partial / "state.json").write_text(json.dumps({"step": step, "scalars": scalars}, allow_nan=True))
        _write_manifest(partial, step)
        _replace(partial, target)
        if keep is not None:
            for old in _folders(root)[keep:]:
                _remove(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"output_dir: cannot write a checkpoint to {root}: {why}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def load(folder: str | os.PathLike[str], verify: bool = True) -> Checkpoint:
    """Opens a checkpoint; tensors are read when asked for.

    Args:
        folder: a `step-…` folder.
        verify: compare every file with its hash, not only with its size.

    Raises:
        ValueError: no checkpoint, one of another schema, or a file that is missing or differs from the manifest.
    """
    folder = Path(folder)
    problem = _problem(folder, hashes=verify)
    if problem is not None:
        raise ValueError(f"checkpoint: expected a whole one in {folder}, got {problem}")
    state = json.loads((folder / "state.json").read_text())
    return Checkpoint(folder, int(state["step"]), state["scalars"])


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in `root`, or None. Broken and partial ones are passed over; nothing is changed."""
    for folder in _folders(Path(root)):
        if _problem(folder, hashes=False) is None:
            return folder
    return None


def clean(root: str | os.PathLike[str]) -> list[Path]:
    """Removes what an interrupted run left, hidden partial folders and checkpoints that are not whole, and returns it.

    A hidden folder that is whole, since the kill came just before its renaming, gets its name instead.
    """
    root = Path(root)
    for path in root.glob(".step-*.partial"):
        target = root / path.name[1:].split(".")[0]
        if _FOLDER.fullmatch(target.name) and not target.exists() and _problem(path, hashes=True) is None:
            path.rename(target)
    removed = [path for path in root.glob(".step-*.partial") if path.is_dir()]
    removed += [folder for folder in _folders(root) if _problem(folder, hashes=False) is not None]
    for path in removed:
        shutil.rmtree(path)
    return removed


def rng_state() -> dict[str, Any]:
    """State of torch's (CPU and CUDA), numpy's and Python's global generators, JSON-compatible."""
    numpy_state = np.random.get_state()
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": _text(torch.get_rng_state().numpy()),
        "cuda": [_text(state.numpy()) for state in cuda],
        "numpy": [numpy_state[0], _text(numpy_state[1]), *map(float, numpy_state[2:])],
        "python": [version, list(internal), gauss],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` gave; generators of CUDA devices that are not here are left out."""
    torch.set_rng_state(torch.from_numpy(_array(state["torch"], np.uint8)))
    if torch.cuda.is_available():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.from_numpy(_array(text, np.uint8)), device)
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, _array(keys, np.uint32), int(position), int(has_gauss), cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _write_group(folder: Path, group: str, named: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name in sorted(named):
        size = named[name].numel() * named[name].element_size()
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = named[name]
        filled += size
    for number, shard in enumerate(shards, start=1):
        # One shard at a time on the host.
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(on_host, folder / f"{group}-{number:05d}.safetensors")


def _write_manifest(folder: Path, step: int) -> None:
    """Flushes every file, then records sizes and hashes in manifest.json, and flushes that."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _flush(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"schema": SCHEMA, "step": step, "files": files}, indent=1))
    _flush(manifest)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _flush(path)


def _replace(partial: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.replaced.partial")
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    _flush(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _remove(folder: Path) -> None:
    """Hidden first, so that a kill midway leaves nothing that looks like a checkpoint."""
    hidden = folder.with_name(f".{folder.name}.removed.partial")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _folders(root: Path) -> list[Path]:
    """`step-…` folders, newest step first."""
    if not root.is_dir():
        return []
    found = [
        (int(m.group(1)), path) for path in root.iterdir() if (m := _FOLDER.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _problem(folder: Path, hashes: bool) -> str | None:
    """Why `folder` is no whole checkpoint, as a phrase; None when it is one."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        return "no manifest.json"
    except (OSError, ValueError) as error:
        return f"an unreadable manifest.json ({error})"
    if manifest.get("schema") != SCHEMA:
        return f"schema {manifest.get('schema')!r} instead of {SCHEMA!r}"
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"no {name}"
        if path.stat().st_size != entry["bytes"]:
            return f"{path.stat().st_size} bytes instead of {entry['bytes']} in {name}"
        if hashes and _sha256(path) != entry["sha256"]:
            return f"content that differs from the manifest's hash in {name}"
    return None


def _flush(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _text(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _array(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
