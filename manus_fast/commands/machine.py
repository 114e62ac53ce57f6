"""`manus-fast info` and `manus-fast doctor`: what is installed, and what is missing."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from manus_fast.commands.flags import ModelPath, Overrides, load_settings
from manus_fast.errors import UserError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def info(
    overrides: Overrides = None,
    config: Annotated[
        str | None, typer.Option("--config", help="Estimate the memory that a run of this config takes instead.")
    ] = None,
    model: ModelPath = None,
    run: Annotated[str, typer.Option("--for", help="ppo or sft: what is run, with --config.")] = "ppo",
    gpus: Annotated[int, typer.Option("--gpus", help="On how many GPUs, with --config.")] = 1,
    gib: Annotated[
        float | None, typer.Option("--memory", help="GiB of one GPU, with --config; default: this machine's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows versions, CUDA, the backends of every op, engines and environments; with --config a run's memory."""
    if config is not None:
        _plan(load_settings(config, config, {"model.path": model}, overrides), run, gpus, gib, as_json)
        return
    if overrides or model:
        raise UserError(f"info: expected --config with {(overrides or ['--model_path'])[0]!r}, got none")
    from manus_fast.info import collect

    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show(facts)


def doctor(
    folder: Annotated[str, typer.Option("--output_dir", help="Where runs would be written.")] = ".",
    as_json: AsJson = False,
) -> None:
    """Looks at the machine and the installation, and says what to do where something is missing."""
    from manus_fast.info import examine

    checks = examine(folder)
    if as_json:
        typer.echo(json.dumps([vars(check) for check in checks], indent=2))
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, show_header=False)
        colours = {"ok": "green", "note": "yellow", "problem": "red"}
        for check in checks:
            table.add_row(f"[{colours[check.state]}]{check.state}[/]", check.name, escape(check.text))
        Console().print(table, soft_wrap=True)
    problems = [check.name for check in checks if check.state == "problem"]
    if problems:
        typer.echo(f"{len(problems)} to mend: {', '.join(problems)}", err=True)
        raise typer.Exit(1)


def _plan(settings: Any, run: str, gpus: int, gib: float | None, as_json: bool) -> None:
    """Prints what a run's parts take, and what to change where they do not fit."""
    from manus_fast.info import memory

    if run not in ("ppo", "sft"):
        raise UserError(f"--for: expected ppo or sft, got {run!r}")
    if gpus < 1 or (gib is not None and gib <= 0):
        raise UserError(f"--gpus, --memory: expected numbers above 0, got {gpus} and {gib}")
    found = memory(settings, gpus, None if gib is None else int(gib * 2**30), run)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    def size(count: int) -> str:
        return f"{count / 2**30:.2f} GiB"

    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in found["parts"].items():
        table.add_row(name.replace("_", " "), size(count))
    table.add_row("[bold]in all[/]", f"[bold]{size(found['total'])}[/]")
    table.add_row("whole logits, avoided", f"[dim]{size(found['logits_avoided'])}[/]")
    console = Console()
    console.print(table, soft_wrap=True)
    whose = "a GPU" if gpus == 1 else f"each of {gpus} GPUs"
    begin = f"{found['parameters']:,} parameters, {found['tokens']:,} tokens a micro-batch, on {whose}"
    if found["fits"]:
        typer.echo(f"{begin}: fits {size(found['capacity'])}")
        return
    typer.echo(f"{begin}: does not fit {size(found['capacity'])}")
    if found["remedies"] is None:
        typer.echo("no change of the config makes it fit: a smaller model, or larger GPUs")
    for remedy in found["remedies"] or ():
        typer.echo(f"  {remedy['change']}   (frees {size(remedy['saves'])})")


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(box=None, show_header=False)
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    for name, version in facts["versions"].items():
        table.add_row(name, f"{version}{commit}" if name == "manus_fast" else version or "[dim]not installed[/]")
    extension, cuda = facts["extension"], facts["cuda"]
    table.add_row("extension", extension["compiler"] if extension["built"] else "[red]not built[/]")
    archs = f"yes, for {', '.join(cuda['archs'])}" if cuda["archs"] else "yes"
    table.add_row("CUDA built", archs if cuda["built"] else "no")
    gpus = f" ({', '.join(cuda['gpus'])})" if cuda["gpus"] else " (no GPU)"
    table.add_row("CUDA usable", ("yes" if cuda["usable"] else "no") + gpus)
    table.add_row("threads", f"torch {facts['threads']['torch']}, extension {facts['threads']['extension']}")
    table.add_row(
        "engines", ", ".join(n if s == "ready" else f"[dim]{n}: {escape(s)}[/]" for n, s in facts["engines"].items())
    )
    table.add_row("environments", ", ".join(facts["environments"]))
    console.print(table, soft_wrap=True)
    ops = Table("op", "auto", "backends", box=None)
    for op, entry in facts["ops"].items():
        states = [n if s == "ready" else f"[dim]{n} ({escape(s)})[/]" for n, s in entry["backends"].items()]
        ops.add_row(op, entry["chosen"], ", ".join(states))
    console.print(ops, soft_wrap=True)
