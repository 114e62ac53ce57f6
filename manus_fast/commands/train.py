"""`manus-fast sft` and `manus-fast ppo`: a YAML file, the field's common flags, dotted overrides; the trainer runs."""

from __future__ import annotations

from typing import Any

import typer

from manus_fast.commands import flags, show
from manus_fast.commands.flags import trains
from manus_fast.ranks import connect

_PPO = {
    "reward_fn": (flags.RewardFn, "reward_fn"),
    "num_rollouts": (flags.Rollouts, "training.num_rollouts"),
    "ppo_epochs": (flags.PPOEpochs, "ppo.epochs"),
    "num_train_epochs": None,
    "learning_rate": (flags.LearningRate, "training.learning_rate"),
}


@trains("ppo", "ppo_household", _PPO)
def ppo(settings: Any) -> None:
    """Trains a policy by PPO or a relative of it (the config's `algorithm`) in an environment."""
    from manus_fast.search_trainer import make_trainer

    tell(make_trainer(settings).run(), settings)


@trains("sft", "sft_household")
def sft(settings: Any) -> None:
    """Fine-tunes a model on expert demonstrations."""
    from manus_fast.finetune import FineTune

    tell(FineTune(settings).run().report, settings)


def tell(report: Any, settings: Any) -> None:
    """The closing lines, said by rank 0."""
    if connect().first:
        show.report(report)
        typer.echo(f"the model is in {settings.training.output_dir}/model")
