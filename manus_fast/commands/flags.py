"""The flags of commands that train: each once, with the config key that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from manus_fast.commands import common
from manus_fast.errors import UserError
from manus_fast.ranks import world_size

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
Pairs = Annotated[str | None, typer.Option("--dataset_name", help="A preferences.jsonl (data.name).")]
EnvName = Annotated[str | None, typer.Option("--env_name", help="environment.name")]
RewardFn = Annotated[
    str | None, typer.Option("--reward_fn", help="The only reward: a part's name or module:function (reward_fn).")
]
Rollouts = Annotated[
    int | None, typer.Option("--num_rollouts", help="Trajectories an iteration (training.num_rollouts).")
]
PPOEpochs = Annotated[int | None, typer.Option("--ppo_epochs", help="Passes over each collection (ppo.epochs).")]
Epochs = Annotated[int | None, typer.Option("--num_train_epochs", help="Passes over the data.")]
BatchSize = Annotated[int | None, typer.Option("--batch_size", help="Rows an optimizer step, over all ranks.")]
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
Wandb = Annotated[str | None, typer.Option("--use_wandb", help="true or false (training.use_wandb).")]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", help="Ranks to start on this machine, one for each GPU (without GPUs: processes)."),
]

# Of every command that trains, in the order of its help: a flag's name, what it is, and its config key, in which
# BLOCK is the algorithm's. Where there is no key, `_derived` says what the flag means.
_SHARED: dict[str, tuple[Any, str | None]] = {
    "overrides": (Overrides, None),
    "config": (ConfigFile, None),
    "model": (ModelPath, "model.path"),
    "dataset_name": (Dataset, "data.name"),
    "env_name": (EnvName, "environment.name"),
    "num_train_epochs": (Epochs, "BLOCK.epochs"),
    "batch_size": (BatchSize, None),
    "per_device_train_batch_size": (PerDevice, None),
    "gradient_accumulation_steps": (Accumulation, "training.gradient_accumulation_steps"),
    "learning_rate": (LearningRate, "BLOCK.learning_rate"),
    "logging_steps": (LoggingSteps, "training.logging_steps"),
    "save_strategy": (SaveStrategy, None),
    "output_dir": (OutputDir, "training.output_dir"),
    "bf16": (BF16, None),
    "use_wandb": (Wandb, None),
    "gpus": (Gpus, None),
}


def trains(
    block: str, config: str, changes: Mapping[str, tuple[Any, str] | None] | None = None
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Makes a command of a function that trains by a config.

    Args:
        block: of the config, the algorithm's own.
        config: the shipped one that is taken where none is named.
        changes: flags besides the shared ones or in place of them, each what it is and its config key; None leaves one
            out.
    """
    flags = {name: flag for name, flag in {**_SHARED, **(changes or {})}.items() if flag is not None}

    def decorate(run: Callable[[Any], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            common.on_gpus(given["gpus"])
            keys = {key.replace("BLOCK", block): given[name] for name, (_, key) in flags.items() if key is not None}
            settings = load_settings(given["config"], config, keys | _derived(block, given), given["overrides"])
            common.prepare()
            run(settings)

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        # What typer makes the command line of.
        command.__annotations__ = {name: kind for name, (kind, _) in flags.items()}
        command.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
                for name, (kind, _) in flags.items()
            ]
        )
        return command

    return decorate


def load_settings(config: str | Path | None, default: str, flags: dict[str, Any], extra: list[str] | None) -> Any:
    """The config of a file or shipped name under the flags that were given and the overrides."""
    file = common.find_config(config, default)
    from manus_fast.run_config import Config

    return Config.load(file, common.overrides(flags, extra or ()))


def _derived(block: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The config keys of flags that stand for another value than their own."""
    half = common.truth("--bf16", given["bf16"])
    if given["save_strategy"] not in (None, "no", "steps", "epoch"):
        raise UserError(f"--save_strategy: expected no, steps or epoch, got {given['save_strategy']!r}")
    return {
        f"{block}.batch_size": _batch_size(given),
        "training.save_strategy": given["save_strategy"],
        "model.dtype": None if half is None else ("bfloat16" if half else "float32"),
        "training.use_wandb": common.truth("--use_wandb", given["use_wandb"]),
    }


def _batch_size(given: Mapping[str, Any]) -> int | None:
    """Rows an optimizer step: named outright, or built up from the rows of one micro-batch."""
    total, per_device = given["batch_size"], given["per_device_train_batch_size"]
    if per_device is None:
        return total
    built = per_device * (given["gradient_accumulation_steps"] or 1) * world_size()
    if total is not None and total != built:
        raise UserError(
            f"--batch_size: expected {built} (--per_device_train_batch_size x --gradient_accumulation_steps x ranks), "
            f"got {total}"
        )
    return built
