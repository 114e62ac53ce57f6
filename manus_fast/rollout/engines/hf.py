"""The engine without further dependencies: continuous batching over a Hugging Face decoder, on CPU and CUDA.

Every poll runs one forward call over a flat batch of tokens: one for each slot that decodes, and the new tokens of
slots whose prompt is not cached yet. A slot keeps its cache after its request is done; the next request of the same
session, or any request whose prompt begins alike (the same system prompt, the same task), computes only what differs.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from manus_fast.modeling.attention import output_head, use_packed_attention
from manus_fast.modeling.slot_cache import Prefill, SlotCache, SlotPlan
from manus_fast.rollout.engine import Completion, Request, check_request, empty_completion
from manus_fast.rollout.engines.sampling import sample
from manus_fast.rollout.seeds import uniforms

log = logging.getLogger("manus_fast.rollout")

# A shorter common prefix with another slot is recomputed: copying it would not be cheaper.
_MIN_SHARED = 16

# Steps in a row that may fail before the engine is given up: the first is made again, the second costs its requests.
_MAX_FAILURES = 3


class HFEngine:
    """Continuous batching with a slot cache; see rollout/engine.py for the contract.

    Args:
        model: a causal LM. Used as it is (and shared with its owner) when it is already on `device` in `dtype`,
            copied otherwise. Its attention is switched to packed attention.
        end_ids: token ids that end a reply.
        max_slots: requests that run at the same time; more wait in arrival order.
        max_length: tokens a slot holds, prompt and reply together.
        device: default: the model's.
        dtype: default: the model's. Logits are float32 in any case.
        max_batch_tokens: tokens of one forward call; longer prompts are computed in pieces.

    Raises:
        ValueError: a limit below 1, an end id outside the vocabulary, a model that packed attention cannot serve.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int] | frozenset[int],
        *,
        max_slots: int = 64,
        max_length: int = 2048,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_batch_tokens: int = 8192,
    ):
        for name, number in (("max_slots", max_slots), ("max_length", max_length)):
            if number < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {number}")
        if max_batch_tokens < max_slots:
            raise ValueError(f"max_batch_tokens: expected at least max_slots ({max_slots}), got {max_batch_tokens}")
        device = torch.device(device) if device is not None else model.device
        dtype = dtype or model.dtype
        self.shares_model = model.device == device and model.dtype == dtype
        self.model = model if self.shares_model else copy.deepcopy(model).to(device=device, dtype=dtype).eval()
        use_packed_attention(self.model)
        self._head = output_head(self.model)
        vocab = self._head.weight.shape[0]
        ends = sorted(int(i) for i in end_ids)
        if not ends or ends[0] < 0 or ends[-1] >= vocab:
            raise ValueError(f"end_ids: expected ids in [0, {vocab}), got {ends}")
        self.version = 0
        self.max_slots, self.max_length, self.max_batch_tokens = max_slots, max_length, max_batch_tokens
        self._device, self._dtype, self._vocab = device, dtype, vocab
        self._is_end = np.zeros(vocab, bool)
        self._is_end[ends] = True
        self._awake = True
        self._loaded = True
        self._shapes: dict[str, torch.Size] = {}
        self._cache = SlotCache(max_slots, max_length)
        self._queue: deque[Request] = deque()
        self._ready: list[Completion] = []
        self._clock = 0
        self._failures = 0

        # State of each slot. tokens[:known] is prompt and reply so far, tokens[:cached] lies in the cache.
        self._requests: list[Request | None] = [None] * max_slots
        self._sessions: dict[int, int] = {}
        self._owner: list[int | None] = [None] * max_slots
        self._tokens = np.zeros((max_slots, max_length), np.int32)
        self._log_probs = np.zeros((max_slots, max_length), np.float32)
        self._busy = np.zeros(max_slots, bool)
        self._known = np.zeros(max_slots, np.int64)
        self._cached = np.zeros(max_slots, np.int64)
        self._prompt = np.zeros(max_slots, np.int64)
        self._limit = np.zeros(max_slots, np.int64)  # value of `known` at which a reply is cut
        self._versions = np.zeros((max_slots, max_length), np.int32)  # policy version of each sampled token
        self._used = np.zeros(max_slots, np.int64)
        self._seed = np.zeros(max_slots, np.uint64)
        self._temperature = np.ones(max_slots, np.float32)
        self._top_p = np.ones(max_slots, np.float32)
        self._top_k = np.zeros(max_slots, np.int64)
        self._min_p = np.zeros(max_slots, np.float32)

    # Requests

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a limit or sampling parameter out of range.
        """
        check_request(request, self._vocab)
        if len(request.prompt_ids) >= self.max_length:
            message = (
                f"prompt_ids: expected fewer than max_length = {self.max_length} tokens, got {len(request.prompt_ids)}"
            )
            self._ready.append(empty_completion(request.id, "error", self.version, message))
            return
        self._queue.append(request)

    def abort(self, id: int) -> None:
        """Ends a request early: it completes with what was sampled so far. An id that is done is ignored."""
        for request in self._queue:
            if request.id == id:
                self._queue.remove(request)
                self._ready.append(empty_completion(id, "abort", self.version))
                return
        for slot, running in enumerate(self._requests):
            if running is not None and running.id == id:
                self._finish(slot, "abort")
                return

    def sampled(self, id: int) -> np.ndarray:
        """int32 [S]: what a running request has sampled so far; [0] for one that waits or is done."""
        for slot, running in enumerate(self._requests):
            if running is not None and running.id == id:
                return self._tokens[slot, self._prompt[slot] : self._known[slot]].copy()
        return np.zeros(0, np.int32)

    def end_session(self, session: int) -> None:
        slot = self._sessions.pop(session, None)
        if slot is not None:
            self._owner[slot] = None

    def poll(self, timeout: float) -> list[Completion]:
        """Runs one forward call when there is something to compute. `timeout` is not needed: nothing is waited for.
        One that fails, as where memory runs out, is made again at the next poll; should that fail too, the requests
        that are in slots complete as errors.

        Raises:
            RuntimeError: work is there but the engine sleeps, or its weights were given up and not loaded again, or
                calls fail again and again.
        """
        if self._queue or self._busy.any():
            if not self._awake:
                raise RuntimeError("engine: expected wake() before more work, got a sleeping engine")
            if not self._loaded:
                raise RuntimeError("engine: expected load() after sleep(2), got a poll without weights")
            with torch.inference_mode():
                self._admit()
                try:
                    self._step()
                    self._failures = 0
                except RuntimeError as error:  # torch's own, of memory that ran out among others
                    self._on_failure(error)
        ready, self._ready = self._ready, []
        return ready

    # Weights

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights in place, by Hugging Face parameter name, one tensor at a time.

        Running requests go on with the new weights; everything cached is computed anew. After an error the weights
        are a mixture: load again.

        Raises:
            ValueError: a name that the model does not have, a name that is missing, another shape.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        missing = {id(p): name for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in parameters:
                    raise ValueError(f"tensors: expected names of the model's parameters, got {name!r}")
                target = parameters[name]
                shape = self._shapes.get(name, target.shape)
                if tensor.shape != shape:
                    raise ValueError(f"tensors: expected {name} of shape {list(shape)}, got {list(tensor.shape)}")
                if target.shape != shape:
                    target.data = torch.empty(shape, dtype=self._dtype, device=self._device)
                if tensor.data_ptr() != target.data_ptr():
                    target.copy_(tensor)
                missing.pop(id(target), None)
        if missing:
            raise ValueError(f"tensors: expected all parameters, got none for {', '.join(sorted(missing.values()))}")
        self._shapes = {}
        self._loaded = True
        self.version = version
        self._cached[:] = 0

    def forget(self) -> None:
        """Forgets what idle slots hold; running requests keep theirs."""
        self._cached[~self._busy] = 0

    def sleep(self, level: int) -> None:
        """Gives memory back: level 1 the cache, level 2 the weights too, which then have to be loaded again.

        Weights that are shared with the model's owner stay, for they are the owner's.
        """
        if level not in (1, 2):
            raise ValueError(f"level: expected 1 or 2, got {level}")
        self._awake = False
        self._cached[:] = 0
        self._cache.free()
        if level == 2:
            self._loaded = False
            if not self.shares_model:
                for name, parameter in self.model.named_parameters(remove_duplicate=False):
                    self._shapes.setdefault(name, parameter.shape)
                for parameter in self.model.parameters():
                    parameter.data = torch.empty(0, dtype=self._dtype, device=self._device)

    def wake(self) -> None:
        self._awake = True

    # Slots

    def _admit(self) -> None:
        """Moves queued requests into slots, in arrival order."""
        if not self._queue:
            return
        self._clock += 1
        later: list[Request] = []
        while self._queue and not self._busy.all():
            request = self._queue.popleft()
            if not self._place(request):
                later.append(request)
        self._queue.extendleft(reversed(later))

    def _place(self, request: Request) -> bool:
        """Chooses the slot that saves most. False: better one step later, when another slot has the same prefix."""
        prompt = request.prompt_ids
        slot = self._sessions.get(request.session) if request.session is not None else None
        if slot is not None and self._busy[slot]:
            slot = None
        source, shared = slot, 0
        if slot is not None:
            shared = int(self._common(prompt, self._tokens[slot : slot + 1], self._cached[slot : slot + 1])[0])
        if slot is None or shared < _MIN_SHARED:
            known = self._common(prompt, self._tokens, self._known)
            lengths = np.minimum(known, self._cached)
            pending = np.where(self._busy, known - lengths, 0)
            if int(pending.max()) > max(int(lengths.max()), shared) + _MIN_SHARED:
                return False
            best = int(lengths.max())
            if slot is None:
                slot = self._free_slot(lengths, best)
            if best > shared:
                # Equal lengths: the slot itself needs no copy.
                source = slot if lengths[slot] == best else int(lengths.argmax())
                shared = best
        shared = min(shared, len(prompt) - 1)  # the last token is always computed: its logits are needed
        if source != slot:
            if shared < _MIN_SHARED:
                shared = 0
            else:
                self._cache.copy_prefix(source, slot, shared)
        self._occupy(slot, request, shared)
        return True

    @staticmethod
    def _common(prompt: np.ndarray, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Length of the common prefix of `prompt` with the first `valid` tokens of each row."""
        differs = tokens[:, : len(prompt)] != prompt
        first = differs.argmax(1)
        first[~differs.any(1)] = len(prompt)
        return np.minimum(first, valid)

    def _free_slot(self, lengths: np.ndarray, best: int) -> int:
        """Slots of ended episodes come first, then the one whose session has been idle longest."""
        idle = np.flatnonzero(~self._busy)
        unowned = [int(s) for s in idle if self._owner[s] is None]
        if not unowned:
            slot = int(idle[self._used[idle].argmin()])
            del self._sessions[self._owner[slot]]
            self._owner[slot] = None
            return slot
        if best >= _MIN_SHARED:
            for slot in unowned:
                if lengths[slot] == best:
                    return slot
        return unowned[0]  # low numbers keep the span that attention reads short

    def _occupy(self, slot: int, request: Request, shared: int) -> None:
        if request.session is not None and request.session not in self._sessions:
            self._sessions[request.session] = slot
            self._owner[slot] = request.session
        length = len(request.prompt_ids)
        self._requests[slot] = request
        self._busy[slot] = True
        self._tokens[slot, :length] = request.prompt_ids
        self._known[slot] = self._prompt[slot] = length
        self._cached[slot] = shared
        self._limit[slot] = min(length + request.max_tokens, self.max_length)
        self._seed[slot] = request.seed & (2**64 - 1)
        self._temperature[slot] = request.temperature
        self._top_p[slot] = request.top_p
        self._top_k[slot] = request.top_k
        self._min_p[slot] = request.min_p

    def _finish(self, slot: int, reason: str, error: str | None = None) -> None:
        request = self._requests[slot]
        start, end = int(self._prompt[slot]), int(self._known[slot])
        ids, log_probs = self._tokens[slot, start:end].copy(), self._log_probs[slot, start:end].copy()
        versions = self._versions[slot, start:end].copy()
        version = int(versions[0]) if end > start else self.version
        mixed = versions if end > start and versions[-1] != version else None
        self._ready.append(Completion(request.id, ids, log_probs, reason, version, error, versions=mixed))
        self._requests[slot] = None
        self._busy[slot] = False
        self._used[slot] = self._clock

    def _on_failure(self, error: RuntimeError) -> None:
        """A step broke. What its requests have sampled is kept; what it may have written of their cache is not."""
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            raise RuntimeError(f"engine: {self._failures} steps in a row failed, the last with: {error}") from error
        running = np.flatnonzero(self._busy)
        self._cached[running] = 0
        what = "is computed again" if self._failures == 1 else f"ends its {len(running)} requests"
        log.warning("a step failed (%s: %s) and %s", type(error).__name__, error, what)
        if self._failures > 1:
            for slot in running.tolist():
                self._finish(slot, "error", f"{type(error).__name__}: {error}")

    # One step

    def _step(self) -> None:
        running = np.flatnonzero(self._busy)
        if not len(running):
            return
        pending = self._known[running] - self._cached[running]
        decode = running[pending == 1]
        prefills, ends = [], []
        room, at = self.max_batch_tokens - len(decode), len(decode)
        for slot, count in zip(running[pending > 1].tolist(), pending[pending > 1].tolist(), strict=True):
            if room == 0:
                break
            take = min(count, room)
            prefills.append(Prefill(slot, int(self._cached[slot]), take))
            room, at = room - take, at + take
            if take == count:
                ends.append((at - 1, slot))
        positions = self._cached[decode]
        ids = [self._tokens[decode, positions], *(self._tokens[p.slot, p.start : p.start + p.count] for p in prefills)]
        places = [positions, *(np.arange(p.start, p.start + p.count) for p in prefills)]
        plan = SlotPlan(self._cache, decode, positions, prefills, self._device, self._dtype)
        hidden = self.model.base_model(
            input_ids=torch.from_numpy(np.concatenate(ids)).to(self._device)[None],
            position_ids=torch.from_numpy(np.concatenate(places)).to(self._device)[None],
            use_cache=False,
            attention_plan=plan,
        ).last_hidden_state[0]
        self._cached[decode] += 1
        for prefill in prefills:
            self._cached[prefill.slot] += prefill.count
        if prefills:
            rows = np.concatenate([np.arange(len(decode)), np.asarray([row for row, _ in ends], np.int64)])
            slots = np.concatenate([decode, np.asarray([slot for _, slot in ends], np.int64)])
            if not len(rows):
                return
            hidden = hidden[torch.from_numpy(rows).to(self._device)]
        else:
            slots = decode
        self._sample(slots, self._head(hidden).float())

    def _sample(self, slots: np.ndarray, logits: torch.Tensor) -> None:
        """logits float32 [n, V] of `slots` [n]."""
        counters = self._known[slots] - self._prompt[slots]
        tokens, log_probs = sample(
            logits,
            uniforms(self._seed[slots], counters.astype(np.uint64)),
            self._temperature[slots],
            self._top_p[slots],
            self._top_k[slots],
            self._min_p[slots],
        )
        at = self._known[slots]
        self._tokens[slots, at] = tokens
        self._log_probs[slots, at] = log_probs
        self._versions[slots, at] = self.version
        self._known[slots] = at + 1
        broken = ~np.isfinite(log_probs)
        stopped = self._is_end[tokens]
        cut = at + 1 >= self._limit[slots]
        for i in np.flatnonzero(stopped | cut | broken).tolist():
            slot = int(slots[i])
            if broken[i]:
                self._known[slot] -= 1
                self._finish(slot, "error", "logits: expected finite numbers, got NaN or infinity")
            else:
                self._finish(slot, "stop" if stopped[i] else "length")
