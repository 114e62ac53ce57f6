"""Chooses the implementation of an op: a table from op and backend to a callable, without hidden fallbacks.

A backend asked for by name (`MANUS_FAST_BACKEND`, or `with forced("triton"):`) that cannot run raises RuntimeError
with one sentence that says what is missing. `auto` takes the first of the device's preference that can run and logs
the choice once. Implementations are named as "module:attribute" and imported on first use, so a machine without triton
or without the compiled extension still imports `manus_fast.ops`.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator

import torch

from manus_fast import settings

log = logging.getLogger("manus_fast.ops")

# Every implementation takes the checked arguments of its op's public function and is differentiable where the op is.
TABLE: dict[str, dict[str, str]] = {
    "linear_logprob": {
        "reference": "manus_fast.ops.reference:linear_logprob",
        "cpu": "manus_fast.ops.cpu.linear_logprob:linear_logprob",
        "triton": "manus_fast.ops.triton.linear_logprob:linear_logprob",
        "cuda": "manus_fast.ops.cuda.linear_logprob:linear_logprob",
    },
    "logprob": {
        "reference": "manus_fast.ops.reference:logprob",
        "cpu": "manus_fast.ops.cpu.logprob:logprob",
        "triton": "manus_fast.ops.triton.logprob:logprob",
    },
    "gae": {
        "reference": "manus_fast.ops.reference:gae",
        "cpu": "manus_fast.ops.cpu.gae:gae",
        "triton": "manus_fast.ops.triton.gae:gae",
        "cuda": "manus_fast.ops.cuda.gae:gae",
    },
    "ppo_loss": {
        "reference": "manus_fast.ops.reference:ppo_loss",
        "cpu": "manus_fast.ops.cpu.ppo_loss:ppo_loss",
        "triton": "manus_fast.ops.triton.ppo_loss:ppo_loss",
        "cuda": "manus_fast.ops.cuda.ppo_loss:ppo_loss",
    },
    "group_advantages": {
        "reference": "manus_fast.ops.reference:group_advantages",
        "cpu": "manus_fast.ops.cpu.group_advantages:group_advantages",
        "triton": "manus_fast.ops.triton.group_advantages:group_advantages",
    },
    "slot_attention": {
        "reference": "manus_fast.ops.reference:slot_attention",
        "cpu": "manus_fast.ops.cpu.slot_attention:slot_attention",
    },
    "packed_attention": {
        "reference": "manus_fast.ops.reference:packed_attention",
        "cpu": "manus_fast.ops.cpu.packed_attention:packed_attention",
    },
}

# `auto` on a device takes the first of these that the op has and the machine can run.
PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}

# Backends written in terms of the compiled extension, and the function of it that each calls first.
NEEDS_EXTENSION = {
    ("linear_logprob", "cpu"): "logprob_statistics_cpu",
    ("logprob", "cpu"): "logprob_statistics_cpu",
    **{
        (op, "cpu"): f"{op}_cpu" for op in ("gae", "ppo_loss", "group_advantages", "slot_attention", "packed_attention")
    },
}

_forced: list[str] = []


@contextlib.contextmanager
def forced(backend: str) -> Iterator[None]:
    """Within the block every op uses `backend` (one of settings.BACKENDS), whatever the environment says."""
    if backend not in settings.BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(settings.BACKENDS)}, got '{backend}'")
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


def requested() -> str:
    """The backend in force: that of the innermost `forced` block, else MANUS_FAST_BACKEND."""
    return _forced[-1] if _forced else settings.backend()


@functools.cache
def extension():
    """The compiled module manus_fast._C, or None when it is not built. Applies MANUS_FAST_THREADS on first use."""
    if importlib.util.find_spec("manus_fast._C") is None:
        return None
    module = importlib.import_module("manus_fast._C")
    if settings.threads() is not None:
        module.set_num_threads(settings.threads())
    return module


@functools.cache
def _interpreted() -> bool:
    """True when Triton kernels run in its interpreter (TRITON_INTERPRET=1), which takes CPU tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def missing(op: str, backend: str, device: torch.device | str, dtype: torch.dtype | None = None) -> str | None:
    """Why `backend` cannot run `op` on tensors of `device` and `dtype`, as a phrase; None when it can."""
    kind = torch.device(device).type
    if backend not in TABLE[op]:
        return f"'{op}' has no such implementation (it has {', '.join(TABLE[op])})"
    if backend == "cpu" and kind != "cpu":
        return f"it takes CPU tensors and the tensors are on {kind}"
    if ((op, backend) in NEEDS_EXTENSION or backend == "cuda") and extension() is None:
        return "the extension manus_fast._C is not built (pip install .)"
    if (op, backend) in NEEDS_EXTENSION and not hasattr(extension(), NEEDS_EXTENSION[op, backend]):
        return "manus_fast._C was built from an older source (build it again)"
    if backend == "cuda":
        if not extension().build["cuda"]:
            return "manus_fast._C was built without CUDA (rebuild with MF_CUDA=ON)"
        if kind != "cuda":
            return f"it takes CUDA tensors and the tensors are on {kind}"
    if backend in ("triton", "cuda") and dtype == torch.float64:
        return "its kernels compute in float32 and the tensors are float64"
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed (pip install 'manus-fast[triton]')"
        if kind != "cuda" and not _interpreted():
            return f"it takes CUDA tensors and the tensors are on {kind}"
    return None


@functools.cache
def _load(target: str) -> Callable:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)


@functools.cache
def _log_choice(op: str, backend: str, kind: str) -> None:
    level = logging.WARNING if backend == "reference" and len(TABLE[op]) > 1 else logging.INFO
    log.log(level, "%s on %s: backend %s", op, kind, backend)


def choose(op: str, device: torch.device, dtype: torch.dtype | None = None) -> Callable:
    """The implementation of `op` for such tensors. RuntimeError when the backend asked for cannot run them."""
    backend = requested()
    if backend == "auto":
        backend = automatic(op, device, dtype)
        _log_choice(op, backend, device.type)
    else:
        reason = missing(op, backend, device, dtype)
        if reason is not None:
            raise RuntimeError(f"{op}: backend '{backend}' was asked for, but {reason}")
    return _load(TABLE[op][backend])


def automatic(op: str, device: torch.device | str, dtype: torch.dtype | None = None) -> str:
    """The backend that `auto` takes for `op` on such tensors."""
    order = PREFERENCE.get(torch.device(device).type, ("reference",))
    return next(name for name in order if missing(op, name, device, dtype) is None)


def backends(op: str) -> dict[str, str]:
    """For each implementation of `op`: "ready", or what is missing, on this machine's best device."""
    status = {}
    for name in TABLE[op]:
        cuda = name in ("triton", "cuda")
        if cuda and not torch.cuda.is_available():
            reason = missing(op, name, "cuda") or "no CUDA device is usable"
        else:
            reason = missing(op, name, "cuda" if cuda else "cpu")
        status[name] = reason or "ready"
    return status
