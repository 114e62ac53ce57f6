"""`manus-fast serve`: a trained policy behind an OpenAI-compatible endpoint, through vLLM or our own engine."""

from __future__ import annotations

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
    _check_address(host, port)
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
    config = RolloutConfig(engine=engine, slots=slots, max_length=max_length, vllm_eager=eager)
    net, tokenizer = ModelConfig(path=model, device=device).open()
    chat = ChatFormat(tokenizer, end_ids(net))
    precision = torch.bfloat16 if next(net.parameters()).device.type == "cuda" else None
    server = Server(make_engine(config, net, chat.end_ids, precision), chat, name or model)
    del net  # hf keeps the model, vLLM has its own copy
    try:
        uvicorn.run(server.app, host=host, port=port, log_level="info", access_log=False)
    finally:
        server.close()


def _check_address(host: str, port: int) -> None:
    """Whether the server will be able to listen there: asked before the engine, which takes long to start.

    Raises:
        UserError: a name of no address, an address of another machine, a port that is taken or closed to this user.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port: expected an integer in [0, 65535], got {port}")
    try:
        # An empty host would be every address of the machine: that is asked for by 0.0.0.0.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):  # the latter for a name that none can be
        found = []
    if not found:
        raise UserError(f"--host: expected an address of this machine, got {host!r}, which names none")
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise UserError(f"--port: expected a free port of {host}, got {port} ({error.strerror})") from error
                raise UserError(
                    f"--host: expected an address of this machine, got {host!r} ({error.strerror})"
                ) from error
