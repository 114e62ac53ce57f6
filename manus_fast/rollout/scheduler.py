"""Plays many episodes at once: one slot per trajectory, no lockstep.

A request enters the engine the moment its environment answered; an environment steps the moment its reply is done; a
finished episode never generates, and its slot starts the next episode at once. What is sampled depends on the names
of an episode (run seed, iteration, group, member, turn) and the weights only, never on slots or arrival order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from manus_fast.agent.context import Context, Conversation
from manus_fast.agent.protocol import NO_ACTION, Protocol
from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.envs.base import AsyncEnvs, Environment, StepResult, Task
from manus_fast.rewards.shaping import Shape, TurnFacts
from manus_fast.rollout.engine import NUMBERS, Completion, Engine, Request
from manus_fast.rollout.seeds import turn_seed

# How long to wait for whichever side has work, seconds: short, because the other side may answer meanwhile.
_WAIT = 0.05
_ATTEMPTS = 2


@dataclass
class RolloutConfig:
    """How episodes are played.

    Raises:
        ValueError: a value out of range.
    """

    engine: str = "hf"
    """What samples: hf | vllm | openai | auto (vllm for a model on a GPU where it is installed, else hf)."""
    vllm_eager: bool = False
    """vLLM without torch.compile and CUDA graphs: it starts in seconds and decodes slower."""
    sleep: int = 0
    """What the engine gives back while the weights are updated: 0 nothing, 1 its cache, 2 its weights too."""
    slots: int = 64
    """Requests that the engine samples at the same time, per process."""
    oversubscription: float = 1.0
    """Episodes under way for each slot: above 1 where worlds are slow, so that slots decode for one episode while
    another waits for its world."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Tokens kept; 0 keeps all."""
    min_p: float = 0.0
    max_turn_tokens: int = 128
    """Sampled tokens of one reply."""
    max_traj_tokens: int = 4096
    """Sampled tokens of one episode, over all its replies; observations do not count."""
    max_length: int = 4096
    """Tokens that the engine holds of an episode, prompt and reply together; the model's own limit goes before it."""
    max_consecutive_invalid: int = 0
    """Turns in a row without an admissible action after which an episode is cut; 0 never cuts."""
    cut_is_format_failure: bool = False
    """Whether a reply that a token limit cut counts against format and action."""
    staleness: int = 0
    """Policy versions that sampled tokens may lag behind the update; 0 is strictly on policy. Every episode is played
    to its end before the update, so that no token lags, whatever the bound."""
    correction: str = "token_truncate"
    """Correction of the difference between sampling and training policy."""

    def __post_init__(self) -> None:
        for name, low in (
            ("slots", 1),
            ("oversubscription", 1),
            ("max_turn_tokens", 1),
            ("max_traj_tokens", 1),
            ("max_length", 2),
            ("max_consecutive_invalid", 0),
            ("staleness", 0),
            ("temperature", 0),
            ("top_k", 0),
        ):
            if not getattr(self, name) >= low:
                raise ValueError(f"rollout.{name}: expected a number >= {low}, got {getattr(self, name)}")
        if self.sleep not in (0, 1, 2):
            raise ValueError(f"rollout.sleep: expected 0, 1 or 2, got {self.sleep}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p: expected a number in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"rollout.min_p: expected a number in [0, 1), got {self.min_p}")

    @property
    def episodes(self) -> int:
        """Episodes that are under way at the same time, per process."""
        return math.ceil(self.slots * self.oversubscription)


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play. `seed` resets its world; the replies' seeds follow from it, `group` and `member`."""

    task: Task
    seed: int
    group: int
    member: int


@dataclass
class RolloutStats:
    """What one `collect` took and met. Counts are of episodes unless the name says otherwise."""

    episodes: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens sent as prompts, counted anew each turn."""
    seconds: float = 0.0
    engine_seconds: float = 0.0
    """Time inside `engine.poll` while the engine had requests."""
    env_seconds: float = 0.0
    """Time inside `envs.poll`."""
    truncated: int = 0
    invalid: int = 0
    """Given up after a second failure: masked, never a reward of zero."""
    failed: int = 0
    """Failures of an environment or the engine, attempts that were repeated included."""
    retried: int = 0
    cut_turns: int = 0
    """Turns that a token limit ended."""

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """Of two calls together: everything is a sum."""
        return RolloutStats(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    @classmethod
    def joined(cls, parts: Sequence[RolloutStats]) -> RolloutStats:
        """Of collections made at the same time: counts added, the longest time, the mean of other times."""
        total = cls()
        for name, default in vars(cls()).items():
            values = [getattr(part, name) for part in parts]
            joined = sum(values) if isinstance(default, int) else sum(values) / len(values)
            setattr(total, name, max(values) if name == "seconds" else joined)
        return total

    @property
    def tokens_per_second(self) -> float:
        return self.sampled_tokens / self.seconds if self.seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """Named figures for tracking."""
        numbers = {f"rollout/{name}": float(value) for name, value in vars(self).items()}
        return {**numbers, "rollout/tokens_per_second": self.tokens_per_second, "rollout/idle_share": self.idle_share}

    @property
    def idle_share(self) -> float:
        """Share of the time in which the engine was not advancing any request."""
        return 1.0 - self.engine_seconds / self.seconds if self.seconds else 0.0


@dataclass
class _Episode:
    """A slot's occupant."""

    index: int
    spec: EpisodeSpec
    session: int
    trajectory: Trajectory
    attempt: int = 1
    conversation: Conversation | None = None
    prompt: np.ndarray | None = None
    """Of the reply being sampled."""
    observation: str = ""
    admissible: list[str] | None = None
    invalid_run: int = 0
    progress: float = 0.0
    excused: bool = False


class Rollout:
    """Episodes out of an engine and environments.

    Args:
        engine: what samples; see rollout/engine.py.
        envs: the worlds; `min(config.episodes, envs.slots)` of them are used.
        environment: whose tasks are played: its name, instructions and step limit.
        context: chat format and how much of an episode each prompt shows.
        protocol: prompt text and parser.
        config: limits and sampling.
        shape: reward of a turn by parts; None: the environment's alone.
        system: system message of every conversation; None: the protocol's, with the environment's instructions.
    """

    def __init__(
        self,
        engine: Engine,
        envs: AsyncEnvs,
        environment: Environment,
        context: Context,
        protocol: Protocol,
        config: RolloutConfig,
        shape: Shape | None = None,
        system: str | None = None,
    ):
        self.engine = engine
        self.envs = envs
        self.environment = environment
        self.context = context
        self.protocol = protocol
        self.config = config
        self.shape = shape
        self.stats = RolloutStats()
        self._system = protocol.system_prompt(environment.instructions) if system is None else system
        self._playing: dict[int, _Episode] = {}  # by slot
        self._asked: dict[int, int] = {}  # request id -> slot
        self._stepping: set[int] = set()  # slots that wait for their environment
        self._waiting: deque[int] = deque()
        self._specs: Sequence[EpisodeSpec] = ()
        self._done: list[Trajectory | None] = []
        self._on_done: Callable[[Trajectory], None] | None = None

    def collect(
        self, specs: Sequence[EpisodeSpec], on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Plays every episode once and returns the trajectories in the order of `specs`.

        An episode whose environment or engine fails is played again from its start, once; after a second failure its
        trajectory carries `error` and is invalid. `stats` describes the latest call. `on_done` is called with each
        trajectory as it ends.
        """
        self.stats = RolloutStats(episodes=len(specs))
        self._specs, self._done, self._on_done = specs, [None] * len(specs), on_done
        self._waiting = deque(range(len(specs)))
        begin = time.perf_counter()
        while self._stepping:  # what an interrupted call had asked its worlds is no answer to this one
            self._stepping.difference_update(slot for slot, _ in self.envs.poll(_WAIT))
        for slot in range(min(self.config.episodes, self.envs.slots, len(specs))):
            self._start(slot, self._waiting.popleft())
        try:
            while self._playing:
                self._poll_envs()
                self._poll_engine()
        finally:
            for id in self._asked:  # only after an exception: nothing may go on generating
                self.engine.abort(id)
            for episode in self._playing.values():
                self.engine.end_session(episode.session)
            self._asked.clear()
            self._playing.clear()
        self.stats.seconds = time.perf_counter() - begin
        return list(self._done)

    def _poll_envs(self) -> None:
        if not self._stepping:
            return
        begin = time.perf_counter()
        answers = self.envs.poll(0.0 if self._asked else _WAIT)
        self.stats.env_seconds += time.perf_counter() - begin
        for slot, result in answers:
            self._stepping.discard(slot)
            self._on_answer(slot, result)

    def _poll_engine(self) -> None:
        if not self._asked:
            return
        begin = time.perf_counter()
        completions = self.engine.poll(0.0 if self._stepping else _WAIT)
        self.stats.engine_seconds += time.perf_counter() - begin
        for completion in completions:
            slot = self._asked.pop(completion.id, None)
            if slot is not None:  # else: a request that an interrupted call had aborted
                self._on_reply(slot, completion)

    def _start(self, slot: int, index: int, attempt: int = 1) -> None:
        spec = self._specs[index]
        task = spec.task
        trajectory = Trajectory(
            id=f"{task.id}/{spec.group}/{spec.member}",
            env=self.environment.name,
            task=task.id,
            task_type=task.type,
            split=task.split,
            seed=spec.seed,
            group=spec.group,
            member=spec.member,
        )
        self._playing[slot] = _Episode(index, spec, next(NUMBERS), trajectory, attempt)
        self.envs.send_reset(slot, task, spec.seed)
        self._stepping.add(slot)

    def _on_answer(self, slot: int, result: StepResult) -> None:
        """An environment answered a reset or a step."""
        episode = self._playing[slot]
        if result.failed:
            self._fail(slot, f"environment: {result.info['error']}")
            return
        trajectory = episode.trajectory
        episode.observation, episode.admissible = result.observation, result.info.get("admissible")
        user = self.protocol.user_message(result.observation, episode.admissible)
        if not trajectory.turns:
            episode.conversation = self.context.start(self._system, user)
            episode.progress = float(result.info.get("progress", 0.0))
            self._ask(slot)
            return
        self._reward(episode, trajectory.turns[-1], result)
        trajectory.final_observation = result.observation
        trajectory.terminated = result.terminated
        trajectory.truncated = not result.terminated and (
            result.truncated
            or len(trajectory.turns) >= self.environment.max_steps
            or 0 < self.config.max_consecutive_invalid <= episode.invalid_run
        )
        if trajectory.terminated or trajectory.truncated:
            self._finish(slot)
            return
        episode.conversation.add(trajectory.turns[-1].reply, user)
        self._ask(slot)

    def _reward(self, episode: _Episode, turn: Turn, result: StepResult) -> None:
        success = bool(result.info.get("success", False))
        progress = float(result.info.get("progress", episode.progress))
        parts = {"environment": result.reward}
        if self.shape is not None:
            facts = TurnFacts(
                env_reward=result.reward,
                success=success,
                action=turn.action,
                format_ok=turn.format_ok and not episode.excused,
                admissible=turn.admissible,
                excused=episode.excused,
                progress=progress - episode.progress,
            )
            parts = self.shape(facts)
        turn.reward_parts = parts
        turn.reward = sum(parts.values())
        episode.progress = progress
        episode.trajectory.success, episode.trajectory.score = success, result.score
        episode.invalid_run = 0 if turn.admissible else episode.invalid_run + 1

    def _ask(self, slot: int) -> None:
        """Sends the next prompt, or ends the episode where no token is left for a reply."""
        episode, config = self._playing[slot], self.config
        trajectory = episode.trajectory
        prompt = episode.conversation.prompt()
        left = config.max_traj_tokens - trajectory.sampled_tokens
        room = self.engine.max_length - len(prompt)
        limit = min(config.max_turn_tokens, left, room)
        if limit < 1 and not trajectory.turns:
            trajectory.error = f"prompt: expected fewer than {self.engine.max_length} tokens, got {len(prompt)}"
            self._finish(slot)
            return
        if limit < 1:
            trajectory.truncated = True
            self._finish(slot)
            return
        spec = episode.spec
        request = Request(
            id=next(NUMBERS),
            prompt_ids=prompt,
            seed=turn_seed(spec.seed, spec.group, spec.member, len(trajectory.turns)),
            max_tokens=limit,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            session=episode.session,
            messages=episode.conversation.messages,
        )
        episode.prompt = prompt
        self._asked[request.id] = slot
        self.stats.prompt_tokens += len(prompt)
        self.engine.submit(request)

    def _on_reply(self, slot: int, completion: Completion) -> None:
        """The engine completed a reply: its action goes to the environment, whole or not."""
        episode = self._playing[slot]
        if completion.finish_reason in ("error", "abort"):
            self._fail(slot, f"engine: {completion.error or 'the request was aborted'}")
            return
        cut = completion.finish_reason == "length"
        episode.excused = cut and not self.config.cut_is_format_failure
        text = self.context.format.decode(completion.ids) if completion.text is None else completion.text
        parsed = self.protocol.parse(text)
        known = episode.admissible
        turn = Turn(
            prompt_ids=episode.prompt,
            ids=completion.ids,
            log_probs=completion.log_probs,
            finish_reason=completion.finish_reason,
            observation=episode.observation,
            version=completion.version,
            versions=completion.versions,
            text=text,
            thought=parsed.thought,
            action=parsed.action,
            format_ok=parsed.format_ok or episode.excused,
            admissible=parsed.action != NO_ACTION and (known is None or parsed.action in known),
            messages=episode.conversation.fresh,
            tokens=completion.tokens,
        )
        episode.trajectory.turns.append(turn)
        self.stats.turns += 1
        self.stats.cut_turns += cut
        self.stats.sampled_tokens += turn.sampled_tokens
        self.envs.send_step(slot, turn.action)
        self._stepping.add(slot)

    def _fail(self, slot: int, error: str) -> None:
        episode = self._playing[slot]
        self.stats.failed += 1
        if episode.attempt < _ATTEMPTS:
            self.stats.retried += 1
            self.engine.end_session(episode.session)
            self._start(slot, episode.index, episode.attempt + 1)
            return
        episode.trajectory.error = error
        self._finish(slot)

    def _finish(self, slot: int) -> None:
        episode = self._playing.pop(slot)
        trajectory = episode.trajectory
        self.engine.end_session(episode.session)
        self._done[episode.index] = trajectory
        self.stats.truncated += trajectory.truncated
        self.stats.invalid += not trajectory.valid
        if self._on_done is not None:
            self._on_done(trajectory)
        self._refill(slot)

    def _refill(self, slot: int) -> None:
        """A slot is free: its next episode starts at once."""
        if self._waiting:
            self._start(slot, self._waiting.popleft())
