"""`manus-fast env`: games for ALFWorld, and the two engines that play them compared string by string."""

from __future__ import annotations

from typing import Annotated

import typer

from manus_fast.paths import check_output_file

app = typer.Typer(help="Makes and checks the games of environments.", no_args_is_help=True)

Seed = Annotated[int, typer.Option("--seed", help="The same seed, the same games on any machine.")]


@app.callback()
def _env() -> None: ...


@app.command("make-games")
def make_games(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    train: Annotated[int, typer.Option("--train", help="Games of the split.")] = 100,
    valid_seen: Annotated[int, typer.Option("--valid_seen", help="Games of the split.")] = 20,
    valid_unseen: Annotated[int, typer.Option("--valid_unseen", help="Games of the split.")] = 20,
    seed: Seed = 0,
    grammar: Annotated[str, typer.Option("--grammar", help="0.4 (move … to) or 0.3 (put … in/on).")] = "0.4",
    rare: Annotated[bool, typer.Option("--rare", help="Make everything rare frequent, to compare engines.")] = False,
) -> int:
    """Writes ALFWorld games, each proved solvable in the real engine (needs the package alfworld)."""
    from manus_fast.envs.alfworld.games import main

    counts = {"train": train, "valid_seen": valid_seen, "valid_unseen": valid_unseen}
    return main(out, **counts, seed=seed, grammar=grammar, rare=rare)


@app.command()
def diff(
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="Folder of games; default: ALFWorld's.")] = None,
    games: Annotated[int | None, typer.Option("--games", help="At most so many of each split.")] = None,
    random_walks: Annotated[int, typer.Option("--random_walks", help="Random walks a game.")] = 1,
    random_steps: Annotated[int, typer.Option("--random_steps", help="Commands of a random walk.")] = 40,
    seed: Seed = 0,
    output: Annotated[str | None, typer.Option("--output", help="JSON file; default: standard output.")] = None,
) -> int:
    """Plays the real engine against the native one; exit code 1 where a single string differs."""
    if output is not None:
        check_output_file("--output", output)
    from manus_fast.envs.alfworld.diff import main

    return main(data, games=games, random_walks=random_walks, random_steps=random_steps, seed=seed, output=output)
