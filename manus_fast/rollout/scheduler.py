"""Plays many episodes at once: one slot per trajectory, no lockstep.

A request enters the engine the moment its environment answered; an environment steps the moment its reply is done; a
finished episode never generates, and its slot starts the next episode at once. What is sampled depends on the names
of an episode (run seed, iteration, group, member, turn) and the weights only, never on slots or arrival order.

Episodes that a later call will ask for may be begun ahead, in slots that would be empty. They go on where they are when
new weights come in between, each token knows the policy version that sampled it, and none is given back that lags
behind by more versions than `rollout.staleness`.
"""

from __future__ import annotations

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
from manus_fast.rollout.config import RolloutConfig
from manus_fast.rollout.engine import NUMBERS, Completion, Engine, Request
from manus_fast.rollout.seeds import turn_seed
from manus_fast.rollout.stats import RolloutStats

# How long to wait for whichever side has work, seconds: short, because the other side may answer meanwhile.
_WAIT = 0.05
_ATTEMPTS = 2

__all__ = ["EpisodeSpec", "Rollout", "RolloutConfig", "RolloutStats"]


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play. `seed` resets its world; the replies' seeds follow from it, `group` and `member`."""

    task: Task
    seed: int
    group: int
    member: int

    @property
    def name(self) -> tuple[str, int, int, int]:
        """What tells it from others, from one call to the next."""
        return self.task.id, self.seed, self.group, self.member


@dataclass
class _Episode:
    """A slot's occupant."""

    place: int | None
    """In what the present call gives back; None: it is played ahead."""
    spec: EpisodeSpec
    session: int
    trajectory: Trajectory
    attempt: int = 1
    conversation: Conversation | None = None
    prompt: np.ndarray | None = None
    """Of the reply being sampled."""
    observation: str = ""
    admissible: list[str] | None = None
    sampled: int = 0
    """Tokens so far."""
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
        stray: given what the engine completes for somebody else who asked the same engine; None: thrown away.
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
        stray: Callable[[Completion], None] | None = None,
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
        self._waiting: deque[tuple[int | None, EpisodeSpec]] = deque()
        self._done: list[Trajectory | None] = []
        self._left = 0
        self._idle_since = 0.0  # when the engine had its last request; of no meaning while it has any
        self._kept: dict[tuple[str, int, int, int], Trajectory] = {}  # played ahead to the end
        self._early: list[Completion] = []
        self._stray = stray
        self._on_done: Callable[[Trajectory], None] | None = None

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        on_done: Callable[[Trajectory], None] | None = None,
        ahead: Sequence[EpisodeSpec] = (),
    ) -> list[Trajectory]:
        """Plays every episode once and returns the trajectories in the order of `specs`.

        An episode whose environment or engine fails is played again from its start, once; after a second failure its
        trajectory carries `error` and is invalid. `stats` describes the latest call. `on_done` is called with each
        trajectory as it ends.

        Args:
            ahead: episodes that later calls will ask for, in that order. Slots without work for this call begin them;
                they are still under way when it returns, and the call that asks for them finds them so.
        """
        self.stats = RolloutStats(episodes=len(specs))
        self._done, self._on_done, self._left = [None] * len(specs), on_done, len(specs)
        begin = self._idle_since = time.perf_counter()
        try:
            self._queue(specs, ahead)
            for slot in range(min(self.config.episodes, self.envs.slots)):
                if slot not in self._playing and slot not in self._stepping:
                    self._refill(slot)
            while self._left:
                self._poll_envs()
                self._poll_engine()
        finally:
            if self._left:  # only after an exception
                self.stop()
        end = time.perf_counter()
        self.stats.seconds = end - begin
        if not self._asked:
            self.stats.idle_seconds += end - self._idle_since
        return list(self._done)

    def stop(self) -> None:
        """Gives up whatever is under way: nothing goes on generating, and no later call hears of it."""
        for id in self._asked:
            self.engine.abort(id)
        for episode in self._playing.values():
            self.engine.end_session(episode.session)
        for held in (self._asked, self._playing, self._kept, self._early, self._waiting):
            held.clear()

    def receive(self, completion: Completion) -> None:
        """Takes in what the engine completed while somebody else polled it, for the next call."""
        if completion.id in self._asked:
            self._early.append(completion)

    def _queue(self, specs: Sequence[EpisodeSpec], ahead: Sequence[EpisodeSpec]) -> None:
        """Finds what was begun by earlier calls; the rest waits for slots."""
        begun = {episode.spec.name: episode for episode in self._playing.values()}
        kept, self._kept = self._kept, {}
        self._waiting.clear()
        for place, spec in enumerate(specs):
            if spec.name in kept:
                self.stats.carried += 1
                self._give(place, kept.pop(spec.name))
            elif spec.name in begun:
                self.stats.carried += 1
                begun.pop(spec.name).place = place
            else:
                self._waiting.append((place, spec))
        for spec in ahead:
            if spec.name in kept:
                self._kept[spec.name] = kept.pop(spec.name)
            elif begun.pop(spec.name, None) is None:
                self._waiting.append((None, spec))
        self.stats.dropped += len(begun) + len(kept)
        unwanted = {episode.session for episode in begun.values()}
        for slot in [slot for slot, episode in self._playing.items() if episode.session in unwanted]:
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        """Gives up an episode that nobody asks for. Its slot is free, at the latest when its world has answered."""
        for id in [id for id, asked in self._asked.items() if asked == slot]:
            del self._asked[id]
            self.engine.abort(id)
        self.engine.end_session(self._playing.pop(slot).session)

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
        if self._early:
            completions, self._early = [*self._early, *completions], []
        slots = [self._asked.pop(completion.id, None) for completion in completions]
        if not self._asked:
            self._idle_since = time.perf_counter()
        for slot, completion in zip(slots, completions, strict=True):
            if slot is not None:
                self._on_reply(slot, completion)
            elif self._stray is not None:  # or nobody waits for it: a stopped call had aborted it
                self._stray(completion)

    def _start(self, slot: int, place: int | None, spec: EpisodeSpec, attempt: int = 1) -> None:
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
        self._playing[slot] = _Episode(place, spec, next(NUMBERS), trajectory, attempt)
        self.envs.send_reset(slot, task, spec.seed)
        self._stepping.add(slot)

    def _on_answer(self, slot: int, result: StepResult) -> None:
        """An environment answered a reset or a step."""
        episode = self._playing.get(slot)
        if episode is None:  # it was given up while its world was busy
            self._refill(slot)
            return
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
        left = config.max_traj_tokens - episode.sampled
        room = self.engine.max_length - len(prompt)
        limit = min(config.max_turn_tokens, left, room)
        if limit < 1:
            self._no_room(slot, f"prompt: expected fewer than {self.engine.max_length} tokens, got {len(prompt)}")
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
        if not self._asked:
            self.stats.idle_seconds += time.perf_counter() - self._idle_since
        self._asked[request.id] = slot
        self.stats.prompt_tokens += len(prompt)
        self.engine.submit(request)

    def _no_room(self, slot: int, error: str) -> None:
        """No token is left for a reply: an episode that was under way is cut, one whose first prompt it is cannot be
        played."""
        trajectory = self._playing[slot].trajectory
        if trajectory.turns:
            trajectory.truncated = True
        else:
            trajectory.error = error
        self._finish(slot)

    def _on_reply(self, slot: int, completion: Completion) -> None:
        """The engine completed a reply: its action goes to the environment, whole or not."""
        episode = self._playing[slot]
        if completion.too_long:
            self._no_room(slot, f"prompt: {completion.error}")
            return
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
        episode.sampled += turn.sampled_tokens
        self.stats.sampled_tokens += turn.sampled_tokens
        self.envs.send_step(slot, turn.action)
        self._stepping.add(slot)

    def _fail(self, slot: int, error: str) -> None:
        episode = self._playing[slot]
        self.stats.failed += 1
        if episode.attempt < _ATTEMPTS:
            self.stats.retried += 1
            self.engine.end_session(episode.session)
            self._start(slot, episode.place, episode.spec, episode.attempt + 1)
            return
        episode.trajectory.error = error
        self._finish(slot)

    def _finish(self, slot: int) -> None:
        episode = self._playing.pop(slot)
        self.engine.end_session(episode.session)
        if episode.place is None:
            self._kept[episode.spec.name] = episode.trajectory
        else:
            self._give(episode.place, episode.trajectory)
        self._refill(slot)

    def _give(self, place: int, trajectory: Trajectory) -> None:
        """An episode of the present call is over."""
        stats, now = self.stats, self.engine.version
        stale = sum(turn.tokens_before(now) for turn in trajectory.turns)
        if stale and trajectory.valid:
            lag = now - trajectory.turns[0].version  # versions only rise
            if lag > self.config.staleness:
                stats.too_old += 1
                trajectory.error = (
                    f"staleness: expected tokens at most {self.config.staleness} versions old, got {lag} versions"
                )
        stats.given_tokens += trajectory.sampled_tokens
        stats.stale_tokens += stale
        stats.truncated += trajectory.truncated
        stats.invalid += not trajectory.valid
        self._done[place] = trajectory
        self._left -= 1
        if self._on_done is not None:
            self._on_done(trajectory)

    def _refill(self, slot: int) -> None:
        """A slot is free: its next episode starts at once."""
        if self._waiting:
            self._start(slot, *self._waiting.popleft())
