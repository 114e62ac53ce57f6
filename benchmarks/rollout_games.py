"""The games that rollouts are measured on: household tasks in ReAct form, with scripted commands."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.protocol import Protocol
from manus_fast.envs import make
from manus_fast.envs.base import InlineEnvs
from manus_fast.envs.config import RewardConfig
from manus_fast.modeling.tiny import make_tokenizer, split_words
from manus_fast.rewards.shaping import make_shape
from manus_fast.rollout.scheduler import EpisodeSpec, Rollout, RolloutConfig
from manus_fast.rollout.seeds import derive, episode_seed

EXPERT_SHARE = 0.7
MAX_REPLY = 128


@dataclasses.dataclass
class Case:
    """What is played."""

    slots: int
    episodes: int
    max_steps: int
    max_length: int

    @property
    def name(self) -> str:
        return f"household, {self.episodes} episodes, {self.slots} slots"


class ScriptedWorlds(InlineEnvs):
    """Worlds that get a scripted command in place of the parsed one; see the module's docstring."""

    def __init__(self, batch: Any):
        super().__init__(batch)
        self.script_seconds = 0.0
        """Spent on the script itself."""
        self._names: dict[int, list[int]] = {}
        self._last: dict[int, list[str]] = {}

    def send_reset(self, slot, task, seed):
        super().send_reset(slot, task, seed)
        self._names[slot] = [derive(seed, sum(map(ord, task.id))), 0]

    def poll(self, timeout):
        if self._steps:
            begin = time.perf_counter()
            slots = [slot for slot, _ in self._steps]
            actions, _ = self.batch.expert(slots)
            steps = []
            for slot, action in zip(slots, actions, strict=True):
                name = self._names[slot]
                name[1] += 1
                draw = derive(*name)
                others = self._last[slot]
                expert = draw % 1000 < 1000 * EXPERT_SHARE
                steps.append((slot, action if expert or not others else others[draw // 1000 % len(others)]))
            self._steps = steps
            self.script_seconds += time.perf_counter() - begin
        answers = super().poll(timeout)
        for slot, result in answers:
            self._last[slot] = result.info.get("admissible", [])
        return answers


class Games:
    """Tasks, chat format and loop; the engine is the caller's.

    Args:
        case: what is played.
        tokenizer: with a chat template; None makes one of the games' own words.
    """

    def __init__(self, case: Case, tokenizer: Any = None):
        self.case = case
        self.environment = make("household", max_steps=case.max_steps, num_train=max(case.episodes, 64), num_valid=4)
        self.tasks = list(self.environment.tasks("train"))[: case.episodes]
        self.protocol = Protocol()
        system = self.protocol.system_prompt(self.environment.instructions)
        batch = self.environment.make_batch(min(64, len(self.tasks)))
        slots = list(range(batch.slots))
        texts, infos = batch.reset(slots, self.tasks[: batch.slots], [0] * batch.slots)
        spoken = [command for info in infos for command in info["admissible"]]
        said = [system, *texts, *spoken, "Nothing happens. You open close pick put"]
        self.words = {word for text in said for word in split_words(text)}
        self.chat = ChatFormat(tokenizer or make_tokenizer(said))

    def rollout(self, engine: Any, kind: type[Rollout] = Rollout, staleness: int = 0) -> Rollout:
        """Over worlds of its own."""
        case = self.case
        config = RolloutConfig(
            slots=case.slots,
            max_turn_tokens=MAX_REPLY,
            max_traj_tokens=1 << 20,
            max_length=case.max_length,
            staleness=staleness,
        )
        envs = ScriptedWorlds(self.environment.make_batch(case.slots))
        shape = make_shape(RewardConfig())
        return kind(engine, envs, self.environment, Context(self.chat), self.protocol, config, shape)

    def specs(self) -> list[EpisodeSpec]:
        return [EpisodeSpec(task, episode_seed(0, 0, n), n, 0) for n, task in enumerate(self.tasks)]
