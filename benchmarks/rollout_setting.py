"""What `bench_rollout` plays: a model, worlds and replies of scripted lengths, the loop in lockstep, and vLLM alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

from benchmarks.rollout_games import Case, Games
from manus_fast.agent.trajectory import Trajectory
from manus_fast.rollout.engine import NUMBERS, Request
from manus_fast.rollout.engines.vllm import VLLMEngine
from manus_fast.rollout.engines.vllm_core import core_request
from manus_fast.rollout.scheduler import Rollout

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 128, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
# Standard deviation of the logits at the start: with 49,152 tokens 4 to 5 nats of entropy.
LOGIT_STD = 3.5
_REPLAYS = itertools.count()


@functools.lru_cache(1 << 16)
def length_of(seed: int) -> int:
    """Tokens of the reply with this seed; remembered, since drawing takes as long as much of the loop's own work."""
    return 8 + int(np.random.default_rng(seed).gamma(2.0, 14.0))


class ScriptedLengths:
    """An engine with scripted lengths of replies, which remembers what it was asked."""

    def __init__(self, engine: VLLMEngine):
        self._engine = engine
        self.asked: list[Request] = []
        self.lengths: dict[int, int] = {}
        self.steps: list[tuple[int, float, bool]] = []
        """Requests in a step, its seconds, and whether it took in prompts or ended replies."""
        self._running, self._new = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        request = dataclasses.replace(request, max_tokens=min(request.max_tokens, length_of(request.seed)))
        self.asked.append(request)
        self._engine.submit(request)
        self._running, self._new = self._running + 1, True

    def poll(self, timeout: float) -> list[Any]:
        begin = time.perf_counter()
        completions = self._engine.poll(timeout)
        self.steps.append((self._running, time.perf_counter() - begin, self._new or bool(completions)))
        self._running, self._new = self._running - len(completions), bool(completions)
        self.lengths.update((c.id, len(c.ids)) for c in completions)
        return completions


class Lockstep(Rollout):
    """The same loop with barriers: the worlds' part of a turn ends before the engine's begins, and the other way."""

    _sampling = False

    def _poll_envs(self):
        if not self._sampling:
            super()._poll_envs()
            self._sampling = not self._stepping

    def _poll_engine(self):
        if self._sampling:
            super()._poll_engine()
            self._sampling = bool(self._asked)

    def _refill(self, slot):
        if self._playing:
            return
        for free in range(min(self.config.slots, len(self._waiting))):
            self._start(free, *self._waiting.popleft())


class UsualWay(Lockstep):
    """Lockstep as trainers write it that generate a batch a turn: every slot of a wave replies until the wave's last
    episode is over, and what episodes that are over would say is thrown away."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._prompts: dict[int, np.ndarray] = {}
        """What each slot of this wave was asked last."""

    def _ask(self, slot):
        super()._ask(slot)
        if slot in self._playing:
            self._prompts[slot] = self._playing[slot].prompt

    def _poll_envs(self):
        sampling = self._sampling
        super()._poll_envs()
        if self._sampling and not sampling and self._playing:
            for slot in self._prompts.keys() - self._playing.keys():
                self._reply_on(slot)

    def _reply_on(self, slot):
        id = next(NUMBERS)
        self._asked[id] = None  # so that the barrier waits for it, and nobody reads it
        config = self.config
        self.engine.submit(Request(id, self._prompts[slot], id, config.max_turn_tokens, config.temperature))

    def _refill(self, slot):
        if not self._playing:
            self._prompts.clear()
        super()._refill(slot)


def make_model(shape: dict, device: str) -> Any:
    """A Llama with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, rope_theta=100000.0, bos_token_id=None, eos_token_id=3)
    with torch.device(device):
        model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(LOGIT_STD / (config.initializer_range * math.sqrt(config.hidden_size)))
    return model


class Setting(Games):
    """Everything that the variants share."""

    def __init__(self, case: Case, device: str, shape: dict, words: list[str]):
        super().__init__(case)
        self.device = device
        self.model = make_model(shape, device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        begin = time.perf_counter()
        self.engine = VLLMEngine(
            self.model,
            self.chat.end_ids,
            max_slots=case.slots,
            max_length=case.max_length,
            dtype=dtype,
            eager="--eager" in words or device == "cpu",
            can_sleep="--sleep" in words,
        )
        import vllm

        ahead = "schedules ahead" if self.engine._core.batch_queue is not None else "does not schedule ahead"
        print(f"vLLM {vllm.__version__} started in {time.perf_counter() - begin:.1f} s and {ahead}", flush=True)

    def opened(self, kind: type[Rollout] = Rollout, staleness: int = 0) -> Rollout:
        """A loop over an engine with scripted lengths and an empty prefix cache; no prompt is remembered."""
        self.engine.load(self.model.named_parameters(), 0)
        self.chat.forget()
        return self.rollout(ScriptedLengths(self.engine), kind, staleness)

    def prefill(self, every: int) -> None:
        """Prompts come in at every n-th step from now on (rollout.vllm_prefill_every)."""
        self.engine._prefill_every = every

    def collect(self, kind: type[Rollout]) -> tuple[Rollout, list[Trajectory], ScriptedLengths]:
        """Plays every episode once."""
        rollout = self.opened(kind)
        trajectories = rollout.collect(self.specs())
        rollout.envs.close()
        _check(trajectories)
        return rollout, trajectories, rollout.engine

    def iterate(self, staleness: int) -> tuple[float, list[float]]:
        """Plays the episodes in iterations of as many as there are slots, with a hand-over of weights after each.

        Returns:
            Seconds, and the share of each iteration's tokens that an earlier version sampled.
        """
        rollout, specs, slots = self.opened(staleness=staleness), self.specs(), self.case.slots
        parts = [specs[at : at + slots] for at in range(0, len(specs), slots)]
        shares, begin = [], time.perf_counter()
        for number, part in enumerate(parts):
            ahead = [spec for later in parts[number + 1 : number + 1 + staleness] for spec in later]
            _check(rollout.collect(part, ahead=ahead))
            shares.append(rollout.stats.stale_tokens / rollout.stats.given_tokens)
            self.engine.load(self.model.named_parameters(), number + 1)
        seconds = time.perf_counter() - begin
        rollout.envs.close()
        return seconds, shares


def _check(trajectories: list[Trajectory]) -> None:
    failed = [t.error for t in trajectories if not t.valid]
    if failed:
        raise RuntimeError(f"{len(failed)} episodes failed, the first with: {failed[0]}")


def replay(engine: VLLMEngine, stream: ScriptedLengths, slots: int) -> float:
    """Seconds that vLLM alone takes for the recorded requests."""
    from vllm import SamplingParams

    chains: dict[int, deque] = defaultdict(deque)
    for number, request in enumerate(stream.asked):
        length = stream.lengths[request.id]
        sampling = SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=length,
            min_tokens=length,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            skip_clone=True,
        )
        name = f"replay-{next(_REPLAYS)}-{number}"
        chains[request.session].append(core_request(name, request.prompt_ids, sampling))
    waiting, running, client = deque(chains.values()), {}, engine._client
    client.reset_prefix_cache()

    def send(chain: deque) -> None:
        request = chain.popleft()
        running[request.request_id] = chain
        client.add_request(request)

    begin = time.perf_counter()
    while waiting and len(running) < slots:
        send(waiting.popleft())
    while running:
        for output in client.get_output().outputs:
            if output.finish_reason is None:
                continue
            chain = running.pop(output.request_id)
            if chain:
                send(chain)
            elif waiting:
                send(waiting.popleft())
    return time.perf_counter() - begin
