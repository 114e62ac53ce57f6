"""vLLM (V1) inside the training process, behind the submit/poll contract of rollout/engine.py.

    engine = VLLMEngine(model, end_ids, max_slots=256, max_length=4096, dtype=torch.bfloat16)
    engine.submit(Request(…)); engine.poll(0.05)
    engine.sleep(2); …update…; engine.wake(); engine.load(policy.named_weights(), version=1)

It drives vLLM's engine core directly: token ids in, token ids and sampled log-probabilities out, no tokenizer, no
text, no server. Prompts share cached prefixes across turns and episodes. New weights are copied in place from the
trainer's own tensors, and every cached prefix is forgotten. Supported: vLLM 0.26 to 0.28 (vllm_core.VERSIONS); an
engine for each rank, no tensor parallelism, unquantised weights.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from manus_fast.modeling.lora import is_adapter
from manus_fast.rollout.engine import Completion, Request, check_request, empty_completion
from manus_fast.rollout.engines.vllm_adapters import InPlaceAdapter, adapter_options
from manus_fast.rollout.engines.vllm_core import cache_bytes as bytes_for
from manus_fast.rollout.engines.vllm_core import (
    check_installed,
    check_sleep_memory,
    core_request,
    graph_sizes,
    keep_allocators,
    open_core,
    several_ranks,
)
from manus_fast.rollout.engines.vllm_weights import InPlaceWeights

log = logging.getLogger("manus_fast.rollout")

# vLLM keeps process-wide state (its process groups, its config): closing one engine breaks every other one.
# Held here, since one that is dropped without `close` would keep its memory: vLLM hides it from garbage collection.
_open: VLLMEngine | None = None

# Steps in a row that may fail before the engine is given up: the first is begun anew, the second costs its requests.
_MAX_FAILURES = 3


class VLLMEngine:
    """See the module's docstring, and rollout/engine.py for the contract. One lives in a process: opening another
    closes it, and then it says so when it is used.

    Args:
        model: a Hugging Face causal LM: its config and weights are taken, the object itself is not kept.
        end_ids: token ids that end a reply; nothing else does.
        max_slots: requests that run at the same time; more wait in arrival order.
        max_length: tokens of a prompt and its reply together.
        dtype: of weights, activations and cache; default: the model's.
        cache_bytes: of the KV cache; None: room for `max_slots` sequences of `max_length`, but no more than half of
            what is free on the device. Where sequences outgrow it, vLLM preempts and recomputes.
        eager: no torch.compile and no CUDA graphs: starts in seconds, decodes slower.
        can_sleep: (CUDA) allocate so that `sleep` can give memory back. On a CPU, vLLM keeps its memory in any case.
        max_batch_tokens: tokens of one forward call; longer prompts are computed in pieces.
        prefill_every: steps between two that take in new prompts, while others decode. Steps that only decode are one
            CUDA graph, and a request that waits a few steps costs less than it saves; 1 takes in prompts at once.
        adapter_rank: above 0, `load` also takes low-rank adapters of at most this rank, which are kept apart from the
            weights. Steps take longer than with adapters added to the weights.

    Raises:
        ValueError: no vLLM of a supported version, a limit below 1, an end id outside the vocabulary, a cache that
            cannot hold one sequence; with several ranks a second engine, since closing the first ends their channels.
    """

    def __init__(
        self,
        model: Any,
        end_ids: Collection[int],
        *,
        max_slots: int = 64,
        max_length: int = 2048,
        dtype: torch.dtype | None = None,
        cache_bytes: int | None = None,
        eager: bool = False,
        can_sleep: bool = True,
        max_batch_tokens: int = 8192,
        prefill_every: int = 1,
        adapter_rank: int = 0,
    ):
        limits = {"max_slots": max_slots, "max_length": max_length, "prefill_every": prefill_every}
        for name, number in limits.items():
            if number < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {number}")
        vocab = model.get_input_embeddings().weight.shape[0]
        ends = sorted(int(i) for i in end_ids)
        if not ends or ends[0] < 0 or ends[-1] >= vocab:
            raise ValueError(f"end_ids: expected ids in [0, {vocab}), got {ends}")
        check_installed()
        global _open
        self.version = 0
        self.max_slots, self.max_length = max_slots, max_length
        self._ends, self._vocab = ends, vocab
        self._prefill_every, self._waited = prefill_every, 0
        self._held: dict[str, Any] = {}  # vLLM's requests that wait for the next step which takes in prompts, by name
        self._sampling: dict[tuple[float, float, int, float], Any] = {}
        self._awake, self._loaded = True, False
        self.adapter_rank = adapter_rank
        self.needs_weights = True
        """Whether an adapter alone is not enough for `load`: it has no weights yet, or has slept without them."""
        self._running: dict[str, _Running] = {}  # by vLLM's name
        self._names: dict[int, str] = {}  # of the requests that are running, by id
        self._numbers = itertools.count()
        self._closed = False
        self._ready: list[Completion] = []
        self._failures = 0
        self.cached_tokens = 0
        """Prompt tokens that were found in the cache, since the start."""
        dtype = dtype or model.dtype
        device = next(model.parameters()).device
        config = model.config.get_text_config()
        least = bytes_for(config, dtype, device, 1, max_length)
        if cache_bytes is None:
            cache_bytes = bytes_for(config, dtype, device, max_slots, max_length)
        if cache_bytes < least:
            raise ValueError(
                f"cache_bytes: expected at least {least} for a sequence of max_length = {max_length} tokens, "
                f"got {cache_bytes}"
            )
        options = {
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_length,
            "max_num_seqs": max_slots,
            "max_num_batched_tokens": max(max_batch_tokens, max_slots),
            "kv_cache_memory_bytes": cache_bytes,
            "enforce_eager": eager,
            "enable_sleep_mode": can_sleep and device.type == "cuda",
        }
        if adapter_rank:
            options |= adapter_options(adapter_rank)
        if device.type == "cuda" and not eager:
            sizes = graph_sizes(max_slots, options["max_num_batched_tokens"])
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if device.type == "cuda":
            # With the cache's size given this only is what vLLM wants to find free before it starts.
            free, total = torch.cuda.mem_get_info(device)
            options["gpu_memory_utilization"] = 0.9 * free / total
        self._can_sleep = can_sleep or device.type != "cuda"
        if _open is not None and several_ranks():
            raise ValueError("rollout.engine: expected one vllm engine in a process of several ranks, got a second")
        if _open is not None:
            _open.close()
        if options["enable_sleep_mode"]:
            check_sleep_memory()
        self._client = open_core(model, options)
        _open = self
        self._core = self._client.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._weights = InPlaceWeights(self._runner.get_model(), shapes)
        self._adapter = InPlaceAdapter(self._runner, adapter_rank, shapes) if adapter_rank else None
        self.load(model.named_parameters(), version=0)

    # Requests

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a limit or sampling parameter out of range.
            RuntimeError: the engine is closed.
        """
        self._check_open()
        check_request(request, self._vocab)
        length = len(request.prompt_ids)
        if length >= self.max_length:
            message = f"prompt_ids: expected fewer than max_length = {self.max_length} tokens, got {length}"
            self._ready.append(empty_completion(request.id, "error", self.version, message))
            return
        self._begin(request)

    def _begin(self, request: Request) -> None:
        # vLLM never sees a name twice, whatever the caller's ids do.
        name = str(next(self._numbers))
        sampling = self._sampling_of(request)
        sampling.max_tokens = min(request.max_tokens, self.max_length - len(request.prompt_ids))
        self._running[name] = _Running(request, self.version)
        self._names[request.id] = name
        adapter = None if self._adapter is None else self._adapter.request
        self._held[name] = core_request(name, request.prompt_ids, sampling, adapter)

    def _sampling_of(self, request: Request) -> Any:
        """vLLM's SamplingParams: checking a new one takes longer than copying one that was checked."""
        key = (request.temperature, request.top_p, request.top_k, request.min_p)
        if key not in self._sampling:
            from vllm import SamplingParams

            temperature, top_p, top_k, min_p = key
            self._sampling[key] = SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                seed=0,
                stop_token_ids=self._ends,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
                skip_clone=True,
            )
        sampling = copy.copy(self._sampling[key])
        sampling.seed = request.seed
        return sampling

    def abort(self, id: int) -> None:
        """Ends a request early: it completes with what was sampled so far. An id that is done is ignored."""
        name = self._names.get(id)
        if name is not None:
            if self._held.pop(name, None) is None:
                self._client.abort_requests([name])
            self._complete(name, "abort")

    def sampled(self, id: int) -> np.ndarray:
        """int32 [S]: what a running request has sampled so far; [0] for one that waits or is done."""
        name = self._names.get(id)
        return np.asarray([] if name is None else self._running[name].ids, np.int32)

    def end_session(self, session: int) -> None:
        """Nothing to do: prefixes are shared by content, and the least recently used go first."""

    def poll(self, timeout: float) -> list[Completion]:
        """Runs one step when there is something to compute. `timeout` is not needed: nothing is waited for. After a
        step that fails the requests in it begin anew; after a second one in a row they complete as errors.

        Raises:
            RuntimeError: work is there but the engine sleeps, or its weights were given up and not loaded again, or
                steps fail again and again, or the engine is closed.
        """
        self._check_open()
        if self._running:
            if not self._awake:
                raise RuntimeError("engine: expected wake() before more work, got a sleeping engine")
            if not self._loaded:
                raise RuntimeError("engine: expected load() after sleep(2), got a poll without weights")
            self._step()
        ready, self._ready = self._ready, []
        return ready

    def _take_in(self) -> None:
        """Gives vLLM the requests that wait, where it is time, or nothing else is there to do."""
        self._waited += 1
        if self._held and (self._waited >= self._prefill_every or len(self._held) == len(self._running)):
            for request in self._held.values():
                self._client.add_request(request)
            self._held.clear()
            self._waited = 0

    def _step(self) -> None:
        self._take_in()
        state = torch.get_rng_state()  # vLLM draws from torch's generator even where every request has its own
        try:
            outputs = self._client.get_output().outputs
        except (RuntimeError, ValueError, AssertionError, torch.OutOfMemoryError) as error:
            self._on_failure(error)
            return
        finally:
            torch.set_rng_state(state)
        if outputs:
            self._failures = 0
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue  # aborted while its step ran
            if output.prefill_stats is not None:
                self.cached_tokens += output.prefill_stats.num_cached_tokens
            if output.new_token_ids and not running.add(output.new_token_ids, output.new_logprobs.logprobs):
                self._client.abort_requests([output.request_id])
                self._complete(output.request_id, "error", "logits: expected finite numbers, got NaN or infinity")
            elif output.finish_reason is not None:
                reason = str(output.finish_reason)
                error = None if reason in ("stop", "length", "abort") else f"vLLM ended the request with {reason!r}"
                self._complete(output.request_id, "error" if error else reason, error)

    def _on_failure(self, error: Exception) -> None:
        """A step broke: whatever ran in it begins anew on a clean scheduler, and samples the same again, since its seed
        is the same. The second time in a row it is lost and says so."""
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            raise RuntimeError(f"engine: {self._failures} steps in a row failed, the last with: {error}") from error
        ran = [name for name in self._running if name not in self._held]
        what = "begin anew" if self._failures == 1 else "are lost"
        log.warning("a step of vLLM failed (%s: %s): %d requests %s", type(error).__name__, error, len(ran), what)
        queue = self._core.batch_queue
        if queue is not None:
            queue.clear()
        self._client.abort_requests(ran)
        # The step may have been told of requests that are over; it is told again. Blocks that it was to fill count as
        # cached prefixes already, and hold nothing.
        self._core.scheduler.finished_req_ids.update(self._known())
        self._client.reset_prefix_cache()
        if self._failures > 1:
            for name in ran:
                self._complete(name, "error", f"vLLM: {type(error).__name__}: {error}")
            return
        waiting, self._held = self._held, {}
        for name in ran:
            self._begin(self._running.pop(name).request)
        self._held |= waiting

    def _known(self) -> list[str]:
        """Names of the requests that vLLM's model runner holds; it has two kinds of runners."""
        states = getattr(self._runner, "req_states", None)
        return list(self._runner.requests if states is None else states.req_id_to_index)

    def _complete(self, name: str, reason: str, error: str | None = None) -> None:
        running = self._running.pop(name)
        if self._names.get(running.id) == name:
            del self._names[running.id]
        self._ready.append(running.completion(reason, error))

    # Weights

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights in place, by Hugging Face parameter name, one tensor at a time.

        With `adapter_rank` there may be an adapter's tensors, under PEFT's names, after the weights or in place of them
        (unless `needs_weights`): weights that are not given stay. An adapter that is not given is no more.

        Running requests go on with the new weights, what they had cached is computed anew, and their completions say
        which token came from which version. After an error the weights are a mixture: load again.

        Raises:
            RuntimeError: the engine sleeps: its memory is not there.
            ValueError: a name that the model does not have, a name that is missing, another shape, an adapter that
                does not fit or that the engine was not opened for.
        """
        self._check_open()
        if not self._awake:
            raise RuntimeError("engine: expected wake() before load(), got a sleeping engine")
        self._loaded = False
        self._synchronize()
        self._place(tensors)
        self._synchronize()
        # Running requests are put back into the queue; a frame in flight came from the old weights and is dropped.
        self._client.reset_prefix_cache(reset_running_requests=True)
        self._loaded = True
        self.version = version
        for running in self._running.values():
            running.restart(version)

    def _place(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._adapter is None:
            self._weights.load(tensors)
            return
        apart: dict[str, torch.Tensor] = {}

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if is_adapter(name):
                    apart[name] = tensor
                else:
                    yield name, tensor

        given = weights()
        first = next(given, None)
        if first is not None or self.needs_weights or not apart:
            self.needs_weights = True
            self._weights.load(given if first is None else itertools.chain([first], given))
            self.needs_weights = False
        self._adapter.load(apart)

    def forget(self) -> None:
        """Forgets cached prefixes; while requests are running nothing is done, for theirs are among them."""
        self._check_open()
        if self._awake and not self._running:
            self._client.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        """Gives memory back: level 1 the cache (weights wait in host memory), level 2 the weights too, which then must
        be loaded again after `wake`. Requests that are running wait and go on after `wake`. Sleeping again is allowed
        and can only go deeper.

        Raises:
            ValueError: a level other than 1 or 2.
            RuntimeError: the engine was made without `can_sleep`.
        """
        if level not in (1, 2):
            raise ValueError(f"level: expected 1 or 2, got {level}")
        if not self._can_sleep:
            raise RuntimeError("engine: expected can_sleep=True at its start, got sleep()")
        if self._awake:
            self._client.sleep(level, mode="keep")
        self._awake = False
        if level == 2:
            self._loaded, self.needs_weights = False, True

    def wake(self) -> None:
        if not self._awake:
            self._client.wake_up()
            self._awake = True

    def close(self) -> None:
        """Ends vLLM and frees what it holds; the engine can't be used afterwards, nor with several ranks their process
        group, which vLLM ends too. Idempotent."""
        if self._closed:
            return
        self._closed = True
        global _open
        if _open is self:
            _open = None
        client, self._client = self._client, None
        # vLLM lets go of its tensors; what we keep of them would hold their memory.
        self._core = self._runner = self._weights = self._adapter = None
        self._held.clear()
        keep_allocators()
        client.shutdown()
        del client
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("engine: expected an open engine, got one that was closed (one lives in a process)")

    @staticmethod
    def _synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class _Running:
    """A request on its way: what was sampled so far. `add` runs once a token, so it does as little as can be."""

    __slots__ = ("id", "ids", "log_probs", "request", "starts")

    def __init__(self, request: Request, version: int):
        self.request, self.id = request, request.id
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.starts = [(0, version)]
        """From which sampled token on which policy version samples."""

    def add(self, ids: list[int], log_probs: np.ndarray) -> bool:
        """Takes tokens in; False, and nothing taken, where a log-probability (float32 [n, …], the token's own first) is
        not finite."""
        if len(ids) == 1:
            own = log_probs.item(0)
            if not math.isfinite(own):
                return False
            self.ids.append(ids[0])
            self.log_probs.append(own)
            return True
        several = log_probs[:, 0].tolist()
        if not all(map(math.isfinite, several)):
            return False
        self.ids += ids
        self.log_probs += several
        return True

    def restart(self, version: int) -> None:
        """What comes from now on is sampled by another policy."""
        if self.starts[-1][0] == len(self.ids):
            self.starts.pop()
        self.starts.append((len(self.ids), version))

    def completion(self, reason: str, error: str | None) -> Completion:
        versions = None
        if len(self.starts) > 1 and self.starts[1][0] < len(self.ids):
            versions = np.zeros(len(self.ids), np.int32)
            for at, version in self.starts:
                versions[at:] = version
        return Completion(
            self.id,
            np.asarray(self.ids, np.int32),
            np.asarray(self.log_probs, np.float32),
            reason,
            self.starts[0][1],
            error,
            versions=versions,
        )
