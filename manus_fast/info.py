"""What this installation is and can do, and what a run would take of it: the facts behind `manus-fast info` and the
checks of `manus-fast doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manus_fast import plan
from manus_fast.versions import cores, git_commit, versions

if TYPE_CHECKING:
    from manus_fast.run_config import Config


def collect() -> dict[str, Any]:
    """Versions, the compiled extension, CUDA, backends by op, engines and environments, as JSON-compatible values."""
    import torch

    from manus_fast.envs import registered
    from manus_fast.ops import dispatch

    extension = dispatch.extension()
    build = dict(extension.build) if extension is not None else {}
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    device = "cuda" if gpus else "cpu"
    return {
        "versions": versions(),
        "commit": git_commit(),
        "extension": {"built": extension is not None, "compiler": build.get("compiler")},
        "cuda": {
            "built": bool(build.get("cuda")),
            "archs": str(build.get("cuda_archs") or "").split() if build.get("cuda") else [],
            "usable": bool(build.get("cuda")) and bool(gpus),
            "torch": torch.version.cuda,
            "gpus": gpus,
        },
        "threads": {"torch": torch.get_num_threads(), "extension": extension.num_threads() if extension else None},
        "ops": {
            op: {"chosen": dispatch.automatic(op, device), "backends": dispatch.backends(op)} for op in dispatch.TABLE
        },
        "engines": engines(),
        "environments": list(registered()),
    }


def engines() -> dict[str, str]:
    """Rollout engines by name: "ready", or what is missing."""
    from manus_fast.rollout.engines import ENGINES
    from manus_fast.rollout.engines.vllm_core import missing

    reasons = {"vllm": missing()}
    if importlib.util.find_spec("openai") is None:
        reasons["openai"] = "the package openai is not installed"
    return {name: reasons.get(name) or "ready" for name in ENGINES}


def memory(config: Config, ranks: int = 1, capacity: int | None = None, block: str = "ppo") -> dict[str, Any]:
    """The memory that a run of `config` takes on each GPU, as JSON-compatible values; see manus_fast/plan.py.

    Args:
        ranks: GPUs that it runs on.
        capacity: bytes of one GPU; None asks the first one, or the host where there is none.
        block: "ppo" | "sft": what is run.

    Raises:
        ValueError: no model, a model that is no dense decoder, or a batch size that does not divide.
    """
    from manus_fast.data.packing import micro_batch_rows

    learning, length = getattr(config, block), config.rollout.max_length
    rows = micro_batch_rows(learning.batch_size, ranks, config.training.gradient_accumulation_steps)
    limit = learning.max_tokens
    shape, lora = plan.Shape.of(_model_config(config.model.path)), config.model.lora
    load = plan.Load(
        dtype=config.model.dtype,
        tokens=rows * length if limit is None else min(rows * length, max(limit, length)),
        slots=config.rollout.slots,
        length=length,
        critic=config.ppo.critic_kind if block == "ppo" else "none",
        reference=block == "ppo" and config.ppo.needs_reference,
        adapters=None if lora is None else shape.adapter_parameters(lora.rank, lora.target_modules),
        gradient_checkpointing=config.model.gradient_checkpointing,
        ranks=ranks,
        zero_stage=config.backend.zero_stage if config.backend.kind == "fsdp" and ranks > 1 else 0,
        offload=config.backend.offload,
    )
    capacity = _capacity() if capacity is None else capacity
    parts, changes = plan.parts(shape, load), plan.remedies(shape, load, capacity, block)
    return {
        "parameters": shape.parameters,
        "tokens": load.tokens,
        "ranks": ranks,
        "parts": parts,
        "total": sum(parts.values()),
        "capacity": capacity,
        "fits": changes == [],
        "logits_avoided": plan.logits_avoided(shape, load),
        "remedies": None if changes is None else [vars(change) for change in changes],
    }


def _model_config(path: str) -> dict[str, Any]:
    """A model's config.json, without loading the model."""
    from transformers import PretrainedConfig

    from manus_fast.modeling.load import find_model

    if not path:
        raise ValueError("model.path: expected a model folder or hub name, got none (set it or --model_path)")
    name = find_model(path)
    try:
        return PretrainedConfig.get_config_dict(name)[0]
    except OSError as error:
        raise ValueError(f"model: cannot read the config of {name!r}: {str(error).splitlines()[0]}") from error


def _capacity() -> int:
    """Bytes of the first GPU, or of the host where there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Check:
    """One line of the doctor: `state` is ok, note (optional, or slower without) or problem."""

    name: str
    state: str
    text: str


def examine(folder: str | os.PathLike[str] = ".") -> list[Check]:
    """Looks at everything a build or a run needs, and says what to do where something is missing.

    Args:
        folder: where runs would be written.
    """
    checks = [_python(), _headers(), _compiler(), _cmake(), *_torch(), _extension(), _nvcc(), *_packages()]
    return [*checks, _writable(Path(folder)), _disk(Path(folder)), _memory()]


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _headers() -> Check:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.is_file():
        return Check("python headers", "ok", str(header.parent))
    return Check("python headers", "problem", "no Python.h: install python3-dev before building")


def _compiler() -> Check:
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found:
        return Check("C++ compiler", "ok", found)
    return Check("C++ compiler", "problem", "none found: install g++ (or set CXX) before building")


def _cmake() -> Check:
    if shutil.which("cmake") or importlib.util.find_spec("cmake"):
        return Check("cmake", "ok", shutil.which("cmake") or "the Python package")
    return Check("cmake", "note", "not installed: an isolated pip build fetches its own")


def _torch() -> list[Check]:
    if importlib.util.find_spec("torch") is None:
        return [Check("torch", "problem", "not installed: pip install torch")]
    import torch

    checks = [Check("torch", "ok", torch.__version__)]
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        checks.append(Check("GPU", "ok", names))
    elif torch.version.cuda:
        checks.append(Check("GPU", "note", "torch was built for CUDA and finds no GPU: see nvidia-smi"))
    else:
        checks.append(Check("GPU", "note", "none: this torch is for the CPU"))
    return checks


def _extension() -> Check:
    if importlib.util.find_spec("manus_fast._C") is None:
        return Check("extension", "problem", "manus_fast._C is not built: run pip install . in the checkout")
    try:
        from manus_fast import _C
    except ImportError as error:
        return Check("extension", "problem", f"manus_fast._C does not load ({error}): build it again")
    cuda = f"CUDA for {_C.build['cuda_archs']}" if _C.build["cuda"] else "without CUDA"
    return Check("extension", "ok", f"{_C.build['compiler']}, {cuda}")


def _nvcc() -> Check:
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found:
        return Check("nvcc", "ok", found)
    return Check("nvcc", "note", "not found: builds leave the CUDA kernels out")


def _packages() -> list[Check]:
    known = versions()
    hints = {
        "triton": ("note", "the Triton kernels are left out: pip install 'manus-fast[triton]'"),
        "tensorboard": ("note", "no event files are written: pip install 'manus-fast[tracking]'"),
        "flash-attn": ("note", "attention runs through SDPA"),
        "vllm": ("note", "rollouts run on the hf engine"),
        "alfworld": ("note", "ALFWorld's own games can't be played: pip install 'manus-fast[alfworld]'"),
    }
    return [
        Check(name, "ok", str(known[name])) if known.get(name) else Check(name, state, f"not installed: {text}")
        for name, (state, text) in hints.items()
    ]


def _writable(folder: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Check("writing", "ok", f"{folder.resolve()} can be written to")
    except OSError as error:
        return Check("writing", "problem", f"{folder.resolve()} cannot be written to: {error.strerror}")


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    return Check("disk", "ok" if free >= 5 else "note", f"{free:.1f} GiB free")


def _memory() -> Check:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Check("memory", "note", "unknown on this system")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Check("memory", "ok" if total >= 4 else "note", f"{total:.1f} GiB, {cores()} CPUs")
