"""What `manus-fast play --record` leaves: demonstrations of solved games, and games that somebody has yet to end.

A game is kept after every command, in FILE.unfinished beside the file of demonstrations, so that neither Ctrl-C nor a
terminal that goes away takes it. The same command plays it again up to there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manus_fast.errors import UserError
from manus_fast.files import write_text

if TYPE_CHECKING:
    from manus_fast.agent.protocol import Protocol
    from manus_fast.data.react import Step
    from manus_fast.envs.base import Task


@dataclass
class Begun:
    """A game that is not over."""

    played: list[tuple[str, str]]
    """(command, thought) in order."""
    observation: str
    """What the world answered to the last one: by this it is told whether the world is still the same."""


class Record:
    """The file of `--record`, for one task under one seed.

    Raises:
        UserError: a file that cannot be written, or whose name does not end in .jsonl, which is what `data` reads.
    """

    def __init__(self, file: Path, task: Task, seed: int):
        self.file, self._task, self._seed = file, task, seed
        self.unfinished = file.with_name(f"{file.name}.unfinished") if file.name else file
        self._check()

    def begun(self) -> Begun | None:
        """What was played of this task before. Raises UserError for a file that this class has not written."""
        entry = next((entry for entry in self._entries() if self._is_own(entry)), None)
        return entry and Begun([(command, thought) for command, thought in entry["played"]], entry["observation"])

    def keep(self, steps: Sequence[Step], observation: str) -> None:
        """Writes the game as it stands in place of what was kept of it; nothing, where no command was played.

        Raises:
            OSError: the file cannot be written.
        """
        entries = [entry for entry in self._entries() if not self._is_own(entry)]
        if steps:
            played = [[step.action, step.thought] for step in steps]
            own = {"task": self._task.id, "seed": self._seed, "played": played, "observation": observation}
            entries.append(own)
        if not entries:
            self.unfinished.unlink(missing_ok=True)
            return
        write_text(self.unfinished, "".join(json.dumps(entry) + "\n" for entry in entries))

    def add(self, env: str, system: str, steps: Sequence[Step], protocol: Protocol) -> int:
        """Adds the game to the file and returns how many that holds. Ids are numbered: a task may be played twice.

        Raises:
            OSError: the file cannot be written.
        """
        from manus_fast.data.schema import DOMAINS, Conversation

        messages: list[dict[str, Any]] = [{"role": "system", "content": system, "trainable": False}]
        for step in steps:
            seen = protocol.user_message(step.observation, step.admissible)
            messages.append({"role": "user", "content": seen, "trainable": False})
            reply = protocol.render(step.thought, step.action)
            # A thought that quotes an action would read back as another one: it is context then.
            trainable = step.trainable and protocol.target(step.thought, step.action) is not None
            messages.append({"role": "assistant", "content": reply, "trainable": trainable})
        before = self.file.read_bytes() if self.file.exists() else b""
        there = sum(1 for line in before.splitlines() if line.strip())
        row = Conversation(f"{self._task.id}#{there}", "human", DOMAINS.get(env, env), messages)
        with self.file.open("a", encoding="utf-8") as out:
            start = "\n" if before and not before.endswith(b"\n") else ""  # a last line without its end stays one
            out.write(start + json.dumps(row.to_json(), ensure_ascii=False) + "\n")
        return there + 1

    def _is_own(self, entry: dict[str, Any]) -> bool:
        return (entry["task"], entry["seed"]) == (self._task.id, self._seed)

    def _entries(self) -> list[dict[str, Any]]:
        if not self.unfinished.exists():
            return []
        entries = []
        try:
            for line in self.unfinished.read_bytes().splitlines():
                entry = json.loads(line)
                if not all(isinstance(word, str) for pair in entry["played"] for word in pair) or not (
                    isinstance(entry["observation"], str) and {len(pair) for pair in entry["played"]} == {2}
                ):
                    raise KeyError("played")
                entries.append({name: entry[name] for name in ("task", "seed", "played", "observation")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--record: expected games that play has kept in {str(self.unfinished)!r}, got something else "
                "(without that file games begin anew)"
            ) from error
        return entries

    def _check(self) -> None:
        """Before the game rather than after it: whether the file can be written."""
        file = self.file
        try:
            if not file.name or not file.parent.is_dir() or (file.exists() and not file.is_file()):
                raise UserError(f"--record: expected a file in a folder that exists, got {str(file)!r}")
            if file.suffix != ".jsonl":
                raise UserError(f"--record: expected a file named .jsonl, which data and sft read, got {str(file)!r}")
            there = file.exists()
            with file.open("a"):
                pass
            if not there:
                file.resolve().unlink()  # of a link to nothing, what it names
        except OSError as error:
            raise UserError(f"--record: expected a file to write to, got {str(file)!r} ({error.strerror})") from error
