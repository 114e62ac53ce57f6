"""`manus-fast play`: a person plays a registered environment in the terminal, and can leave a demonstration behind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manus_fast.commands import common
from manus_fast.commands.flags import ConfigFile, Overrides
from manus_fast.errors import UserError

if TYPE_CHECKING:
    from manus_fast.commands.recording import Record
    from manus_fast.data.react import Step
    from manus_fast.envs.base import Environment, Task

_HELP = "Type a command or its number; undo takes the last one back, rules shows the rules, quit ends."


_SHOWN = 60
"""Characters of what was typed that an answer repeats."""


def play(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A registered environment, such as household.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    split: Annotated[str | None, typer.Option("--split", help="Default: environment.split of the config.")] = None,
    task: Annotated[int, typer.Option("--task", help="Number of the task in its split.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the world.")] = 0,
    record: Annotated[
        str | None,
        typer.Option("--record", help="JSONL file that a solved game is added to; one that was left is gone on with."),
    ] = None,
    thoughts: Annotated[bool, typer.Option("--thoughts", help="Ask for a thought with each command.")] = False,
) -> None:
    """Lets you play an environment: observations, admissible commands and rewards as an agent has them."""
    from manus_fast.agent.protocol import Protocol
    from manus_fast.commands.recording import Record
    from manus_fast.player import make_environment
    from manus_fast.run_config import Config

    file = common.find_config(config, "") if config else None
    settings = Config.load(file, common.overrides({"environment.name": env}, overrides or ()))
    environment = make_environment(settings)
    tasks = environment.tasks(split or settings.environment.split)
    if not 0 <= task < len(tasks):
        raise UserError(f"--task: expected 0 to {len(tasks) - 1}, got {task}")
    kept = None if record is None else Record(Path(record), tasks[task], seed)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # what is no UTF-8 is no command, and no reason to end
    with contextlib.closing(_Game(environment, tasks[task], seed)) as game:
        try:
            _go_on(game, kept)
            _ask_commands(game, kept, thoughts)
        except KeyboardInterrupt:
            typer.echo()
            _say_kept(game, kept)
            raise
    if kept is None:
        return
    if not game.over:
        _say_kept(game, kept)
        return
    if not game.success:
        kept.keep([], "")
        typer.echo("not recorded: the task was not solved")
        return
    protocol = Protocol(settings.agent.style, settings.agent.show_admissible)
    own = settings.agent.instructions
    system = protocol.system_prompt(environment.instructions if own is None else own)
    try:
        count = kept.add(environment.name, system, game.steps, protocol)
        kept.keep([], "")
    except OSError as error:
        raise UserError(f"--record: expected a file to write to, got {record!r} ({error.strerror})") from error
    typer.echo(f"recorded as demonstration {count} of {record}")


@dataclass
class _Moment:
    """Where the game stood before a command: what undo goes back to."""

    state: bytes | None
    observation: str
    info: dict[str, Any]
    reward: float


class _Game:
    """One task in a world of its own, and what was done in it."""

    def __init__(self, environment: Environment, task: Task, seed: int):
        self.environment, self.task = environment, task
        self.steps: list[Step] = []
        self.over = self.success = False
        self.reward = 0.0
        self._batch = environment.make_batch(1)
        (self.observation,), (self.info,) = self._batch.reset([0], [task], [seed])
        self._past: list[_Moment] = []
        self.readable = getattr(environment, "readable", str)

    @property
    def admissible(self) -> Sequence[str]:
        return self.info.get("admissible") or []

    def step(self, words: str, thought: str) -> tuple[float, bool, str]:
        """Plays one command: its reward, whether the world took it, and how the game ended, or ""."""
        from manus_fast.data.react import Step

        self._past.append(_Moment(_state(self._batch), self.observation, self.info, self.reward))
        known = self.info.get("admissible")
        accepted = known is None or words in known
        self.steps.append(Step(self.observation, thought, words, known, accepted))
        (self.observation,), rewards, terminated, truncated, (self.info,) = self._batch.step([0], [words])
        if "error" in self.info:
            raise RuntimeError(f"{self.environment.name}: {self.info['error']}")
        self.reward += float(rewards[0])
        end = ""
        if terminated[0] or truncated[0] or len(self.steps) >= self.environment.max_steps:
            self.over, self.success = True, bool(self.info.get("success", False))
            end = "solved" if self.success else "over, not solved" if terminated[0] else "cut by the step limit"
            score = f", score {self.info['score']:g}" if "score" in self.info else ""
            end = f"{end} after {len(self.steps)} steps{score}"
        return float(rewards[0]), accepted, end

    def undo(self) -> str:
        """Takes the last command back; why it cannot be, or ""."""
        if not self._past:
            return "there is nothing to take back"
        moment = self._past[-1]
        if moment.state is None:
            return f"{self.environment.name} cannot go back"
        self._batch.restore(0, moment.state)
        self.observation, self.info, self.reward = moment.observation, moment.info, moment.reward
        self._past.pop()
        self.steps.pop()
        return ""

    def close(self) -> None:
        self._batch.close()


def _go_on(game: _Game, kept: Record | None) -> None:
    """Plays what was kept of the game, and shows where it stands."""
    begun = None if kept is None else kept.begun()
    end = ""
    for words, thought in [] if begun is None else begun.played:
        if game.over:
            break
        end = game.step(words, thought)[2]
    if begun is not None and (game.observation != begun.observation or len(game.steps) < len(begun.played)):
        raise UserError(
            f"--record: expected the world that the game in {str(kept.unfinished)!r} was played in, got one that "
            "answers otherwise (without that file games begin anew)"
        )
    instructions = game.environment.instructions.strip()
    typer.echo(f"{game.task.id}\n\n{instructions}\n{_HELP}\n\n{game.readable(game.observation)}")
    if begun is not None:
        typer.echo(f"going on after {len(game.steps)} commands that were kept in {kept.unfinished}")
    if end:
        typer.echo(end)
    else:
        _list(game.admissible)


def _ask_commands(game: _Game, kept: Record | None, thoughts: bool) -> None:
    """Plays on standard input and output until the game is over or its player leaves."""
    while not game.over:
        words = _ask(f"[{len(game.steps)}/{game.environment.max_steps}] > ", game.admissible)
        if words is None or (words == "quit" and words not in game.admissible):
            typer.echo("ended before the task was solved")
            return
        if not words:
            continue
        if words == "rules" and words not in game.admissible:
            typer.echo(f"{game.environment.instructions.strip()}\n{_HELP}")
            _list(game.admissible)
            continue
        if words == "undo" and words not in game.admissible:
            refused = game.undo()
            typer.echo(refused or f"taken back\n\n{game.readable(game.observation)}")
            if not refused:
                _list(game.admissible)
                _keep(game, kept)
            continue
        if words.isdecimal() and words not in game.admissible:
            count = len(game.admissible)
            number = int(words) if len(words) < 10 else count + 1  # Python reads no number of thousands of digits
            if not 1 <= number <= count:
                typer.echo(f"expected {f'a number from 1 to {count}' if count else 'a command'}, got {_short(words)}")
                continue
            words = game.admissible[number - 1]
            typer.echo(words)
        thought = (_ask("why? > ") or "") if thoughts else ""
        reward, accepted, end = game.step(words, thought)
        _keep(game, kept)
        if not accepted:
            typer.echo(f"{_short(words)!r} is no command here (rules shows what is)")
        typer.echo(f"\n{game.readable(game.observation)}\nreward {reward:g} (sum {game.reward:g})")
        if end:
            typer.echo(end)
        else:
            _list(game.admissible)


def _keep(game: _Game, kept: Record | None) -> None:
    if kept is None:
        return
    try:
        kept.keep(game.steps, game.observation)
    except OSError as error:  # no reason to end the game, which can still be recorded
        typer.echo(f"what is played cannot be kept in {kept.unfinished} ({error.strerror})", err=True)


def _say_kept(game: _Game, kept: Record | None) -> None:
    if kept is not None and game.steps and kept.unfinished.exists():
        typer.echo(f"kept {len(game.steps)} commands in {kept.unfinished}: the same command goes on from there")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _state(batch: Any) -> bytes | None:
    """The state to go back to; None for worlds that have no way of saving theirs."""
    try:
        return batch.save(0)
    except (AttributeError, NotImplementedError):
        return None


def _list(commands: Sequence[str]) -> None:
    for number, command in enumerate(commands, 1):
        typer.echo(f"{number:3d}  {command}")


def _ask(prompt: str, commands: Sequence[str] | None = None) -> str | None:
    """One line of standard input, None at its end. A person at a terminal can edit it, go back to earlier lines, and
    have commands completed by the tab key."""
    if not sys.stdin.isatty():
        typer.echo(prompt, nl=False)
        line = sys.stdin.readline()
        if not line:
            typer.echo()
            return None
        return " ".join(line.split())
    import readline

    readline.set_completer(Completer(commands or ()))
    readline.set_completer_delims("")  # a command has spaces
    readline.parse_and_bind("tab: complete")
    try:
        return " ".join(input(prompt).split())
    except EOFError:
        typer.echo()
        return None


class Completer:
    """What readline asks for completions: the commands that begin as the line does."""

    def __init__(self, commands: Sequence[str]):
        self._commands = commands

    def __call__(self, text: str, number: int) -> str | None:
        fitting = [command for command in self._commands if command.startswith(text)]
        return fitting[number] if number < len(fitting) else None
