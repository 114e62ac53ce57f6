"""`manus-fast info` and `manus-fast doctor`: what is installed, and what is missing."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def info(as_json: AsJson = False) -> None:
    """Shows versions, CUDA, the backends of every op, engines and environments."""
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
