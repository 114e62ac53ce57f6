"""`manus-fast data distill`: a teacher behind an endpoint plays, and what solved its task becomes training data."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from manus_fast.commands import common, show
from manus_fast.commands.flags import ConfigFile, Overrides
from manus_fast.errors import UserError
from manus_fast.files import write_text


def distill(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A registered environment, such as household.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: Annotated[
        str | None,
        typer.Option("--model_name_or_path", "--model_path", help="gpt-4o, deepseek-r1, qwq-32b, …"),
    ] = None,
    tasks: Annotated[int, typer.Option("--limit", help="Tasks to play; a larger number later goes on.")] = 100,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Of the sampling; default: the teacher's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice of tasks, the worlds and the sampling.")] = 0,
    output_dir: Annotated[
        str,
        typer.Option("--output_dir", help="Gets train.jsonl, report.json; what is there is gone on from."),
    ] = "runs/distill",
) -> None:
    """Lets a teacher behind an OpenAI-compatible endpoint play, and keeps what solved its task as training data."""
    from manus_fast.data.distill import distill
    from manus_fast.finetune import training_tasks
    from manus_fast.player import make_environment
    from manus_fast.rollout.engines.openai import BudgetReached
    from manus_fast.run_config import Config
    from manus_fast.teacher import TeacherPlayer

    if tasks < 1:
        raise UserError(f"--limit: expected an integer >= 1, got {tasks}")
    if temperature is not None and temperature < 0:
        raise UserError(f"--temperature: expected a number >= 0, got {temperature}")
    file = common.find_config(config, "") if config else None
    flags = {"environment.name": env, "model.path": model, "rollout.engine": "openai"}
    settings = Config.load(file, common.overrides(flags, overrides or ()))
    environment = make_environment(settings)
    split = environment.tasks(settings.environment.split)
    chosen = training_tasks(split, min(tasks, len(split)), seed)
    player = TeacherPlayer(settings, output_dir, environment)
    stopped = None
    try:
        with show.Watch("distill", len(chosen), player.engine.metrics) as watch:
            episodes = player.play(chosen, temperature, seed, watch.on_done)
    except BudgetReached as error:
        stopped, episodes = str(error), player.finished(chosen, seed)
    finally:
        player.close()
    result = distill(episodes, player.protocol, player.system_prompt, player.teacher.name)
    figures = player.engine.metrics()
    report = {
        "teacher": player.teacher.name,
        "tasks": len(chosen),
        "played": len(episodes),
        "kept": len(result.rows),
        "dropped": dict(sorted(result.dropped.items())),
        "trainable_replies": sum(message["trainable"] for row in result.rows for message in row.messages),
        "untrained_replies": dict(sorted(result.untrained.items())),
        "endpoint": figures,
        "stopped": stopped,
    }
    rows = "".join(json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in result.rows)
    write_text(player.folder / "train.jsonl", rows)
    write_text(player.folder / "report.json", json.dumps(report, indent=2) + "\n")
    show.endpoint(player.resumed, figures)
    for reason, count in report["dropped"].items():
        typer.echo(f"dropped {count}: {reason}")
    for reason, count in report["untrained_replies"].items():
        typer.echo(f"not trained on {count} replies: {reason}")
    typer.echo(f"{len(result.rows)} of {len(chosen)} episodes are in {player.folder / 'train.jsonl'}")
    if stopped:
        typer.echo(f"stopped: {stopped}", err=True)
