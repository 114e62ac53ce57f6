"""The HTTP side: /v1/models, /v1/chat/completions and /v1/completions as the OpenAI API has them.

Not served: tools, log-probabilities, several choices (`n`), images. Asking for one is an error, never ignored.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request as Call
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from manus_fast.agent.context import ChatFormat
from manus_fast.rollout.engine import Request
from manus_fast.rollout.seeds import derive
from manus_fast.serving.driver import Driver
from manus_fast.serving.prompts import Prompts, plain_messages

_REFUSED = ("tools", "functions", "logprobs", "top_logprobs", "audio", "best_of", "echo", "suffix", "logit_bias")


class _ApiError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Server:
    """The application of one engine. `app` is the ASGI application; call `close` at the end.

    Args:
        engine: an HFEngine or VLLMEngine.
        chat: the model's chat format.
        name: what clients call the model; other names are answered 404.
    """

    def __init__(self, engine: Any, chat: ChatFormat, name: str):
        self.driver, self.chat, self.name = Driver(engine), chat, name
        self.max_length = engine.max_length
        self._vocab = len(chat.tokenizer)
        self._prompts = Prompts(chat)
        self._ids = itertools.count()
        self._started = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ],
            exception_handlers={_ApiError: self._error, 404: self._missing, 405: self._missing},
        )

    def close(self) -> None:
        self.driver.close()

    async def _health(self, call: Call) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, call: Call) -> Response:
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "manus_fast"}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": self.max_length}]})

    async def _error(self, call: Call, error: Exception) -> Response:
        assert isinstance(error, _ApiError)
        return JSONResponse(error.body(), error.status)

    async def _missing(self, call: Call, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return JSONResponse(_ApiError(status, f"no such route: {call.method} {call.url.path}").body(), status)

    async def _chat_completions(self, call: Call) -> Response:
        body = await self._body(call)
        try:
            prompt = self._prompts.render(plain_messages(body.get("messages")))
        except ValueError as error:
            raise _ApiError(400, str(error)) from error
        return await self._answer(body, prompt, chat=True)

    async def _completions(self, call: Call) -> Response:
        body = await self._body(call)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = self.chat.tokenizer.encode(prompt, add_special_tokens=False)
        elif isinstance(prompt, list) and all(type(i) is int and 0 <= i < self._vocab for i in prompt):
            ids = prompt
        else:
            raise _ApiError(400, "prompt: expected one text, or token ids of this model")
        if not ids:
            raise _ApiError(400, "prompt: expected at least one token, got none")
        return await self._answer(body, np.asarray(ids, np.int32), chat=False)

    async def _body(self, call: Call) -> dict[str, Any]:
        try:
            body = json.loads(await call.body())
        except ValueError as error:
            raise _ApiError(400, "the body is not JSON") from error
        if not isinstance(body, dict):
            raise _ApiError(400, "the body is not a JSON object")
        if body.get("model") != self.name:
            raise _ApiError(404, f"model: expected {self.name}, got {body.get('model')!r}", "model_not_found")
        for name in _REFUSED:
            if body.get(name):
                raise _ApiError(400, f"{name}: not served here")
        if body.get("n", 1) not in (1, None):
            raise _ApiError(400, f"n: expected 1, got {body['n']!r}")
        return body

    async def _answer(self, body: dict[str, Any], prompt: np.ndarray, chat: bool) -> Response:
        room = self.max_length - len(prompt)
        if room < 1:
            text = f"prompt: expected fewer than {self.max_length} tokens, got {len(prompt)}"
            raise _ApiError(400, text, "context_length_exceeded")
        number = next(self._ids)
        limit = _number(body, "max_completion_tokens", None, 1) or _number(body, "max_tokens", None, 1)
        limit = limit or (room if chat else 16)
        seed = _number(body, "seed", None, None)
        request = Request(
            id=number,
            prompt_ids=prompt,
            seed=derive(self._started, number) if seed is None else int(seed) & (2**63 - 1),
            max_tokens=min(int(limit), room),
            temperature=float(_number(body, "temperature", 1.0, 0)),
            top_p=float(_number(body, "top_p", 1.0, 0)),
            top_k=min(int(_number(body, "top_k", 0, 0)), self._vocab),
            min_p=float(_number(body, "min_p", 0.0, 0)),
        )
        if not 0 < request.top_p <= 1 or not request.min_p < 1:
            raise _ApiError(400, "top_p, min_p: expected numbers in (0, 1] and [0, 1)")
        stops = _stops(body.get("stop"))
        shape = _Shape(self.name, number, chat, len(prompt))
        pieces = self._pieces(request, stops, bool(body.get("stream")))
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(shape.stream(pieces, usage), media_type="text/event-stream")
        async for text, reason, count in pieces:
            if reason is not None:
                return JSONResponse(shape.whole(text, reason, count))
        raise AssertionError("unreachable: the last piece has a reason")

    async def _pieces(
        self, request: Request, stops: list[str], stream: bool
    ) -> AsyncIterator[tuple[str, str | None, int]]:
        """(text so far, finish reason or None, sampled tokens). Only what no later token changes is told early."""
        job = self.driver.submit(request, watched=stream or bool(stops))
        held = max(map(len, stops), default=1) - 1
        completion = None
        try:
            while completion is None:
                ids, completion = await job.get()
                text = self.chat.decode(ids)
                found = min((at for at in map(text.find, stops) if at >= 0), default=-1)
                if found >= 0:
                    yield text[:found], "stop", len(ids)
                    return
                if completion is None:
                    sure = text.rstrip("\ufffd")
                    yield sure[: len(sure) - held] if held else sure, None, len(ids)
            if completion.finish_reason not in ("stop", "length"):
                raise _ApiError(500, completion.error or "the request was aborted")
            self._prompts.remember(request.prompt_ids, text, ids)
            yield text, completion.finish_reason, len(ids)
        finally:
            if completion is None:
                self.driver.drop(job)


class _Shape:
    """Bodies and chunks of one answer."""

    def __init__(self, model: str, number: int, chat: bool, prompt_tokens: int):
        self._chat, self._prompt_tokens = chat, prompt_tokens
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{number}", "created": int(time.time()), "model": model}

    def _usage(self, count: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def whole(self, text: str, reason: str, count: int) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": kind, "choices": [choice], "usage": self._usage(count)}

    async def stream(self, pieces: AsyncIterator[tuple[str, str | None, int]], usage: bool) -> AsyncIterator[str]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps({**self._head, 'object': kind, 'choices': choices, **more})}\n\n"

        def chunk(said: dict[str, str] | str, reason: str | None = None) -> str:
            return event([{"index": 0, "delta" if self._chat else "text": said, "finish_reason": reason}])

        if self._chat:
            yield chunk({"role": "assistant", "content": ""})
        told = 0
        try:
            async for text, reason, count in pieces:
                new, told = text[told:], max(told, len(text))
                if new:
                    yield chunk({"content": new} if self._chat else new)
                if reason is not None:
                    yield chunk({} if self._chat else "", reason)
                    if usage:
                        yield event([], usage=self._usage(count))
        except _ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        yield "data: [DONE]\n\n"


def _number(body: dict[str, Any], name: str, default: Any, least: float | None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    whole = name not in ("temperature", "top_p", "min_p")
    kinds = int if whole else (int, float)
    known = isinstance(value, kinds) and not isinstance(value, bool) and (whole or abs(value) <= sys.float_info.max)
    if not known or (least is not None and value < least):
        raise _ApiError(400, f"{name}: expected {'an integer' if whole else 'a number'} >= {least}, got {value!r}")
    return value


def _stops(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _ApiError(400, "stop: expected text or a list of texts")
    return stops
