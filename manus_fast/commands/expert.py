"""`manus-fast expert-iteration`: a model searches training tasks, imitates what search solved, and again."""

from __future__ import annotations

from typing import Annotated

import typer

from manus_fast.commands import common, show
from manus_fast.commands.flags import ConfigFile, EnvName, Epochs, ModelPath, OutputDir, Overrides, SaveStrategy, Wandb
from manus_fast.errors import UserError


def expert_iteration(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: ModelPath = None,
    env_name: EnvName = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="How tasks are searched (search.strategy).")
    ] = None,
    budget: Annotated[
        int | None, typer.Option("--budget_tokens", help="Generated tokens a task may take (search.budget_tokens).")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="expert_iteration.rounds")] = None,
    tasks: Annotated[
        int | None, typer.Option("--tasks", help="Training tasks a round (expert_iteration.tasks).")
    ] = None,
    num_train_epochs: Epochs = None,
    learning_rate: Annotated[float | None, typer.Option("--learning_rate", help="sft.learning_rate")] = None,
    save_strategy: SaveStrategy = None,
    output_dir: OutputDir = None,
    use_wandb: Wandb = None,
) -> None:
    """Improves a policy by imitation of what its own search solves, round after round."""
    from manus_fast.evaluate import Report, compare
    from manus_fast.run_config import Config
    from manus_fast.search.config import STRATEGIES

    if strategy is not None and strategy not in STRATEGIES:
        raise UserError(f"--strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if save_strategy not in (None, "no", "steps", "epoch"):
        raise UserError(f"--save_strategy: expected no, steps or epoch, got {save_strategy!r}")
    flags = {
        "model.path": model,
        "environment.name": env_name,
        "search.strategy": strategy,
        "search.budget_tokens": budget,
        "expert_iteration.rounds": rounds,
        "expert_iteration.tasks": tasks,
        "sft.epochs": num_train_epochs,
        "sft.learning_rate": learning_rate,
        "training.save_strategy": save_strategy,
        "training.output_dir": output_dir,
        "training.use_wandb": common.truth("--use_wandb", use_wandb),
    }
    settings = Config.load(common.find_config(config, "expert_household"), common.overrides(flags, overrides or ()))
    common.prepare()
    from manus_fast.expert_iteration import ExpertIteration

    run = ExpertIteration(settings)
    for done in run.rounds():
        typer.echo(
            f"round {done.number}: search solved {done.solved} of {done.tasks} tasks, {done.episodes} new episodes, "
            f"{done.rows} rows imitated; success {100 * done.success:.1f} %, {done.seconds:.0f} s"
        )
    assert run.report is not None
    show.report(run.report)
    show.comparison(compare(Report.load(run.folder / "eval_before.json"), run.report))
    typer.echo(f"the model is in {settings.training.output_dir}/model")
