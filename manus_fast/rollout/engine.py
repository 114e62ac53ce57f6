"""The contract between whoever wants text sampled and whatever samples it.

Engines are asynchronous: `submit` returns at once, `poll` gives what has finished, in any order. Token ids go in and
token ids come out; only an endpoint whose tokens are not ours to see takes messages and gives text. A completion
depends on its request (prompt, seed, limits) and the weights only, never on what else was in the batch (up to
floating-point noise of batched kernels) or on arrival order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class Request:
    """One reply to sample. `seed` fixes its random numbers; `temperature` 0 means greedy."""

    id: int
    prompt_ids: np.ndarray
    """int32 [P], P >= 1."""
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    session: int | None = None
    """Requests of one episode share a session number: an engine may keep its KV cache between them."""
    messages: list[dict[str, str]] | None = None
    """The prompt as {"role", "content"}, for an engine that takes text; `prompt_ids` is then empty."""


@dataclass
class Completion:
    """What came back for a request. `error` says why when `finish_reason` is "error"."""

    id: int
    ids: np.ndarray
    """int32 [S], the end token included when `finish_reason` is "stop"."""
    log_probs: np.ndarray
    """float32 [S] under the distribution at the request's temperature (at 1.0 for greedy)."""
    finish_reason: str
    version: int
    error: str | None = field(default=None)
    text: str | None = None
    """The reply, from an engine that gives text; `ids` and `log_probs` are then empty."""
    tokens: int | None = None
    """Sampled tokens of such a reply, as the endpoint counted them."""


class Engine(Protocol):
    """See the module's docstring. `version` counts weight updates; `max_length` is the most tokens that a prompt and
    its reply may have together."""

    version: int
    max_length: int

    def submit(self, request: Request) -> None: ...

    def poll(self, timeout: float) -> list[Completion]:
        """Advances or waits up to `timeout` seconds, then returns what has finished (maybe nothing)."""
        ...

    def abort(self, id: int) -> None: ...

    def end_session(self, session: int) -> None:
        """The episode is over: whatever was kept for it can go."""
        ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces the weights, by Hugging Face parameter name, and forgets every cached prefix."""
        ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...


def generate(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Submits all requests and returns their completions in the order of `requests`."""
    for request in requests:
        engine.submit(request)
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        for completion in engine.poll(1.0):
            done[completion.id] = completion
    return [done[request.id] for request in requests]
