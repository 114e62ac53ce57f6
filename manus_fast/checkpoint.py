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
import logging
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

_log = logging.getLogger(__name__)

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

    def part(self, name: str) -> Any:
        """One entry of the scalars. Raises ValueError where another kind of run wrote the checkpoint."""
        if name not in self.scalars:
            raise ValueError(
                f"training.resume: expected a checkpoint with {name} in {self.folder.parent}, got one of another kind "
                f"of run (with {', '.join(sorted(self.scalars)) or 'nothing'})"
            )
        return self.scalars[name]

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
    with _writing(f"a checkpoint to {root}", partial):
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
            for old in [folder for folder in folders(root) if folder != target][keep - 1 :]:
                _remove(old)
    return target


def save_model(folder: str | os.PathLike[str], *parts: Any) -> None:
    """Writes a Hugging Face folder in place of what is there; whatever is found under the name is whole at any moment.

    Args:
        folder: in one that exists.
        parts: model, tokenizer: saved by their `save_pretrained`.

    Raises:
        ValueError: it cannot be written (permission, space); the earlier one stays.
    """
    target = Path(folder)
    partial = target.with_name(f".{target.name}.partial")
    with _writing(f"the model to {target}", partial):
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        for part in parts:
            part.save_pretrained(partial)
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        _replace(partial, target)


@contextmanager
def _writing(what: str, partial: Path) -> Iterator[None]:
    """Leaves nothing of `partial` where writing it fails, and says in one sentence why it did."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"output_dir: cannot write {what}: {why}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
    for folder in folders(Path(root)):
        if _problem(folder, hashes=False) is None:
            return folder
    return None


def recover(root: str | os.PathLike[str]) -> Path | None:
    """The checkpoint to go on from, compared with its hashes: the newest whole one, or None where there are none.
    Damaged ones that are newer are removed with a warning, since they would outlive what the run writes next.

    Raises:
        ValueError: all that there are are damaged; nothing is removed then.
    """
    root = Path(root)
    _finish(root)
    damaged: list[tuple[Path, str]] = []
    for folder in folders(root):
        problem = _problem(folder, hashes=True)
        if problem is None:
            for path, why in damaged:
                _log.warning("%s is removed, for it is damaged (%s); the run goes on from %s", path, why, folder.name)
                _remove(path)
            return folder
        damaged.append((folder, problem))
    if damaged:
        path, why = damaged[0]
        raise ValueError(
            f"training.resume: expected a whole checkpoint in {root}, got {len(damaged)} damaged "
            f"({path.name}: {why}); remove them to begin anew"
        )
    return None


def clean(root: str | os.PathLike[str]) -> list[Path]:
    """Removes what an interrupted run left, hidden partial folders and checkpoints that are not whole, and returns it.

    A hidden folder that is whole, since the kill came just before its renaming, gets its name instead.
    """
    root = Path(root)
    _finish(root)
    removed = [path for path in root.glob(".step-*.partial") if path.is_dir()]
    removed += [folder for folder in folders(root) if _problem(folder, hashes=False) is not None]
    for path in removed:
        shutil.rmtree(path)
    return removed


def _finish(root: Path) -> None:
    """Gives hidden folders that are whole their names."""
    for path in root.glob(".step-*.partial"):
        target = root / path.name[1:].split(".")[0]
        if _FOLDER.fullmatch(target.name) and not target.exists() and _problem(path, hashes=True) is None:
            path.rename(target)


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
    if os.path.lexists(target):
        _delete(aside)  # of a run that was killed
        target.rename(aside)
    try:
        partial.rename(target)
    except BaseException:  # a signal between the two
        if os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        raise
    _flush(target.parent)
    _delete(aside)


def _delete(path: Path) -> None:
    """Whatever a user may have put there: a folder, a file, a link (not what it leads to), nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Hidden first, so that a kill midway leaves nothing that looks like a checkpoint."""
    hidden = folder.with_name(f".{folder.name}.removed.partial")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def folders(root: Path) -> list[Path]:
    """`step-…` folders, newest step first, whole or not."""
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
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        return f"schema {schema!r} instead of {SCHEMA!r} in manifest.json"
    try:
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError):
        return "a manifest.json without sizes and hashes"
    if "state.json" not in files:
        return "a manifest.json without state.json"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"no {name}"
        if path.stat().st_size != size:
            return f"{path.stat().st_size} bytes instead of {size} in {name}"
        if hashes and _sha256(path) != digest:
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
