"""An OpenAI-compatible endpoint as an engine: messages go in, text comes out, and nothing about it can be trusted.

Requests run side by side in a thread of their own. One that fails is sent again after a pause; one that fails for good
completes with the reason "error", so that its episode is masked and counted, never rewarded with zero. What would only
fail again in every episode (a wrong key, no such model, no money left) ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from manus_fast.errors import UserError
from manus_fast.rollout.endpoint import EndpointConfig, Teacher, strip_reasoning
from manus_fast.rollout.engine import Completion, Request
from manus_fast.rollout.journal import Journal, key_of
from manus_fast.rollout.limits import Budget, Pace
from manus_fast.rollout.seeds import derive

_LONGEST_PAUSE = 60.0
_LONGEST_RETRY_AFTER = 600.0
_MESSAGE_TOKENS = 16  # of role and separators: above what any published chat format takes
_NO_IDS, _NO_LOG_PROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class BudgetReached(UserError):
    """The next request could cost more than the limit leaves. Everything answered so far is on disk."""


class EndpointRefused(UserError):
    """The endpoint refuses every request: a wrong key, no such model, no money."""


@dataclass(eq=False)
class _Fault(Exception):
    """One try that failed. `kind` is one word, for counting."""

    kind: str
    text: str
    again: bool = True
    """Worth another try."""
    billed: bool = False
    """The endpoint may have done the work."""
    after: float = 0.0
    """Seconds that it asked to be left alone."""


@dataclass
class _Reply:
    text: str
    finish_reason: str
    prompt_tokens: int
    """As the endpoint counted; where it doesn't say, this and the next are upper bounds."""
    sampled_tokens: int


class OpenAIEngine:
    """See the module's docstring, and rollout/engine.py for the contract.

    Args:
        teacher: what is asked; `find_teacher` makes it.
        config: limits and faults.
        journal: replies that are paid for already, and where new ones go.

    Raises:
        ValueError: the package openai is missing, or there is no key.
    """

    version = 0
    max_length = 1 << 30  # the endpoint alone knows, and says so of a prompt that is too long for it

    def __init__(self, teacher: Teacher, config: EndpointConfig, journal: Journal | None = None):
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "rollout.engine: expected the package openai (pip install manus-fast[openai]), got none"
            ) from error
        self.teacher, self.config = teacher, config
        self.journal = Journal() if journal is None else journal
        self.budget = Budget(config.max_cost, teacher.price_input, teacher.price_output, self.journal.cost)
        self.counts: Counter[str] = Counter()
        """requests, replies, recalled (from the journal), retries, and faults by kind."""
        self.prompt_tokens = self.sampled_tokens = 0
        self._openai = openai
        try:
            self._client = openai.AsyncOpenAI(
                api_key=teacher.api_key, base_url=teacher.base_url, max_retries=0, timeout=config.timeout
            )
        except openai.OpenAIError as error:
            raise ValueError(f"endpoint: expected a key for {teacher.name}, got none ({error})") from error
        self._requests = Pace(config.requests_per_minute)
        self._tokens = Pace(config.tokens_per_minute)
        self._quiet_until = 0.0
        self._flying = 0
        self._stop: UserError | None = None
        self._done: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.concurrency)
        self._landed = asyncio.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-engine", daemon=True)
        self._thread.start()

    # The contract

    def submit(self, request: Request) -> None:
        """Sends a request, or recalls the reply that the journal holds for it.

        Raises:
            ValueError: a request without messages.
        """
        if request.messages is None:
            raise ValueError("messages: expected a prompt as messages (MessageContext), got token ids only")
        known = self.journal.find(self._key(request))
        if known is not None:
            self.counts["recalled"] += 1
            self._done.put(self._completion(request, known))
            return
        self._loop.call_soon_threadsafe(self._launch, request)

    def poll(self, timeout: float) -> list[Completion]:
        """Replies that are there; waits up to `timeout` seconds for the first.

        Raises:
            BudgetReached: the cost limit ends the run.
            EndpointRefused: the endpoint will refuse whatever is sent.
        """
        arrived: list[Completion | BaseException] = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._done.get(timeout=timeout) if timeout > 0 else self._done.get_nowait())
            while True:
                arrived.append(self._done.get_nowait())
        for item in arrived:
            if isinstance(item, BaseException):
                raise item
        return arrived

    def abort(self, id: int) -> None:
        """Gives a request up. A reply that is under way is lost, and counted at what it can have cost."""
        self._loop.call_soon_threadsafe(self._cancel, id)

    def end_session(self, session: int) -> None:
        """Nothing is kept for an episode."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        raise ValueError(f"engine: expected one whose weights are ours, got the endpoint of {self.teacher.name}")

    def forget(self) -> None:
        """What the endpoint caches is its own."""

    def sleep(self, level: int) -> None:
        """There is no memory to give back."""

    def wake(self) -> None: ...

    def close(self) -> None:
        """Ends what is under way, then the thread. Idempotent."""
        if not self._loop.is_running():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.journal.close()

    def metrics(self) -> dict[str, float]:
        """Named figures: counts, tokens, dollars."""
        figures = {f"endpoint/{name}": float(count) for name, count in sorted(self.counts.items())}
        tokens = {"endpoint/prompt_tokens": self.prompt_tokens, "endpoint/sampled_tokens": self.sampled_tokens}
        return {**figures, **tokens, "endpoint/cost": self.budget.spent}

    # In the thread

    def _launch(self, request: Request) -> None:
        if self._stop is not None:
            self._done.put(self._stop)
            return
        self._tasks[request.id] = self._loop.create_task(self._serve(request))

    def _cancel(self, id: int) -> None:
        task = self._tasks.pop(id, None)
        if task is not None:
            task.cancel()

    async def _shut(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _serve(self, request: Request) -> None:
        try:
            async with self._slots:
                record = await self._ask(request)
            self._done.put(self._completion(request, record))
        except asyncio.CancelledError:
            self._done.put(_failed(request, "abort", "the request was aborted"))
            raise
        except _Fault as fault:
            self._done.put(_failed(request, "error", fault.text, fault.kind == "too_long"))
        except BaseException as error:  # a stop, or a mistake of ours: the thread must not swallow it
            self._done.put(error)
        finally:
            self._tasks.pop(request.id, None)

    async def _ask(self, request: Request) -> dict[str, Any]:
        """The journal's record of the reply. Raises _Fault after the last try."""
        for attempt in range(self.config.retries + 1):
            bound = await self._admit(request)
            try:
                reply = await self._try(request)
            except BaseException as error:
                billed = not isinstance(error, _Fault) or error.billed
                await self._land(bound, bound if billed else 0.0)
                if not isinstance(error, _Fault):
                    raise
                self.counts[error.kind] += 1
                if not error.again or attempt == self.config.retries:
                    raise
                self.counts["retries"] += 1
                await self._pause(request, attempt, error)
                continue
            cost = self.budget.cost(reply.prompt_tokens, reply.sampled_tokens)
            record = {
                "key": self._key(request),
                "text": reply.text,
                "finish_reason": reply.finish_reason,
                "prompt_tokens": reply.prompt_tokens,
                "sampled_tokens": reply.sampled_tokens,
                "cost": cost,
            }
            self.journal.add(record)
            await self._land(bound, cost, recorded=True)
            self.counts["replies"] += 1
            self.prompt_tokens += reply.prompt_tokens
            self.sampled_tokens += reply.sampled_tokens
            return record
        raise AssertionError("unreachable: the last try returns or raises")

    async def _admit(self, request: Request) -> float:
        """Waits until the limits let the request through, and returns the dollars that were reserved for it."""
        prompt, loop = _prompt_bound(request), self._loop
        bound = self.budget.cost(prompt, request.max_tokens)
        async with self._landed:
            while not self.budget.admits(bound):
                if self._flying == 0:
                    spent, limit = self.budget.spent, self.config.max_cost
                    self._stop = BudgetReached(
                        f"endpoint.max_cost: ${spent:.4f} of ${limit:g} are spent and the next request may cost "
                        f"${bound:.4f}; a higher limit goes on from here"
                    )
                if self._stop is not None:
                    self._landed.notify_all()
                    raise self._stop
                await self._landed.wait()
            self.budget.reserve(bound)
            self._flying += 1
        try:
            # Bytes bound the prompt's tokens from above; for the pace a usual length will do.
            amount = prompt // 4 + request.max_tokens
            while True:
                now = loop.time()
                wait = max(self._quiet_until - now, self._requests.wait(1, now), self._tokens.wait(amount, now))
                if wait <= 0:
                    break
                await asyncio.sleep(wait)
            self._requests.note(1, now)
            self._tokens.note(amount, now)
        except BaseException:
            await self._land(bound, 0.0)
            raise
        return bound

    async def _land(self, bound: float, cost: float, recorded: bool = False) -> None:
        self.budget.settle(bound, cost)
        self._flying -= 1
        if cost and not recorded:
            self.journal.add({"lost": True, "cost": cost})
        async with self._landed:
            self._landed.notify_all()

    async def _try(self, request: Request) -> _Reply:
        """One request. Raises _Fault, or what ends the run."""
        self.counts["requests"] += 1
        openai = self._openai
        try:
            # The package's own timeout is for each read: an answer that drips in would never end.
            raw = await asyncio.wait_for(
                self._client.chat.completions.with_raw_response.create(**self._parameters(request)),
                self.config.timeout,
            )
            content = raw.content
        except (TimeoutError, asyncio.TimeoutError, openai.APITimeoutError) as error:
            raise _Fault("timeout", f"no answer within {self.config.timeout:g} s", billed=True) from error
        except openai.APIStatusError as error:
            raise self._status(error) from error
        except openai.APIConnectionError as error:
            cause = error.__cause__
            unsent = type(cause).__name__.startswith("Connect")  # ConnectError, ConnectTimeout: nobody has heard it
            text = f"the connection failed ({cause or error})" if unsent else f"the answer broke off ({cause or error})"
            raise _Fault("connection", text, billed=not unsent) from error
        return self._read(request, content)

    def _parameters(self, request: Request) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "model": self.teacher.model,
            "messages": request.messages,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
        }
        if request.top_p < 1:
            parameters["top_p"] = request.top_p
        # Not of OpenAI's own API, but of the servers that people run themselves.
        more = {"top_k": request.top_k, "min_p": request.min_p}
        if any(more.values()):
            parameters["extra_body"] = {name: value for name, value in more.items() if value}
        if self.teacher.seeds:
            parameters["seed"] = request.seed
        return parameters

    def _key(self, request: Request) -> str:
        return key_of({**self._parameters(request), "seed": request.seed})

    def _read(self, request: Request, content: bytes) -> _Reply:
        """The reply in an answer's body; whatever is not as the API describes it is garbage."""
        try:
            body = json.loads(content)
        except ValueError as error:
            raise _Fault("garbage", "the answer is not JSON", billed=True) from error
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list) or not choices:
            raise _Fault("garbage", "the answer holds no choices", billed=True)
        message = choices[0].get("message") if isinstance(choices[0], dict) else None
        if not isinstance(message, dict):
            raise _Fault("garbage", "the answer holds no message", billed=True)
        text, reason = message.get("content"), choices[0].get("finish_reason")
        if reason == "content_filter":
            raise _Fault("filtered", "the endpoint's filter withheld the reply", again=False, billed=True)
        if text is None and reason == "length":
            text = ""  # all of its tokens went into reasoning
        if not isinstance(text, str):
            raise _Fault("garbage", "the answer's message holds no text", billed=True)
        usage = body.get("usage")
        counted = [usage.get(n) for n in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
        told = len(counted) == 2 and all(isinstance(n, int) and n >= 0 for n in counted)
        prompt, sampled = counted if told else (_prompt_bound(request), request.max_tokens)
        return _Reply(text, "length" if reason == "length" else "stop", prompt, sampled)

    def _status(self, error: Any) -> Exception:
        """What an HTTP status means: a pause, a refused request, or the end of the run."""
        code, status = getattr(error, "code", None), error.status_code
        text = f"status {status}: {' '.join(str(error.message).split())[:300]}"
        if status in (401, 402, 403, 404) or code == "insufficient_quota":
            self._stop = EndpointRefused(f"endpoint: {self.teacher.name} answers with {text}")
            return self._stop
        if status == 429:
            return _Fault("rate_limited", text, after=_retry_after(error.response.headers))
        if status in (400, 413, 422) and (code == "context_length_exceeded" or "context length" in text.lower()):
            return _Fault("too_long", text, again=False)
        if status in (408, 409) or status >= 500:
            return _Fault("server_error", text, after=_retry_after(error.response.headers))
        return _Fault("refused", text, again=False)

    async def _pause(self, request: Request, attempt: int, fault: _Fault) -> None:
        """Waits before the next try, each request its own time so that they don't come back all at once."""
        longest = min(_LONGEST_PAUSE, self.config.backoff * 2**attempt)
        wait = longest * (0.5 + 0.5 * derive(request.seed, request.id, attempt) / 2**63)
        if fault.kind == "rate_limited":
            # The limit is the account's: nobody else need try either.
            self._quiet_until = max(self._quiet_until, self._loop.time() + fault.after)
        await asyncio.sleep(max(wait, fault.after))

    def _completion(self, request: Request, record: dict[str, Any]) -> Completion:
        text = strip_reasoning(record["text"]) if self.teacher.reasoning else record["text"]
        return Completion(
            request.id, _NO_IDS, _NO_LOG_PROBS, record["finish_reason"], self.version, None, text,
            record["sampled_tokens"],
        )  # fmt: skip


def _failed(request: Request, reason: str, error: str, too_long: bool = False) -> Completion:
    return Completion(request.id, _NO_IDS, _NO_LOG_PROBS, reason, 0, error, "", 0, too_long=too_long)


def _prompt_bound(request: Request) -> int:
    """No token is shorter than a byte."""
    return sum(len(m["content"].encode()) + _MESSAGE_TOKENS for m in request.messages or ())


def _retry_after(headers: Any) -> float:
    """Seconds that the headers ask for, as a number or a date; 0 where they ask for none."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        else:
            text = headers.get("retry-after", "0")
            seconds = float(text) if not text[:1].isalpha() else _until(text)
    except (ValueError, TypeError):
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)


def _until(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
