"""The contract between whoever wants text sampled and whatever samples it.

Engines are asynchronous: `submit` returns at once, `poll` gives what has finished, in any order. Token ids go in and
token ids come out; only an endpoint whose tokens are not ours to see takes messages and gives text. A completion
depends on its request (prompt, seed, limits) and the weights only, never on what else was in the batch (up to
floating-point noise of batched kernels) or on arrival order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

NUMBERS = itertools.count()
"""Ids of requests and sessions for whoever plays: never the same twice in a process, so that what is left of an
interrupted call is never taken for an answer to a later one."""

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
    """float32 [S] under the distribution that each id was drawn from: at the request's temperature (at 1.0 for greedy),
    and, where top_p, top_k or min_p leave tokens out, over those that are kept."""
    finish_reason: str
    version: int
    """Policy version of the first id."""
    error: str | None = None
    text: str | None = None
    """The reply, from an engine that gives text; `ids` and `log_probs` are then empty."""
    tokens: int | None = None
    """Sampled tokens of such a reply, as the endpoint counted them."""
    versions: np.ndarray | None = None
    """int32 [S]: the policy version of each id, where new weights came while it was sampled; None: all of `version`."""
    too_long: bool = False
    """Of an error: the prompt leaves no room for a reply."""


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
        """Replaces the weights, by Hugging Face parameter name, and forgets every cached prefix. Requests that are
        running go on with the new weights."""
        ...

    def forget(self) -> None:
        """Forgets cached prefixes of requests that are over. A reply does not depend on them, but the rounding of its
        log-probabilities does, since a prompt is then computed in other pieces."""
        ...

    def sleep(self, level: int) -> None:
        """Gives memory back: level 1 the cache, level 2 the weights too: `wake`, then `load`, before more work."""
        ...

    def wake(self) -> None: ...


def check_request(request: Request, vocab: int) -> None:
    """Raises ValueError for an empty prompt, an id outside the vocabulary, or a limit out of range."""
    prompt = request.prompt_ids
    if len(prompt) == 0:
        raise ValueError("prompt_ids: expected at least one token, got none")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab:
        raise ValueError(f"prompt_ids: expected ids in [0, {vocab}), got {int(prompt.min())} … {int(prompt.max())}")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens: expected an integer >= 1, got {request.max_tokens}")
    if not request.temperature >= 0:
        raise ValueError(f"temperature: expected a number >= 0, got {request.temperature}")
    if not 0 < request.top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {request.top_p}")
    if request.top_k < 0:
        raise ValueError(f"top_k: expected an integer >= 0, got {request.top_k}")
    if not 0 <= request.min_p < 1:
        raise ValueError(f"min_p: expected a number in [0, 1), got {request.min_p}")


def empty_completion(id: int, reason: str, version: int, error: str | None = None) -> Completion:
    """A completion without a token."""
    return Completion(id, np.zeros(0, np.int32), np.zeros(0, np.float32), reason, version, error)


def generate(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Submits all requests and returns their completions in the order of `requests`."""
    for request in requests:
        engine.submit(request)
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        for completion in engine.poll(1.0):
            done[completion.id] = completion
    return [done[request.id] for request in requests]
