"""A model that plays an environment: worlds, engine, chat format and rollout, put together from a config.

    player = Player(config, model, tokenizer)
    episodes = player.play(player.environment.tasks("valid_unseen"), temperature=0.0)

The trainer collects through it, `manus-fast eval` measures through it, and so can a library user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.messages import MessageContext
from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import Trajectory
from manus_fast.envs import make
from manus_fast.envs.base import Environment, Task
from manus_fast.modeling.load import end_ids
from manus_fast.modeling.lora import has_adapters, merge
from manus_fast.ranks import Ranks
from manus_fast.rewards.shaping import make_shape
from manus_fast.rollout.engine import Completion, Engine
from manus_fast.rollout.engines import make_engine
from manus_fast.rollout.scheduler import EpisodeSpec, Rollout, RolloutStats
from manus_fast.rollout.seeds import derive, episode_seed
from manus_fast.search.base import Tree
from manus_fast.search.config import SearchConfig
from manus_fast.search.driver import ScoreRows, Searcher, SearchStats

if TYPE_CHECKING:
    from manus_fast.run_config import Config

# Keeps the seeds of measuring apart from those of training: any number that no iteration reaches.
_PLAY = 1 << 40


def make_environment(
    config: Config, options: Mapping[str, Any] | None = None, max_steps: int | None = None
) -> Environment:
    """The environment that the config names; `options` and `max_steps` go over the config's.

    An environment that plays in worker processes gets `training.rollout_workers` of them, unless its own option
    `workers` says otherwise; the others step their worlds in threads and take no notice.

    Raises:
        ValueError: unknown name or option, or a backend that this environment does not have.
    """
    block = config.environment
    options = {**block.options, **(options or {})}
    if max_steps is not None or block.max_steps is not None:
        options["max_steps"] = block.max_steps if max_steps is None else max_steps
    if block.backend != "auto":
        options["backend"] = block.backend
    environment = make(block.name, **options)
    workers = config.training.rollout_workers
    if workers is not None and getattr(environment, "workers", workers) is None:
        environment.workers = workers
    return environment


def play_specs(tasks: Sequence[Task], seed: int) -> list[EpisodeSpec]:
    """One episode a task, with seeds that hang on the task's place alone."""
    return [EpisodeSpec(task, derive(_PLAY, seed, number), number, 0) for number, task in enumerate(tasks)]


class Play:
    """Whoever plays an environment turn by turn, over an engine and a context: a model of ours, or a teacher.

    Args:
        config: its agent, environment, rollout and training.seed are used.
        environment: where it exists already; None makes the one that the config names.
    """

    engine: Engine
    context: Context | MessageContext
    rollout_kind: type[Rollout] = Rollout
    """The loop that plays."""

    def __init__(self, config: Config, environment: Environment | None = None):
        self.config = config
        self.environment = environment or make_environment(config)
        self.protocol = Protocol(config.agent.style, config.agent.show_admissible)
        self.stats = RolloutStats()

    @property
    def system_prompt(self) -> str:
        """What every conversation begins with."""
        return self._system(self.environment)

    def play(self, tasks: Sequence[Task], temperature: float = 0.0, seed: int = 0) -> list[Trajectory]:
        """Plays each task once, in order; the same seeds whatever model plays, so that results can be paired."""
        return self._run(play_specs(tasks, seed), temperature, self.environment)

    def _system(self, environment: Environment) -> str:
        own = self.config.agent.instructions
        return self.protocol.system_prompt(environment.instructions if own is None else own)

    def _run(
        self,
        specs: Sequence[EpisodeSpec],
        temperature: float,
        environment: Environment,
        on_done: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        rollout = self._rollout(len(specs), temperature, environment)
        try:
            trajectories = rollout.collect(specs, on_done)
            self.stats = rollout.stats
        finally:
            rollout.envs.close()
        return trajectories

    def _rollout(self, episodes: int, temperature: float, environment: Environment) -> Rollout:
        """Over worlds of its own, for at most so many episodes at a time."""
        config = dataclasses.replace(self.config.rollout, temperature=temperature)
        envs = environment.make_async(min(config.episodes, episodes))
        try:
            return self.rollout_kind(
                self.engine,
                envs,
                environment,
                self.context,
                self.protocol,
                config,
                make_shape(self.config.environment.reward_config, self.config.rewards),
                system=self._system(environment),
                stray=self._stray,
            )
        except BaseException:
            envs.close()
            raise

    def _stray(self, completion: Completion) -> None:
        """The engine completed what another rollout over it had asked for."""


class Player(Play):
    """See the module's docstring.

    Args:
        config: its agent, environment, rollout and training.seed are used.
        model: a causal LM; an engine of the same process samples from these very weights where it can.
        tokenizer: with an end-of-sequence token.
        environment: where it exists already; None makes the one that the config names.
        ranks: of the run. Each plays its share of the episodes, and all are given all of them.
        engine: one that an earlier player of this process opened for the same config; it takes over the model's
            weights, and that player can't play any more. None opens one, which takes vLLM most of a minute.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        tokenizer: Any,
        environment: Environment | None = None,
        ranks: Ranks | None = None,
        engine: Engine | None = None,
    ):
        super().__init__(config, environment)
        self.ranks = ranks or Ranks()
        self.chat = ChatFormat(tokenizer, end_ids(model))
        self.context = Context(self.chat, config.agent.context, config.agent.window)
        if engine is None:
            rank = 0 if config.model.lora is None else config.model.lora.rank
            engine = make_engine(config.rollout, model, self.chat.end_ids, getattr(torch, config.model.dtype), rank)
        else:
            engine.wake()
            theirs = getattr(engine, "model", None)
            if theirs is not None and theirs is not model and has_adapters(theirs):
                merge(theirs)  # what the earlier player trained and this one's weights have names of their own for
            engine.load(model.named_parameters(), 0)
        self.engine = engine
        self.search_stats = SearchStats()
        self._ahead: Rollout | None = None

    def collect(
        self,
        tasks: Sequence[Task],
        iteration: int,
        members: int = 1,
        first_group: int = 0,
        environment: Environment | None = None,
        ahead: Sequence[Sequence[Task]] = (),
    ) -> list[Trajectory]:
        """Plays each task with `members` episodes at the training temperature, for training.

        Args:
            tasks: one for each group.
            iteration: with the run's seed and the group it fixes all random numbers.
            first_group: number of the first task's group, where an iteration plays more than once.
            environment: whose tasks they are; None: the player's own.
            ahead: tasks of the groups from 0 on of iterations to come, an item for each. Slots that are free begin
                them, and they go on in the calls that follow; as many as `rollout.staleness`.

        Raises:
            ValueError: more iterations ahead than the staleness allows.
        """
        limit = self.config.rollout.staleness
        if len(ahead) > limit:
            raise ValueError(f"ahead: expected at most rollout.staleness = {limit} iterations, got {len(ahead)}")
        specs = self._specs(tasks, iteration, members, first_group)
        if limit == 0:
            return self._run(specs, self.config.rollout.temperature, environment or self.environment)
        later = [self._specs(part, iteration + n, members) for n, part in enumerate(ahead, 1)]
        return self._go_on(specs, later, environment or self.environment)

    def _specs(self, tasks: Sequence[Task], iteration: int, members: int, first_group: int = 0) -> list[EpisodeSpec]:
        return [
            EpisodeSpec(task, episode_seed(self.config.training.seed, iteration, group), group, member)
            for group, task in enumerate(tasks, first_group)
            for member in range(members)
        ]

    def _go_on(
        self, specs: list[EpisodeSpec], later: list[list[EpisodeSpec]], environment: Environment
    ) -> list[Trajectory]:
        """Plays the episodes in worlds that stay open, among others that were begun ahead; this rank its share."""
        if self._ahead is not None and self._ahead.environment is not environment:
            self.stop()
        if self._ahead is None:
            rollout = self.config.rollout
            self._ahead = self._rollout(rollout.episodes, rollout.temperature, environment)
        mine, *others = ([part[n] for n in self.ranks.share(len(part))] for part in (specs, *later))
        trajectories = self._ahead.collect(mine, ahead=[spec for part in others for spec in part])
        self.stats = self._ahead.stats
        return self._of_all(trajectories)

    def _of_all(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Every rank's episodes in order, and in `stats` their figures together."""
        if self.ranks.size == 1:
            return trajectories
        self.stats = RolloutStats.joined(self.ranks.gather([self.stats]))
        return self.ranks.gather(trajectories)

    def _stray(self, completion: Completion) -> None:
        if self._ahead is not None:
            self._ahead.receive(completion)

    def stop(self) -> None:
        """Gives up episodes that were begun ahead, and closes their worlds."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead.envs.close()
            self._ahead = None

    def search(
        self,
        tasks: Sequence[Task],
        seed: int = 0,
        config: SearchConfig | None = None,
        score: ScoreRows | None = None,
        judge: ScoreRows | None = None,
    ) -> list[Tree]:
        """Searches each task once, in order, with the worlds and seeds of `play`.

        Args:
            config: None takes the config's `search` block.
            score: values of rows, where `config.value` is "model".
            judge: scores of the last rows of whole episodes, where `config.judge` is "model".
        """
        searcher = Searcher(
            self.engine,
            self.environment,
            self.context,
            self.protocol,
            self.config.rollout,
            self.config.search if config is None else config,
            make_shape(self.config.environment.reward_config, self.config.rewards),
            system=self.system_prompt,
            score=score,
            judge=judge,
        )
        trees = searcher.run(tasks, [derive(_PLAY, seed, number) for number in range(len(tasks))])
        self.search_stats = searcher.stats
        return trees

    def rest(self) -> None:
        """The engine gives back the memory that `rollout.sleep` says, until `load`."""
        if self.config.rollout.sleep:
            self.engine.sleep(self.config.rollout.sleep)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hands new weights to the engine."""
        self.engine.wake()
        self.engine.load(weights, version)

    def _run(
        self,
        specs: Sequence[EpisodeSpec],
        temperature: float,
        environment: Environment,
        on_done: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Plays the episodes, this rank its share, and returns all of them in order."""
        if self.ranks.size == 1:
            return super()._run(specs, temperature, environment, on_done)
        mine = self.ranks.share(len(specs))
        self.stats = RolloutStats()  # of a rank without a share
        trajectories = super()._run(specs[mine.start : mine.stop], temperature, environment, on_done) if mine else []
        return self._of_all(trajectories)
