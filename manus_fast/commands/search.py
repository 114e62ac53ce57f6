"""`manus-fast search`: a model searches a panel of tasks; what it finds is written, reported, drawn, and paired."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from manus_fast.commands import common, show
from manus_fast.commands.flags import ConfigFile, ModelPath, Overrides
from manus_fast.errors import UserError
from manus_fast.files import whole, write_text
from manus_fast.paths import check_output_file

if TYPE_CHECKING:
    from manus_fast.search.base import Tree
    from manus_fast.search.config import SearchConfig


def search(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: ModelPath = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="greedy, best_of_n, beam, tot, got, dfsdt or mcts.")
    ] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", help="Tasks, spread over the split; default: all.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Default: the environment's last split.")] = None,
    budget: Annotated[
        int | None, typer.Option("--budget_tokens", help="Generated tokens a task may take (search.budget_tokens).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the worlds and the sampling.")] = 0,
    output_dir: Annotated[
        str, typer.Option("--output_dir", help="Where trajectories.jsonl and eval.json go.")
    ] = "runs/search",
    draw: Annotated[str | None, typer.Option("--draw", metavar="FILE.svg", help="Draw one searched tree.")] = None,
    preferences: Annotated[
        str | None, typer.Option("--preferences", metavar="FILE", help="Write step-level preference pairs.")
    ] = None,
    value_model: Annotated[
        str | None, typer.Option("--value_model", metavar="FOLDER", help="Values from here (search.value=model).")
    ] = None,
    reward_model: Annotated[
        str | None,
        typer.Option(
            "--reward_model",
            metavar="FOLDER",
            help="A reward model judges best_of_n's episodes, or gives any other strategy its values.",
        ),
    ] = None,
    fit_values: Annotated[
        str | None, typer.Option("--fit_values", metavar="FOLDER", help="Train a value model on the trees.")
    ] = None,
) -> None:
    """Searches each task of a panel once and writes the episodes that the search plays."""
    from manus_fast.data.preferences import check_tokenizer, fingerprint
    from manus_fast.evaluate import evaluate, make_panel
    from manus_fast.learn import search_values
    from manus_fast.modeling.load import check_model_path
    from manus_fast.player import Player, make_environment
    from manus_fast.rewards.model import RewardModel
    from manus_fast.run_config import Config
    from manus_fast.run_folder import prepare_folder
    from manus_fast.search.config import STRATEGIES
    from manus_fast.search.draw import draw as drawing
    from manus_fast.search.targets import preference_pairs

    if strategy is not None and strategy not in STRATEGIES:
        raise UserError(f"--strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    for flag, given in (("--draw", draw), ("--preferences", preferences)):
        if given is not None:
            check_output_file(flag, given)
    file = common.find_config(config, "search_household")
    flags = {"model.path": model, "search.strategy": strategy, "search.budget_tokens": budget}
    if value_model is not None and reward_model is not None:
        raise UserError("--value_model: expected none beside --reward_model")
    flags["search.value"] = None if value_model is None else "model"
    settings = Config.load(file, common.overrides(flags, overrides or ()))
    settings.search, judges = _with_reward_model(settings.search, reward_model)
    if settings.model.path:
        check_model_path(settings.model.path)
    environment = make_environment(settings)
    panel = make_panel(environment, split or environment.splits[-1], tasks)
    folder = prepare_folder(output_dir)
    common.prepare()
    net, tokenizer = settings.model.open()
    player = Player(settings, net, tokenizer, environment)
    score = None if value_model is None else search_values.load_values(net, value_model).value_of()
    judge = None
    if reward_model is not None:
        judging = RewardModel.load(reward_model, net.device)
        check_tokenizer(judging.tokenizer, tokenizer)
        if judges:
            judge = judging.scorer("outcome")
        else:
            score = judging.scorer("step", probability=True)
    trees: list[Tree] = []

    def play(chosen):
        trees.extend(player.search(chosen, seed, score=score, judge=judge))
        return [tree.trajectory(env=environment.name) for tree in trees]

    report = evaluate(panel, play, settings.model.path)
    stats = player.search_stats
    report.settings = {"search": dataclasses.asdict(settings.search), "seed": seed, **stats.metrics()}
    report.save(folder / "eval.json")
    with whole(folder / "trajectories.jsonl") as lines:
        for tree in trees:
            lines.write(json.dumps(tree.trajectory(env=environment.name).to_json()) + "\n")
    show.report(report)
    share = 100 * stats.merged / max(1, stats.replies)
    typer.echo(
        f"{settings.search.strategy}: {stats.tokens / len(trees):.0f} generated tokens and "
        f"{stats.steps / len(trees):.1f} turns a task, {share:.0f} % of replies merged, {stats.failed} branches failed"
    )
    if draw is not None:
        tree = _worth_drawing(trees)
        write_text(draw, drawing(tree))
        typer.echo(f"{draw}: the tree of {tree.task.id}")
    if preferences is not None:
        name = fingerprint(tokenizer)
        pairs = [pair for tree in trees for pair in preference_pairs(tree, player.system_prompt, tokenizer=name)]
        write_text(preferences, "".join(json.dumps(pair) + "\n" for pair in pairs))
        typer.echo(f"{preferences}: {len(pairs)} pairs")
    if fit_values is not None:
        search_values.save_values(search_values.fit_values(net, trees), fit_values)
        typer.echo(f"{fit_values}: a value model of {sum(len(tree.nodes) for tree in trees)} nodes")
    typer.echo(f"written to {folder}")


def _with_reward_model(config: SearchConfig, folder: str | None) -> tuple[SearchConfig, bool]:
    """The search block of a run with a reward model, and whether that one judges episodes."""
    if folder is None:
        return config, False
    if config.strategy == "best_of_n":
        return dataclasses.replace(config, judge="model"), True
    if config.strategy not in ("tot", "got", "mcts"):
        raise UserError(f"--reward_model: expected --strategy best_of_n, tot, got or mcts, got {config.strategy}")
    return dataclasses.replace(config, value="model"), False


def _worth_drawing(trees: list[Tree]) -> Tree:
    """A solved tree of the middle size among those that took more than one path, else the first tree."""
    solved = [tree for tree in trees if tree.solution is not None and len(tree.nodes) > 1 + tree.solution.depth]
    return sorted(solved, key=lambda tree: len(tree.nodes))[len(solved) // 2] if solved else trees[0]
