"""`manus-fast dpo`, and `manus-fast data collect | pairs`: from an agent's episodes to pairs to a better agent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from manus_fast.commands import common, flags, show
from manus_fast.commands.flags import ConfigFile, EnvName, ModelPath, Overrides, load_settings, trains
from manus_fast.commands.train import tell
from manus_fast.files import whole
from manus_fast.paths import check_output_file, make_folder
from manus_fast.ranks import connect

_COLLECTED = "runs/collected/trajectories.jsonl"

Out = Annotated[str | None, typer.Option("--out", help=f"The file to write; default: {_COLLECTED}.")]
Level = Annotated[str, typer.Option("--level", help="trajectory, or step: the first differing reply.")]


_PAIRS = {"dataset_name": (flags.Pairs, "data.name")}


@trains("dpo", "dpo_household", _PAIRS)
def dpo(settings: Any) -> None:
    """Trains a policy on preference pairs by DPO or a relative of it (dpo.loss): a file's, or those of its own play."""
    if settings.dpo.rounds is None:
        from manus_fast.preference import PreferenceTune

        tell(PreferenceTune(settings).run().report, settings)
        return
    from manus_fast.evaluate import Report, compare
    from manus_fast.preference_rounds import PreferenceRounds

    run = PreferenceRounds(settings)
    for done in run.rounds():
        typer.echo(
            f"round {done.number}: {done.pairs} pairs of {done.episodes} episodes, {done.dpo_steps} steps; success "
            f"{100 * done.before:.1f} % to {100 * done.success:.1f} %{'' if done.kept else ', taken back'}, "
            f"{done.seconds:.0f} s"
        )
    assert run.report is not None
    show.comparison(compare(Report.load(run.folder / "eval_before.json"), run.report))
    tell(run.report, settings)


@trains("reward_model", "reward_model_household", _PAIRS)
def reward_model(settings: Any) -> None:
    """Trains a reward model on preference pairs, for a PPO reward, a search's values or a judge of episodes."""
    from manus_fast.preference import RewardTune

    tuned = RewardTune(settings).run()
    if connect().first:
        for head, share in tuned.accuracy.items():
            typer.echo(f"{head} head: {100 * share:.1f} % of {tuned.held_out} held-out pairs in the right order")
        typer.echo(f"the reward model is in {settings.training.output_dir}/model")


def collect(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: ModelPath = None,
    env_name: EnvName = None,
    tasks: Annotated[int, typer.Option("--tasks", help="Tasks of the training split, drawn by training.seed.")] = 200,
    members: Annotated[int, typer.Option("--members", help="Episodes of each task.")] = 8,
    temperature: Annotated[float | None, typer.Option("--temperature", help="rollout.temperature")] = None,
    out: Out = None,
) -> None:
    """Lets a model play tasks several times each and writes all episodes."""
    if out is not None:
        check_output_file("--out", out)
    beside = common.config_beside(model)
    given: dict[str, Any] = {"model.path": model, "environment.name": env_name, "rollout.temperature": temperature}
    settings = load_settings(config or beside, "ppo_household", given, overrides)
    common.prepare()
    from manus_fast.finetune import training_tasks
    from manus_fast.player import Player

    player = Player(settings, *settings.model.open())
    chosen = training_tasks(player.environment.tasks(settings.environment.split), tasks, settings.training.seed)
    episodes = player.collect(chosen, 0, members)
    file = Path(out or _COLLECTED)
    make_folder(file.parent)
    with whole(file) as lines:
        for episode in episodes:
            lines.write(json.dumps(episode.to_json()) + "\n")
    won = sum(episode.success for episode in episodes)
    typer.echo(f"{len(episodes)} episodes of {tasks} tasks, {won} won, are in {file}")


def pairs(
    trajectories: Annotated[str, typer.Argument(metavar="FILE", help="A trajectories.jsonl.")],
    model: Annotated[
        str | None,
        typer.Option("--model_path", help="Whose tokenizer sampled them; default: the folder model beside the file."),
    ] = None,
    level: Level = "trajectory",
    by: Annotated[str, typer.Option("--by", help="success against failure, or a higher reward.")] = "success",
    margin: Annotated[float, typer.Option("--margin", help="Least difference of the rewards.")] = 0.0,
    per_task: Annotated[int, typer.Option("--per_task", help="Most pairs from one task.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice among a task's pairs.")] = 0,
    out: Annotated[str | None, typer.Option("--out", help="Default: preferences.jsonl beside the file.")] = None,
) -> None:
    """Turns episodes of one task that ended differently into preference pairs."""
    from manus_fast.data.preferences import fingerprint, save_preferences
    from manus_fast.data.rollout_pairs import episode_pairs, load_trajectories
    from manus_fast.modeling.load import load_tokenizer

    if out is not None:
        check_output_file("--out", out)
    source = Path(trajectories)
    dropped: Counter[str] = Counter()
    episodes = list(load_trajectories(source, dropped))
    name = fingerprint(load_tokenizer(model or source.parent / "model"))
    made = episode_pairs(
        episodes, name, level=level, by=by, margin=margin, per_task=per_task, seed=seed, dropped=dropped
    )
    file = Path(out) if out else source.parent / "preferences.jsonl"
    save_preferences(made, file)
    typer.echo(json.dumps({"episodes": len(episodes), "pairs": len(made), "file": str(file), "dropped": dict(dropped)}))
