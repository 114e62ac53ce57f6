"""`manus-fast play`: a person plays a registered environment in the terminal, and can leave a demonstration behind."""

from __future__ import annotations

import json
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
    from manus_fast.agent.protocol import Protocol
    from manus_fast.data.react import Step
    from manus_fast.envs.base import Environment, Task

_HELP = "Type a command or its number; undo takes the last one back, rules shows the rules, quit ends."


@dataclass
class _Moment:
    """Where the game stood before a command: what undo goes back to."""

    state: bytes | None
    observation: str
    info: dict[str, Any]
    reward: float


def play(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A registered environment, such as household.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    split: Annotated[str | None, typer.Option("--split", help="Default: environment.split of the config.")] = None,
    task: Annotated[int, typer.Option("--task", help="Number of the task in its split.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the world.")] = 0,
    record: Annotated[str | None, typer.Option("--record", help="JSONL file that a solved game is added to.")] = None,
    thoughts: Annotated[bool, typer.Option("--thoughts", help="Ask for a thought with each command.")] = False,
) -> None:
    """Lets you play an environment: observations, admissible commands and rewards as an agent has them."""
    from manus_fast.agent.protocol import Protocol
    from manus_fast.player import make_environment
    from manus_fast.run_config import Config

    file = common.find_config(config, "") if config else None
    settings = Config.load(file, common.overrides({"environment.name": env}, overrides or ()))
    environment = make_environment(settings)
    tasks = environment.tasks(split or settings.environment.split)
    if not 0 <= task < len(tasks):
        raise UserError(f"--task: expected 0 to {len(tasks) - 1}, got {task}")
    if record is not None:
        _check_record(Path(record))
    success, steps = _game(environment, tasks[task], seed, thoughts)
    if record is None:
        return
    if not success:
        typer.echo("not recorded: the task was not solved")
        return
    protocol = Protocol(settings.agent.style, settings.agent.show_admissible)
    own = settings.agent.instructions
    system = protocol.system_prompt(environment.instructions if own is None else own)
    count = _write(Path(record), tasks[task], environment.name, system, steps, protocol)
    typer.echo(f"recorded as demonstration {count} of {record}")


def _game(environment: Environment, task: Task, seed: int, thoughts: bool) -> tuple[bool, list[Step]]:
    """Plays one task on standard input and output: whether it was solved, and what was done."""
    from manus_fast.data.react import Step

    batch = environment.make_batch(1)
    try:
        (observation,), (info,) = batch.reset([0], [task], [seed])
        past: list[_Moment] = []
        steps: list[Step] = []
        reward = 0.0
        readable = getattr(environment, "readable", str)
        typer.echo(f"{task.id}\n\n{environment.instructions.strip()}\n{_HELP}\n\n{readable(observation)}")
        _list(info)
        while True:
            words = _ask(f"[{len(steps)}/{environment.max_steps}] > ", info.get("admissible"))
            admissible = info.get("admissible") or []
            if words is None or (words == "quit" and words not in admissible):
                typer.echo("ended before the task was solved")
                return False, steps
            if not words:
                continue
            if words == "rules" and words not in admissible:
                typer.echo(f"{environment.instructions.strip()}\n{_HELP}")
                _list(info)
                continue
            if words == "undo" and words not in admissible:
                if not past:
                    typer.echo("there is nothing to take back")
                elif past[-1].state is None:
                    typer.echo(f"{environment.name} cannot go back")
                else:
                    moment = past.pop()
                    batch.restore(0, moment.state)
                    observation, info, reward = moment.observation, moment.info, moment.reward
                    steps.pop()
                    typer.echo(f"taken back\n\n{readable(observation)}")
                    _list(info)
                continue
            if words.isdecimal() and words not in admissible:
                if not 1 <= int(words) <= len(admissible):
                    wanted = f"a number from 1 to {len(admissible)}" if admissible else "a command"
                    typer.echo(f"expected {wanted}, got {words}")
                    continue
                words = admissible[int(words) - 1]
                typer.echo(words)
            thought = (_ask("why? > ") or "") if thoughts else ""
            past.append(_Moment(_state(batch), observation, info, reward))
            known = info.get("admissible")
            accepted = known is None or words in known
            steps.append(Step(observation, thought, words, known, accepted))
            (observation,), rewards, terminated, truncated, (info,) = batch.step([0], [words])
            if "error" in info:
                raise RuntimeError(f"{environment.name}: {info['error']}")
            reward += float(rewards[0])
            if not accepted:
                typer.echo(f"{words!r} is no command here (rules shows what is)")
            typer.echo(f"\n{readable(observation)}\nreward {float(rewards[0]):g} (sum {reward:g})")
            if terminated[0] or truncated[0] or len(steps) >= environment.max_steps:
                success = bool(info.get("success", False))
                end = "solved" if success else "over, not solved" if terminated[0] else "cut by the step limit"
                score = f", score {info['score']:g}" if "score" in info else ""
                typer.echo(f"{end} after {len(steps)} steps{score}")
                return success, steps
            _list(info)
    finally:
        batch.close()


def _state(batch: Any) -> bytes | None:
    """The state to go back to; None for worlds that have no way of saving theirs."""
    try:
        return batch.save(0)
    except (AttributeError, NotImplementedError):
        return None


def _list(info: dict[str, Any]) -> None:
    for number, command in enumerate(info.get("admissible") or [], 1):
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


def _check_record(file: Path) -> None:
    """Before the game rather than after it: whether the file can be written."""
    try:
        if not file.resolve().parent.is_dir() or file.is_dir():
            raise UserError(f"--record: expected a file in a folder that exists, got {str(file)!r}")
        there = file.exists()
        with file.open("a"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        raise UserError(f"--record: expected a file to write to, got {str(file)!r} ({error.strerror})") from error


def _write(file: Path, task: Task, env: str, system: str, steps: list[Step], protocol: Protocol) -> int:
    """Adds the game to the file and returns how many it holds. Ids are numbered: a task may be played twice."""
    from manus_fast.data.schema import DOMAINS, Conversation

    messages: list[dict[str, Any]] = [{"role": "system", "content": system, "trainable": False}]
    for step in steps:
        seen = protocol.user_message(step.observation, step.admissible)
        messages.append({"role": "user", "content": seen, "trainable": False})
        reply = protocol.render(step.thought, step.action)
        messages.append({"role": "assistant", "content": reply, "trainable": step.trainable})
    before = file.read_bytes() if file.exists() else b""
    there = sum(1 for line in before.splitlines() if line.strip())
    row = Conversation(f"{task.id}#{there}", "human", DOMAINS.get(env, env), messages)
    with file.open("a", encoding="utf-8") as out:
        start = "\n" if before and not before.endswith(b"\n") else ""  # a last line without its end stays one
        out.write(start + json.dumps(row.to_json(), ensure_ascii=False) + "\n")
    return there + 1
