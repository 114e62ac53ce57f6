"""`manus-fast sft` and `manus-fast ppo`: a YAML file, the field's common flags, dotted overrides; the trainer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from manus_fast.commands import common, show
from manus_fast.errors import UserError
from manus_fast.ranks import connect

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Config overrides, such as ppo.gamma=0.95.")
]
ConfigFile = Annotated[
    str | None, typer.Option("--config", help="YAML file, or the name of a shipped one (ppo_household).")
]
ModelPath = Annotated[
    str | None,
    typer.Option("--model_name_or_path", "--model_path", help="Model folder, hub name, or smollm2 (model.path)."),
]
Dataset = Annotated[str | None, typer.Option("--dataset_name", help="data.name")]
EnvName = Annotated[str | None, typer.Option("--env_name", help="environment.name")]
RewardFn = Annotated[
    str | None, typer.Option("--reward_fn", help="The only reward: a part's name or module:function (reward_fn).")
]
Rollouts = Annotated[
    int | None, typer.Option("--num_rollouts", help="Trajectories an iteration (training.num_rollouts).")
]
PPOEpochs = Annotated[int | None, typer.Option("--ppo_epochs", help="Passes over each collection (ppo.epochs).")]
BatchSize = Annotated[int | None, typer.Option("--batch_size", help="Rows an optimizer step, over all ranks.")]
Epochs = Annotated[int | None, typer.Option("--num_train_epochs", help="Passes over the demonstrations (sft.epochs).")]
PerDevice = Annotated[
    int | None,
    typer.Option("--per_device_train_batch_size", help="Rows a micro-batch; batch size = this x accumulation x ranks."),
]
Accumulation = Annotated[
    int | None, typer.Option("--gradient_accumulation_steps", help="training.gradient_accumulation_steps")
]
LearningRate = Annotated[float | None, typer.Option("--learning_rate", help="Peak learning rate.")]
LoggingSteps = Annotated[int | None, typer.Option("--logging_steps", help="training.logging_steps")]
SaveStrategy = Annotated[str | None, typer.Option("--save_strategy", help="no, steps or epoch.")]
OutputDir = Annotated[str | None, typer.Option("--output_dir", help="Where the run is written (training.output_dir).")]
BF16 = Annotated[str | None, typer.Option("--bf16", help="true or false: train in bfloat16 (model.dtype).")]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", help="Ranks to start on this machine, one for each GPU (without GPUs: processes)."),
]
Wandb = Annotated[str | None, typer.Option("--use_wandb", help="true or false (training.use_wandb).")]


def ppo(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: ModelPath = None,
    dataset_name: Dataset = None,
    env_name: EnvName = None,
    reward_fn: RewardFn = None,
    num_rollouts: Rollouts = None,
    ppo_epochs: PPOEpochs = None,
    batch_size: BatchSize = None,
    per_device_train_batch_size: PerDevice = None,
    gradient_accumulation_steps: Accumulation = None,
    learning_rate: LearningRate = None,
    logging_steps: LoggingSteps = None,
    save_strategy: SaveStrategy = None,
    output_dir: OutputDir = None,
    bf16: BF16 = None,
    use_wandb: Wandb = None,
    gpus: Gpus = None,
) -> None:
    """Trains a policy by PPO or a relative of it (the config's `algorithm`) in an environment."""
    common.on_gpus(gpus)
    flags = {
        "model.path": model,
        "data.name": dataset_name,
        "environment.name": env_name,
        "reward_fn": reward_fn,
        "training.num_rollouts": num_rollouts,
        "ppo.epochs": ppo_epochs,
        "training.gradient_accumulation_steps": gradient_accumulation_steps,
        "ppo.batch_size": batch_size_of(batch_size, per_device_train_batch_size, gradient_accumulation_steps),
        "training.learning_rate": learning_rate,
        "training.logging_steps": logging_steps,
        **shared_flags(save_strategy, output_dir, bf16, use_wandb),
    }
    settings = load_settings(config, "ppo_household", flags, overrides)
    common.prepare()
    from manus_fast.search_trainer import make_trainer

    tell(make_trainer(settings).run(), settings)


def sft(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: ModelPath = None,
    dataset_name: Dataset = None,
    env_name: EnvName = None,
    num_train_epochs: Epochs = None,
    batch_size: BatchSize = None,
    per_device_train_batch_size: PerDevice = None,
    gradient_accumulation_steps: Accumulation = None,
    learning_rate: LearningRate = None,
    logging_steps: LoggingSteps = None,
    save_strategy: SaveStrategy = None,
    output_dir: OutputDir = None,
    bf16: BF16 = None,
    use_wandb: Wandb = None,
    gpus: Gpus = None,
) -> None:
    """Fine-tunes a model on expert demonstrations."""
    common.on_gpus(gpus)
    flags = {
        "model.path": model,
        "data.name": dataset_name,
        "environment.name": env_name,
        "sft.epochs": num_train_epochs,
        "training.gradient_accumulation_steps": gradient_accumulation_steps,
        "sft.batch_size": batch_size_of(batch_size, per_device_train_batch_size, gradient_accumulation_steps),
        "sft.learning_rate": learning_rate,
        "training.logging_steps": logging_steps,
        **shared_flags(save_strategy, output_dir, bf16, use_wandb),
    }
    settings = load_settings(config, "sft_household", flags, overrides)
    common.prepare()
    from manus_fast.finetune import FineTune

    tell(FineTune(settings).run().report, settings)


def tell(report: Any, settings: Any) -> None:
    """The closing lines, said by rank 0."""
    if connect().first:
        show.report(report)
        typer.echo(f"the model is in {settings.training.output_dir}/model")


def load_settings(config: str | Path | None, default: str, flags: dict[str, Any], extra: list[str] | None) -> Any:
    """The config of a file or shipped name under the flags that were given and the overrides."""
    file = common.find_config(config, default)
    from manus_fast.run_config import Config

    return Config.load(file, common.overrides(flags, extra or ()))


def batch_size_of(total: int | None, per_device: int | None, accumulation: int | None) -> int | None:
    """Rows an optimizer step: named outright, or built up from the rows of one micro-batch."""
    if per_device is None:
        return total
    built = per_device * (accumulation or 1) * common.world_size()
    if total is not None and total != built:
        raise UserError(
            f"--batch_size: expected {built} (--per_device_train_batch_size x --gradient_accumulation_steps x ranks), "
            f"got {total}"
        )
    return built


def shared_flags(
    save_strategy: str | None, output_dir: str | None, bf16: str | None, use_wandb: str | None
) -> dict[str, Any]:
    """What the flags that every trainer takes mean as config keys."""
    half = common.truth("--bf16", bf16)
    if save_strategy not in (None, "no", "steps", "epoch"):
        raise UserError(f"--save_strategy: expected no, steps or epoch, got {save_strategy!r}")
    return {
        "training.save_strategy": save_strategy,
        "training.output_dir": output_dir,
        "model.dtype": None if half is None else ("bfloat16" if half else "float32"),
        "training.use_wandb": common.truth("--use_wandb", use_wandb),
    }
