"""`manus-fast serve`: a trained policy behind an OpenAI-compatible endpoint, through vLLM or our own engine."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Annotated

import typer

from manus_fast.commands import common
from manus_fast.errors import UserError


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, hub name, or smollm2.")],
    engine: Annotated[str, typer.Option("--engine", help="hf, vllm, or auto: vllm on a GPU.")] = "auto",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="What clients call it; default: MODEL as given.")] = None,
    slots: Annotated[int, typer.Option("--slots", help="Requests that are sampled at the same time.")] = 64,
    max_length: Annotated[int, typer.Option("--max_length", help="Tokens of prompt and reply together.")] = 4096,
    device: Annotated[str, typer.Option("--device", help="As torch names it; auto: the GPU.")] = "auto",
    eager: Annotated[bool, typer.Option("--vllm_eager", help="vLLM without CUDA graphs: starts in seconds.")] = False,
) -> None:
    """Serves a model over HTTP until it is interrupted."""
    if engine not in ("auto", "hf", "vllm"):
        raise UserError(f"--engine: expected auto, hf or vllm, got {engine!r}")
    if not 0 <= port <= 65535:
        raise UserError(f"--port: expected an integer in [0, 65535], got {port}")
    from manus_fast.modeling.load import find_model

    find_model(model)
    try:
        import uvicorn

        from manus_fast.serving.app import Server
    except ImportError as error:
        raise UserError(
            f"serve: expected the package {error.name} (pip install manus-fast[serve]), got none"
        ) from error
    import torch

    from manus_fast.agent.context import ChatFormat
    from manus_fast.modeling.load import end_ids
    from manus_fast.rollout.engines import make_engine
    from manus_fast.rollout.scheduler import RolloutConfig
    from manus_fast.run_config import ModelConfig

    common.prepare()
    listener = _bind(host, port)
    config = RolloutConfig(engine=engine, slots=slots, max_length=max_length, vllm_eager=eager)
    net, tokenizer = ModelConfig(path=model, device=device).open()
    chat = ChatFormat(tokenizer, end_ids(net))
    precision = torch.bfloat16 if next(net.parameters()).device.type == "cuda" else None
    server = Server(make_engine(config, net, chat.end_ids, precision), chat, name or model)
    del net  # hf keeps the model, vLLM has its own copy
    settings = uvicorn.Config(server.app, host=host, port=port, log_level="info", access_log=False)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # its signals, which it raises again once all is closed
            uvicorn.Server(settings).run(sockets=[listener])
    finally:
        server.close()
        listener.close()


def _bind(host: str, port: int) -> socket.socket:
    """A socket of that address, which nobody can connect to before the server listens. Now, since the engine takes
    long to start."""
    if not host:
        raise UserError("--host: expected an address of this machine, got none")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter of a name that no DNS can hold
        raise UserError(f"--host: expected an address of this machine, got {host!r} (it names none)") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # whose last server has just ended, it is free
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise UserError(f"--port: expected a free port of {host}, got {port} ({error.strerror})") from error
        raise UserError(f"--host: expected an address of this machine, got {host!r} ({error.strerror})") from error
    return listener
