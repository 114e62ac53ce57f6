"""`manus-fast serve`: a trained policy behind an OpenAI-compatible endpoint, through vLLM or our own engine."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

import typer

from manus_fast.commands import common
from manus_fast.errors import UserError


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, hub name, or smollm2.")],
    engine: Annotated[str, typer.Option("--engine", help="hf, vllm, or auto: vllm where it is installed.")] = "auto",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="What clients call it; default: MODEL as given.")] = None,
    slots: Annotated[int, typer.Option("--slots", help="Requests that are sampled at the same time (hf).")] = 64,
    max_length: Annotated[int, typer.Option("--max_length", help="Tokens of prompt and reply together.")] = 4096,
    device: Annotated[str, typer.Option("--device", help="As torch names it (hf); auto: the GPU.")] = "auto",
) -> None:
    """Serves a model over HTTP until it is interrupted."""
    if engine not in ("auto", "hf", "vllm"):
        raise UserError(f"--engine: expected auto, hf or vllm, got {engine!r}")
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise UserError("--engine: expected the package vllm (pip install manus-fast[vllm]), got none")
    from manus_fast.modeling.load import check_model_path

    path = check_model_path(model)
    if engine == "vllm" or (engine == "auto" and installed):
        words = vllm_command(path, name or model, host, port, max_length)
        os.execv(words[0], words)
    try:
        import uvicorn

        from manus_fast.serving.app import Server
    except ImportError as error:
        raise UserError(
            f"serve: expected the package {error.name} (pip install manus-fast[serve]), got none"
        ) from error
    from manus_fast.agent.context import ChatFormat
    from manus_fast.modeling.load import end_ids
    from manus_fast.rollout.engines import make_engine
    from manus_fast.rollout.scheduler import RolloutConfig
    from manus_fast.run_config import ModelConfig

    common.prepare()
    net, tokenizer = ModelConfig(path=model, device=device).open()
    chat = ChatFormat(tokenizer, end_ids(net))
    server = Server(
        make_engine(RolloutConfig(slots=slots, max_length=max_length), net, chat.end_ids), chat, name or model
    )
    try:
        uvicorn.run(server.app, host=host, port=port, log_level="info", access_log=False)
    finally:
        server.close()


def vllm_command(path: str, name: str, host: str, port: int, max_length: int) -> list[str]:
    """The command line of vLLM's own server for the same model, name and limits."""
    return [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path, "--served-model-name", name,
        "--host", host, "--port", str(port), "--max-model-len", str(max_length),
    ]  # fmt: skip
