"""`manus-fast data`: published datasets and a teacher's episodes made into training files, shown and counted."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manus_fast.commands import common, distill
from manus_fast.errors import UserError
from manus_fast.files import write_text
from manus_fast.paths import check_output_file

if TYPE_CHECKING:
    from rich.console import Console

    from manus_fast.agent.context import ChatFormat
    from manus_fast.data.preferences import Preference

app = typer.Typer(help="Builds, shows and counts training data.", no_args_is_help=True)

Streaming = Annotated[bool, typer.Option("--streaming", help="Read hub datasets without loading them into the cache.")]
Name = Annotated[str, typer.Argument(metavar="DATA", help="JSONL, JSON or parquet file, folder, hub name[:split].")]


_FLAGS = {"data.name": "DATA", "sources": "DATA", "valid": "--valid", "similarity": "--similarity",
          "max_turns": "--max_turns", "max_chars": "--max_chars"}  # fmt: skip
"""What those commands call what the library names by a key or an argument."""


@app.callback()
def _data() -> None: ...


def _by_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Has a command's errors name what was typed."""

    @functools.wraps(command)
    def named(*given: Any, **options: Any) -> None:
        try:
            command(*given, **options)
        except ValueError as error:
            name, colon, rest = str(error).partition(": ")
            if not colon or name not in _FLAGS:
                raise
            raise UserError(f"{_FLAGS[name]}: {rest}") from error

    return named


@app.command()
@_by_flags
def build(
    sources: Annotated[list[str], typer.Argument(metavar="DATA[=WEIGHT]...", help="Sources with their shares.")],
    out: Annotated[str, typer.Option("--output_dir", help="Gets train.jsonl, valid.jsonl and report.json.")],
    valid: Annotated[float, typer.Option("--valid", help="Share of tasks for validation.")] = 0.05,
    max_turns: Annotated[int, typer.Option("--max_turns", help="Longest conversation, in replies.")] = 100,
    max_chars: Annotated[int, typer.Option("--max_chars", help="Longest conversation, in characters.")] = 100_000,
    similarity: Annotated[float, typer.Option("--similarity", help="From which two are near duplicates.")] = 0.9,
    style: Annotated[str, typer.Option("--style", help="react, tags, act; none: as it is.")] = "react",
    seed: Annotated[int, typer.Option("--seed", help="Of the mix and the split.")] = 0,
    streaming: Streaming = False,
    keep_repeated_ids: Annotated[
        bool, typer.Option("--keep_repeated_ids", help="Keep conversations whose id came before in a file.")
    ] = False,
    chosen: Annotated[
        bool, typer.Option("--chosen", help="Take the chosen sides of preference pairs as conversations.")
    ] = False,
) -> None:
    """Mixes datasets by weight, drops malformed rows and near duplicates, splits by task, and says what was dropped.
    The datasets hold conversations, or all of them preference pairs."""
    from manus_fast.agent.protocol import STYLES, Protocol
    from manus_fast.data.build import BuildConfig
    from manus_fast.data.build import build as make

    if style not in (*STYLES, "none"):
        raise UserError(f"--style: expected one of {', '.join(STYLES)} or none, got {style!r}")
    config = BuildConfig(valid, max_turns, max_chars, similarity, seed, streaming, keep_repeated_ids, chosen)
    protocol = None if style == "none" else Protocol(style)
    report = make([_source(word) for word in sources], out, config, protocol)
    for name, part in report["sources"].items():
        typer.echo(f"{name}: {part['used']:,} of {part['read']:,} used, weight {part['weight']:g}")
        for reason, count in sorted(part["dropped"].items(), key=lambda item: -item[1]):
            typer.echo(f"  left out {count:,}: {reason}")
    typer.echo(f"{report['train']:,} in {out}/train.jsonl, {report['valid']:,} in {out}/valid.jsonl")
    if any(part["near_duplicates"] for part in report["sources"].values()):
        typer.echo(f"{out}/report.json says what each near duplicate is like")


app.command("distill")(distill.distill)


@app.command()
@_by_flags
def show(
    name: Name,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Conversations.")] = 1,
    identifier: Annotated[str | None, typer.Option("--id", help="Only the conversation of this id.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Replies as the dataset has them.")] = False,
    model: Annotated[
        str | None, typer.Option("--model_path", help="Print the very tokens of this model's chat format.")
    ] = None,
    streaming: Streaming = False,
) -> None:
    """Prints conversations with what is trained on in green and marked by a star; of preference pairs the rejected side
    in red."""
    from rich.console import Console

    from manus_fast.data.preferences import holds_preferences

    console, dropped = Console(), Counter[str]()
    if holds_preferences(name, streaming):
        if identifier is not None:
            raise UserError(f"--id: expected a dataset of conversations, got preference pairs in {name!r}")
        shown = _show_pairs(console, name, limit, dropped, streaming)
    else:
        shown = _show_conversations(console, name, limit, identifier, raw, model, dropped, streaming)
    _skipped(dropped)
    if not shown and identifier is not None:
        raise UserError(f"--id: expected the id of a conversation in {name!r}, got {identifier!r}")
    if not shown:
        raise UserError(f"DATA: expected a conversation or a preference pair in {name!r}, got none")


def _show_pairs(console: Console, name: str, limit: int, dropped: Counter[str], streaming: bool) -> int:
    from manus_fast.data.preferences import load_preferences

    shown = 0
    for pair in islice(load_preferences(name, dropped, streaming), limit):
        _headline(console, shown, f"{pair.source or 'pair'} ({pair.level})")
        for title, side, colour in _sides(pair):
            outcome = None if pair.outcome is None or not colour else pair.outcome[title == "rejected"]
            _dim(console, title if outcome is None else f"{title}, came to {outcome:g}")
            for message in side:
                trained = bool(colour) and message["role"] == "assistant" and message.get("trainable", True)
                _message(console, message, colour if trained else "", trained)
        shown += 1
    return shown


def _show_conversations(
    console: Console,
    name: str,
    limit: int,
    identifier: str | None,
    raw: bool,
    model: str | None,
    dropped: Counter[str],
    streaming: bool,
) -> int:
    from rich.text import Text

    from manus_fast.agent.protocol import Protocol
    from manus_fast.data.load import load_conversations
    from manus_fast.data.react import message_rows, spans

    chat = None if model is None else _chat_format(model)
    items = load_conversations(name, dropped, None if raw else Protocol(), streaming=streaming)
    shown = 0
    for item in islice((item for item in items if identifier in (None, item.id)), limit):
        _headline(console, shown, f"{item.source} {item.id} ({item.domain})")
        for row in () if chat is None else message_rows(chat, item.messages):
            parts = [(chat.tokenizer.decode(ids.tolist()), trained) for ids, trained in spans(row)]
            console.print(
                *(Text(_visible(text), "green" if trained else "") for text, trained in parts), sep="", soft_wrap=True
            )
            _dim(console, f"{row.loss_mask.sum():,} of {len(row):,} tokens are trained on")
        if chat is None:
            for message in item.messages:
                _message(console, message, "green" if message["trainable"] else "", message["trainable"])
            replies = [message for message in item.messages if message["role"] == "assistant"]
            characters = sum(len(message["content"]) for message in item.messages)
            trained = sum(message["trainable"] for message in replies)
            _dim(console, f"{trained} of {len(replies)} replies are trained on; {characters:,} characters in all")
        shown += 1
    return shown


def _headline(console: Console, before: int, text: str) -> None:
    from rich.text import Text

    if before:
        console.print()
    console.print(Text(_visible(text), "bold"), soft_wrap=True)


def _dim(console: Console, text: str) -> None:
    from rich.text import Text

    console.print(Text(text, "dim"), soft_wrap=True)


def _message(console: Console, message: dict[str, Any], style: str, trained: bool) -> None:
    """One message; where there are no colours, a star marks what is trained on."""
    from rich.text import Text

    label = Text(f"{message['role']}{'*' if trained else ''}: ", "dim")
    console.print(label, Text(_visible(message["content"]), style), sep="", soft_wrap=True)


@app.command()
@_by_flags
def stats(
    name: Name,
    plot: Annotated[str | None, typer.Option("--plot", help="SVG file for a picture of the figures.")] = None,
    streaming: Streaming = False,
) -> None:
    """Counts conversations, turns, lengths, forms of action, sources and domains, and the rows that were skipped; of
    preference pairs levels, sources and lengths of each side."""
    from manus_fast.agent.protocol import Protocol
    from manus_fast.data.load import load_conversations
    from manus_fast.data.preferences import holds_preferences, load_preferences
    from manus_fast.data.statistics import PreferenceStatistics, Statistics

    if plot is not None:
        check_output_file("--plot", plot)
        if not plot.endswith(".svg"):
            raise UserError(f"--plot: expected an .svg file in a folder that exists, got {plot!r}")
    statistics: Statistics | PreferenceStatistics
    if holds_preferences(name, streaming):
        statistics = PreferenceStatistics()
        statistics.take(load_preferences(name, statistics.dropped, streaming))
    else:
        statistics = Statistics(Protocol())
        statistics.take(load_conversations(name, statistics.dropped, streaming=streaming))
    if plot is not None:
        try:
            write_text(plot, statistics.plot(name))
        except OSError as error:
            raise UserError(f"--plot: expected a file that can be written, got {plot!r} ({error.strerror})") from error
    typer.echo(json.dumps(statistics.to_json(), indent=2))


def _source(word: str) -> tuple[str, float]:
    name, equals, weight = word.rpartition("=")
    if not equals:
        return word, 1.0
    try:
        return name, float(weight)
    except ValueError as error:
        raise UserError(f"DATA: expected DATA or DATA=WEIGHT, got {word!r}") from error


def _sides(pair: Preference) -> tuple[tuple[str, list[dict[str, Any]], str], ...]:
    return ("prompt", pair.prompt, ""), ("chosen", pair.chosen, "green"), ("rejected", pair.rejected, "red")


def _chat_format(model: str) -> ChatFormat:
    from manus_fast.agent.context import ChatFormat
    from manus_fast.modeling.load import load_tokenizer

    common.prepare()
    return ChatFormat(load_tokenizer(model))


def _visible(text: str) -> str:
    """Control characters as they are written in code: a dataset may not move the reader's cursor."""
    return "".join(c if c in "\n\t" or c.isprintable() or c.isspace() else repr(c)[1:-1] for c in text)


def _skipped(dropped: Counter[str]) -> None:
    for reason, count in sorted(dropped.items()):
        typer.echo(f"skipped {count}: {reason}", err=True)
