"""`manus-fast eval`, `compare`, `bench` and `demo`: figures of models and of ops."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manus_fast.commands import common
from manus_fast.commands.train import ConfigFile, ModelPath, Overrides
from manus_fast.errors import UserError

if TYPE_CHECKING:
    from manus_fast.evaluate import Comparison, Report


def evaluate(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="A registered environment, such as household.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: ModelPath = None,
    baseline: Annotated[str | None, typer.Option("--baseline", help="A second model for the same panel.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Default: the environment's last split.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Tasks, spread over the split; default: all.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 plays greedily.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the worlds and the sampling.")] = 0,
    output_dir: Annotated[str, typer.Option("--output_dir", help="Where eval.json goes.")] = "runs/eval",
) -> None:
    """Plays a fixed panel of tasks, each once, and reports success; with --baseline, compares two models on it."""
    from manus_fast.config import load_config
    from manus_fast.evaluate import compare, evaluate, make_panel
    from manus_fast.modeling.load import check_model_path, load_model
    from manus_fast.player import Player, make_environment
    from manus_fast.tracking import prepare_folder
    from manus_fast.trainer import Config

    if temperature < 0:
        raise UserError(f"--temperature: expected a number >= 0, got {temperature}")
    flags = {"environment.name": suite, "model.path": model}
    file = common.find_config(config, "ppo_household") if config else _config_beside(model)
    settings = load_config(Config, file, common.overrides(flags, overrides or ()))
    paths = [settings.model.path] + ([baseline] if baseline else [])
    for path in paths:
        check_model_path(path)
    environment = make_environment(settings)
    panel = make_panel(environment, split or environment.splits[-1], limit)
    folder = prepare_folder(output_dir)
    common.prepare()
    reports: list[Report] = []
    for path in paths:
        net, tokenizer = load_model(path, settings.model.dtype, settings.model.device)
        player = Player(settings, net, tokenizer, environment)
        report = evaluate(panel, lambda tasks, player=player: player.play(tasks, temperature, seed), str(path))
        report.settings = {"temperature": temperature, "seed": seed, "limit": limit}
        report.save(folder / ("eval.json" if len(reports) == 0 else "eval_baseline.json"))
        _show_report(report)
        reports.append(report)
    if len(reports) == 2:
        _show_comparison(compare(reports[1], reports[0]))
    typer.echo(f"written to {folder}")


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="eval.json (or its folder) of the baseline.")],
    b: Annotated[str, typer.Argument(metavar="B", help="eval.json (or its folder) of the model in question.")],
) -> None:
    """Compares two evaluations of one panel, task by task."""
    from manus_fast.evaluate import Report, compare

    files = [Path(name) / "eval.json" if Path(name).is_dir() else Path(name) for name in (a, b)]
    _show_comparison(compare(*(Report.load(file) for file in files)))


def bench(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Benchmark to run; without one, lists them.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to it.")] = None,
) -> None:
    """Measures an op beside its peers on this machine."""
    names = sorted(path.stem.removeprefix("bench_") for path in common.shipped("benchmarks").glob("bench_*.py"))
    if op is None:
        typer.echo("\n".join(names) or "no benchmarks are shipped here")
        return
    if op not in names:
        raise UserError(f"bench: expected one of {', '.join(names)}, got {op!r}")
    common.benchmarks(f"bench_{op}").main(arguments or [])


def demo(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to the demo.")] = None,
) -> None:
    """Makes a small policy, trains it by SFT and PPO, evaluates before and after, and prints the table."""
    common.prepare()
    common.benchmarks("demo").main(arguments or [])


def _config_beside(model: str | None) -> Path | None:
    """The resolved config of the run that a model came from, so that it plays in the form that it was trained in."""
    if model is None:
        return None
    import json

    for folder in (Path(model), *list(Path(model).resolve().parents)[:3]):
        file = folder / "config.json"
        if file.is_file() and "environment" in json.loads(file.read_text()):
            return file
    return None


def _percent(rate: Any) -> str:
    return f"{100 * rate.rate:.1f} % ({rate.k}/{rate.n}, 95 % {100 * rate.low:.1f} to {100 * rate.high:.1f})"


def _show_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = report.summary
    table = Table(box=None, show_header=False, title=f"{report.model} on {report.suite}/{report.split}")
    table.add_row("success", _percent(summary.success))
    for kind, rate in summary.per_type.items():
        table.add_row(f"  {kind}", _percent(rate))
    table.add_row("steps", f"{summary.mean_steps:.1f} (solved tasks {summary.mean_steps_success:.1f})")
    table.add_row("valid actions", f"{100 * summary.valid_action_rate:.1f} %")
    table.add_row("format", f"{100 * summary.format_rate:.1f} %")
    table.add_row("cut by the step limit", f"{100 * summary.truncated_rate:.1f} %")
    table.add_row("sampled tokens", f"{summary.tokens:,} ({summary.mean_tokens:.0f} an episode)")
    if summary.failed:
        table.add_row("failed, left out", str(summary.failed))
    Console().print(table, soft_wrap=True)


def _show_comparison(result: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, title=f"{result.b} against {result.a}")
    table.add_row("tasks", f"{result.tasks}" + (f" ({result.left_out} left out)" if result.left_out else ""))
    table.add_row("success", f"{100 * result.rate_b:.1f} % against {100 * result.rate_a:.1f} %")
    points = [f"{100 * value:+.1f}" for value in (result.difference, result.low, result.high)]
    table.add_row("difference", f"{points[0]} points (95 % {points[1]} to {points[2]})")
    table.add_row(
        "solved by both, one, the other, none",
        f"{result.both}, {result.only_b}, {result.only_a}, {result.neither} (McNemar p = {result.p_value:.3g})",
    )
    for kind, (tasks, rate_a, rate_b) in result.per_type.items():
        table.add_row(f"  {kind}", f"{100 * rate_b:.1f} % against {100 * rate_a:.1f} % of {tasks}")
    Console().print(table, soft_wrap=True)
