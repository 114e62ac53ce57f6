"""The command `manus-fast`: which commands there are, and what becomes of their errors."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from manus_fast import __version__
from manus_fast.commands import data, env, expert, machine, measure, models, play, preferences, search, serve, train
from manus_fast.commands.common import Relaunch
from manus_fast.errors import DONE, OURS, USERS, Terminated, UserError, is_users_mistake, sentence, write_log
from manus_fast.launch import launch
from manus_fast.paths import undoing

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
    asked = verbose or debug
    # What other libraries warn of would stand before the one sentence that says what to mend.
    logging.basicConfig(level=logging.WARNING if asked else logging.ERROR, format="%(levelname)s: %(message)s")
    if not asked:
        _quiet_libraries()
    logging.getLogger("manus_fast").setLevel(level)


def _quiet_libraries() -> None:
    """Has Python's warnings, and the libraries with log handlers of their own, say errors only; what the user has set
    for them stands. By the environment: some are imported later, or by processes that we start."""
    for library in ("TRANSFORMERS", "HF_HUB", "DATASETS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0 done, 2 the user's mistake, 1 ours; as a shell has it of a
    program that a signal ended, 130 for Ctrl-C, 143 for SIGTERM, 141 where nobody reads the output any more.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    words = _order(list(sys.argv[1:] if arguments is None else arguments))
    debug = "--debug" in words
    try:
        _no_nul(words)
        with _sigterm():
            return _invoke(words)
    except _UsageError as error:
        text = _usage(error)
        if text:
            print(f"manus-fast: {text}", file=sys.stderr)
        return USERS
    except Terminated:
        print("manus-fast: ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except (KeyboardInterrupt, typer.Abort):
        print("manus-fast: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (Exception, SystemExit) as error:  # every error ends here, as one sentence and an exit code
        if _nobody_reads(error):
            return 128 + signal.SIGPIPE
        if debug or isinstance(error, SystemExit):
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


def _invoke(words: list[str]) -> int:
    """Runs a command. Not through typer's own `main`, which makes exit codes of some errors before we see them."""
    command = typer.main.get_command(app)
    try:
        with warnings.catch_warnings(), undoing(), command.make_context("manus-fast", words) as context:
            command.invoke(context)
        return DONE
    except typer.Exit as end:
        return end.exit_code
    except Relaunch as wish:
        ranks = wish.ranks
    return launch(ranks, words)


@contextmanager
def _sigterm() -> Iterator[None]:
    """SIGTERM ends what runs as Ctrl-C does. Only the main thread may say so; elsewhere it stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: object) -> NoReturn:
        raise Terminated

    earlier = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _nobody_reads(error: BaseException) -> bool:
    """Whether an error came about since whoever read our output is gone, as in `manus-fast info | head -1`; the rest of
    the output goes nowhere then."""
    ended_by_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    if not ended_by_rich and not isinstance(error, BrokenPipeError):
        return False
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    gone = [descriptor for descriptor, event in outputs.poll(0) if event & select.POLLERR]
    for descriptor in gone:  # what is still in Python's buffers would fail once more at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return ended_by_rich or bool(gone)


def _usage(error: Any) -> str:
    """A mistake on the command line as one sentence, empty where the help has been shown instead."""
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text} (see {context.command_path} --help)" if text and context is not None else text


def _no_nul(words: Sequence[str]) -> None:
    """No shell can give a NUL byte; a program that calls us can, and what fails on it later names no argument."""
    for before, word in zip(["", *words], words, strict=False):
        if "\0" in word:
            name = before if before.startswith("--") else "arguments"
            raise UserError(f"{name}: expected text without NUL bytes, got {word!r}")


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
