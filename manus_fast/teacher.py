"""A teacher that plays an environment: the same turn loop, protocol and limits as a model of ours, over an endpoint.

    player = TeacherPlayer(config, "runs/teacher")       # model.path=gpt-4o
    episodes = player.play(player.environment.tasks("train")[:100])

The folder keeps every reply and every finished episode, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from manus_fast.agent.messages import MessageContext
from manus_fast.agent.trajectory import Trajectory
from manus_fast.envs.base import Environment, Task
from manus_fast.files import write_text
from manus_fast.player import Play, play_specs
from manus_fast.rollout.endpoint import find_teacher
from manus_fast.rollout.engines.openai import OpenAIEngine
from manus_fast.rollout.journal import Journal, read_lines
from manus_fast.run_folder import Lock, prepare_folder

if TYPE_CHECKING:
    from manus_fast.run_config import Config


class TeacherPlayer(Play):
    """See the module's docstring.

    Args:
        config: model.path names the teacher; its agent, environment, rollout and endpoint blocks are used.
        folder: gets settings.json, replies.jsonl and episodes.jsonl; an earlier run's are gone on from.
        environment: where it exists already; None makes the one that the config names.

    Raises:
        ValueError: no such teacher, no key, or a folder that belongs to a run with other settings.
    """

    def __init__(self, config: Config, folder: str | os.PathLike[str], environment: Environment | None = None):
        self.teacher = find_teacher(config.model.path, config.endpoint)
        if self.teacher.reasoning and config.agent.style == "tags":
            raise ValueError(
                f"agent.style: expected react or act for {self.teacher.name}, whose reasoning stands in <think> tags, "
                "got 'tags'"
            )
        # The teacher's tokens are not ours, and its reasoning is long: its own limit holds, for each reply alone.
        limits = {"max_turn_tokens": self.teacher.max_tokens, "max_traj_tokens": 1 << 30}
        slots = min(config.rollout.slots, config.endpoint.concurrency)
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, slots=slots, **limits))
        super().__init__(config, environment)
        self.context = MessageContext(config.agent.context, config.agent.window)
        self.folder = prepare_folder(folder)
        self._lock = Lock(self.folder)  # two runs would each pay for what the other has paid for
        self._settings: dict[str, Any] | None = None
        self._finished: dict[tuple[str, int], Trajectory] = {}
        self.resumed = 0
        """Episodes of the latest call that an earlier run had finished."""
        self.engine = OpenAIEngine(self.teacher, config.endpoint, Journal(self.folder / "replies.jsonl"))

    def play(
        self,
        tasks: Sequence[Task],
        temperature: float | None = None,
        seed: int = 0,
        on_done: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Plays each task once, in order, but for those that an earlier run has finished.

        Args:
            temperature: None takes the teacher's own.
            on_done: is called with each episode as it ends, finished ones first.

        Raises:
            BudgetReached: the cost limit; `finished` has what is there.
            EndpointRefused: the endpoint answers nothing at all.
            ValueError: the folder belongs to a run with other settings.
        """
        temperature = self.teacher.temperature if temperature is None else temperature
        self._claim(temperature, seed)
        specs = play_specs(tasks, seed)
        missing = [spec for spec in specs if (spec.task.id, spec.seed) not in self._finished]
        self.resumed = len(specs) - len(missing)
        failed: dict[tuple[str, int], Trajectory] = {}
        if on_done is not None:
            for episode in self.finished(tasks, seed):
                on_done(episode)
        with (self.folder / "episodes.jsonl").open("a", encoding="utf-8") as file:

            def keep(episode: Trajectory) -> None:
                if episode.valid:
                    file.write(json.dumps(episode.to_json(), ensure_ascii=False) + "\n")
                    file.flush()
                (self._finished if episode.valid else failed)[(episode.task, episode.seed)] = episode
                if on_done is not None:
                    on_done(episode)

            if missing:
                self._run(missing, temperature, self.environment, keep)
        both = {**failed, **self._finished}
        return [both[(spec.task.id, spec.seed)] for spec in specs]

    def finished(self, tasks: Sequence[Task], seed: int = 0) -> list[Trajectory]:
        """The valid episodes of these tasks that are there, in the order of `tasks`."""
        keys = [(spec.task.id, spec.seed) for spec in play_specs(tasks, seed)]
        return [self._finished[key] for key in keys if key in self._finished]

    def close(self) -> None:
        self.engine.close()
        self._lock.release()

    def _claim(self, temperature: float, seed: int) -> None:
        """Makes the folder this run's own, or checks that it is, and reads what is there."""
        config = self.config
        settings = {
            "teacher": self.teacher.name,
            "model": self.teacher.model,
            "temperature": temperature,
            "top_p": config.rollout.top_p,
            "seed": seed,
            "max_tokens": self.teacher.max_tokens,
            "max_consecutive_invalid": config.rollout.max_consecutive_invalid,
            "agent": dataclasses.asdict(config.agent),
            "environment": {**dataclasses.asdict(config.environment), "split": None},
            "rewards": config.rewards,
        }
        settings = json.loads(json.dumps(settings))
        file = self.folder / "settings.json"
        if self._settings is None and file.exists():
            self._settings = json.loads(file.read_text())
            for record in read_lines(self.folder / "episodes.jsonl"):
                episode = Trajectory.from_json(record)
                self._finished[(episode.task, episode.seed)] = episode
        if self._settings is None:
            write_text(file, json.dumps(settings, indent=1) + "\n")
            self._settings = settings
        differing = sorted(name for name in settings if settings[name] != self._settings.get(name))
        if differing:
            raise ValueError(
                f"--output_dir: expected a new folder or one with the same {', '.join(differing)}, got {self.folder}"
            )
