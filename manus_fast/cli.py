"""The command `manus-fast`: which commands there are, and what becomes of their errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from manus_fast import __version__
from manus_fast.commands import data, env, expert, machine, measure, models, play, preferences, search, serve, train
from manus_fast.commands.common import Relaunch
from manus_fast.errors import DONE, OURS, USERS, is_users_mistake, sentence, write_log
from manus_fast.launch import launch

app = typer.Typer(
    name="manus-fast",
    help="Trains language models into agents that act in text environments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# typer carries its own copy of click or uses the installed one, by version: its errors are found through a public one.
_UsageError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

_PASS_ON = {"ignore_unknown_options": True, "help_option_names": []}

app.command()(train.sft)
app.command()(train.ppo)
app.command()(preferences.dpo)
app.command("reward-model")(preferences.reward_model)
app.command()(search.search)
app.command("expert-iteration")(expert.expert_iteration)
app.command("eval")(measure.evaluate)
app.command()(measure.compare)
app.command(context_settings=_PASS_ON)(measure.bench)
app.command()(measure.demo)
app.command()(play.play)
app.command()(serve.serve)
app.command()(machine.info)
app.command()(machine.doctor)
app.add_typer(models.app, name="models")
app.add_typer(env.app, name="env")
app.add_typer(data.app, name="data")
data.app.command()(preferences.collect)
data.app.command()(preferences.pairs)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _global(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what is being done; anywhere on the line.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; anywhere on the line.")] = False,
) -> None:
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("manus_fast").setLevel(level)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0 done, 2 the user's mistake, 1 ours, 130 interrupted.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    words = _order(list(sys.argv[1:] if arguments is None else arguments))
    debug = "--debug" in words
    try:
        code = app(words, prog_name="manus-fast", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except _UsageError as error:
        text = _usage(error)
        if text:
            print(f"manus-fast: {text}", file=sys.stderr)
        return USERS
    except Relaunch as wish:
        return launch(wish.ranks, words)
    except (KeyboardInterrupt, typer.Abort):
        print("manus-fast: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # every error ends here, as one sentence and an exit code
        if debug:
            raise
        if is_users_mistake(error):
            print(f"manus-fast: {sentence(error)}", file=sys.stderr)
            return USERS
        try:
            where = f"traceback in {write_log(error)}"
        except OSError:
            where = "no room for the traceback, which --debug shows"
        print(f"manus-fast: {type(error).__name__}: {sentence(error)} ({where})", file=sys.stderr)
        return OURS


def _usage(error: Any) -> str:
    """A mistake on the command line as one sentence, empty where the help has been shown instead."""
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text} (see {context.command_path} --help)" if text and context is not None else text


def _order(words: list[str]) -> list[str]:
    """Global switches to the front, and the bare form of flags that take true or false spelled out."""
    front = [word for word in ("--debug", "--verbose") if word in words]
    rest: list[str] = []
    for index, word in enumerate(words):
        if word in front:
            continue
        rest.append(word)
        following = words[index + 1] if index + 1 < len(words) else "--"
        if word in ("--bf16", "--use_wandb") and (following.startswith("--") or "=" in following):
            rest.append("true")
    return front + rest


if __name__ == "__main__":
    sys.exit(main())
