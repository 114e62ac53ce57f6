"""`manus-fast eval`, `compare`, `bench` and `demo`: figures of models and of ops."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manus_fast.commands import common, show
from manus_fast.commands.flags import ConfigFile, ModelPath, Overrides
from manus_fast.errors import UserError
from manus_fast.paths import check_path

if TYPE_CHECKING:
    from manus_fast.evaluate import Report
    from manus_fast.run_config import Config


def evaluate(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="A registered environment, such as household.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: ModelPath = None,
    baseline: Annotated[str | None, typer.Option("--baseline", help="A second model for the same panel.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Default: the environment's last split.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Tasks, spread over the split; default: all.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="rollout.engine; openai: an endpoint plays.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 plays greedily; default: 0, or the teacher's own.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the worlds and the sampling.")] = 0,
    output_dir: Annotated[str, typer.Option("--output_dir", help="Where eval.json goes.")] = "runs/eval",
) -> None:
    """Plays a fixed panel of tasks, each once, and reports success; with --baseline, compares two models on it."""
    from manus_fast.evaluate import compare, evaluate, make_panel
    from manus_fast.modeling.load import check_model_path
    from manus_fast.player import Player, make_environment
    from manus_fast.run_config import Config
    from manus_fast.run_folder import prepare_folder

    if temperature is not None and temperature < 0:
        raise UserError(f"--temperature: expected a number >= 0, got {temperature}")
    file = common.find_config(config, "") if config else common.config_beside(model)
    flags = {"environment.name": suite, "model.path": model, "rollout.engine": engine}
    settings = Config.load(file, common.overrides(flags, overrides or ()))
    given = _given(overrides or ())
    split = settings.evaluation.split if "split" in given else split
    limit = settings.evaluation.tasks if "tasks" in given else limit
    temperature = settings.evaluation.temperature if "temperature" in given else temperature
    if settings.rollout.engine == "openai":
        if baseline:
            raise UserError("--baseline: expected none beside --engine openai; evaluate both and use compare")
        _evaluate_teacher(settings, split, limit, temperature, seed, output_dir)
        return
    temperature = temperature or 0.0
    models = [settings.model, *([dataclasses.replace(settings.model, path=baseline)] if baseline else [])]
    for each in models:
        if each.path:
            check_model_path(each.path)
    environment = make_environment(settings)
    panel = make_panel(environment, split or environment.splits[-1], limit)
    folder = prepare_folder(output_dir)
    common.prepare()
    reports: list[Report] = []
    for each in models:
        player = Player(settings, *each.open(), environment)
        report = evaluate(panel, lambda tasks, player=player: player.play(tasks, temperature, seed), each.path)
        report.settings = {"temperature": temperature, "seed": seed, "limit": limit}
        report.settings |= getattr(environment, "settings", {})
        report.save(folder / ("eval_baseline.json" if reports else "eval.json"))
        show.report(report)
        reports.append(report)
    if len(reports) == 2:
        show.comparison(compare(reports[1], reports[0]))
    typer.echo(f"written to {folder}")


def _given(overrides: Sequence[str]) -> set[str]:
    """Keys of the `evaluation` block that the overrides set: the block of a run's config says how it was watched while
    it trained, and only what is asked for here is taken from it.

    Raises:
        UserError: an override that an evaluation does not read.
    """
    from manus_fast.config import read_values

    values = read_values(None, overrides)
    read = ("agent", "endpoint", "environment", "evaluation", "model", "rollout")
    for block, value in values.items():
        if block not in read and (block, list(value)) != ("training", ["rollout_workers"]):
            instead = "; the flags --seed and --output_dir are there" if block == "training" else ""
            raise UserError(f"eval: expected overrides of {', '.join(read)}, got {block!r}{instead}")
    keys = set(values.get("evaluation", ()))
    if "freq" in keys:
        raise UserError("eval: expected evaluation.split, tasks or temperature, got evaluation.freq")
    return keys


def _evaluate_teacher(
    settings: Config, split: str | None, limit: int | None, temperature: float | None, seed: int, output_dir: str
) -> None:
    from manus_fast.evaluate import evaluate, make_panel
    from manus_fast.player import make_environment
    from manus_fast.teacher import TeacherPlayer

    environment = make_environment(settings)
    panel = make_panel(environment, split or environment.splits[-1], limit)
    player = TeacherPlayer(settings, output_dir, environment)
    try:
        with show.Watch("eval", len(panel.tasks), player.engine.metrics) as watch:
            report = evaluate(
                panel, lambda tasks: player.play(tasks, temperature, seed, watch.on_done), player.teacher.name
            )
    finally:
        player.close()
    used = player.teacher.temperature if temperature is None else temperature
    figures = player.engine.metrics()
    report.settings = {"temperature": used, "seed": seed, "limit": limit, "engine": "openai", "endpoint": figures}
    report.save(player.folder / "eval.json")
    show.report(report)
    show.endpoint(player.resumed, figures)
    typer.echo(f"written to {player.folder}")


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="eval.json (or its folder) of the baseline.")],
    b: Annotated[str, typer.Argument(metavar="B", help="eval.json (or its folder) of the model in question.")],
) -> None:
    """Compares two evaluations of one panel, task by task."""
    from manus_fast.evaluate import Report, compare

    for letter, name in (("A", a), ("B", b)):
        check_path(letter, name)
    files = [Path(name) / "eval.json" if Path(name).is_dir() else Path(name) for name in (a, b)]
    show.comparison(compare(*(Report.load(file) for file in files)))


def bench(
    context: typer.Context,
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Benchmark to run; without one, lists them.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to it.")] = None,
) -> None:
    """Measures an op beside its peers on this machine."""
    names = sorted(path.stem.removeprefix("bench_") for path in common.shipped("benchmarks").glob("bench_*.py"))
    if op is None:
        typer.echo("\n".join(names) or "no benchmarks are shipped here")
        return
    if op in ("--help", "-h"):  # after an OP it is the benchmark's own
        typer.echo(context.get_help())
        return
    if op not in names:
        raise UserError(f"bench: expected one of {', '.join(names)}, got {op!r}")
    common.benchmarks(f"bench_{op}").main(arguments or [])


def demo(
    overrides: Overrides = None,
    config: ConfigFile = None,
    output_dir: Annotated[
        str, typer.Option("--output_dir", help="Replaced when it holds an earlier demo.")
    ] = "runs/demo",
    seed: Annotated[int, typer.Option("--seed", help="Of weights, demonstrations and sampling.")] = 0,
    control: Annotated[bool, typer.Option("--control", help="Also go on with SFT for as long as PPO took.")] = False,
) -> None:
    """Makes a small policy, trains it by SFT and PPO on the CPU, evaluates before and after, and prints the table."""
    file = common.find_config(config, "demo_household")
    common.prepare()
    from manus_fast.demo import run

    began = time.monotonic()
    stages = run(file, output_dir, seed=seed, control=control, overrides=overrides or ())
    show.stages(stages, time.monotonic() - began)
