"""Runs the searches of many tasks at once: one engine, one set of worlds, no tree waits for another.

    searcher = Searcher(engine, environment, context, protocol, rollout, search, shape=shape, system=system)
    trees = searcher.run(tasks, seeds)
    trees[0].trajectory()           # the episode that the search plays

Replies asked for by any tree are in the engine together; worlds step in batches while the engine goes on; values that
several trees ask for are scored in one call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manus_fast.agent.context import Context
from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import Row, build_rows
from manus_fast.envs.base import Environment, Task
from manus_fast.rewards.shaping import Shape
from manus_fast.rollout import engine as engines
from manus_fast.rollout.scheduler import RolloutConfig
from manus_fast.rollout.seeds import derive
from manus_fast.search.base import Ask, Node, Proposal, Request, Sample, Score, Search, Step, Strategy, Tree
from manus_fast.search.config import SearchConfig
from manus_fast.search.growth import Growth
from manus_fast.search.proposals import Proposals, settle
from manus_fast.search.states import Arrival, Job, States, make_states
from manus_fast.search.strategies import make_strategy
from manus_fast.search.values import prompt_row

# How long to wait for whichever side has work, seconds.
_WAIT = 0.05
_ATTEMPTS = 2
_QUESTION = 1 << 40  # keeps the seeds of questions apart from those of replies

ScoreRows = Callable[[Sequence[Row]], np.ndarray]
"""Values after each row's last token, float32 [rows]: built by whoever has a value head."""


@dataclass
class SearchStats:
    """What one `run` took and met, over all its trees."""

    trees: int = 0
    tokens: int = 0
    """Tokens generated."""
    prompt_tokens: int = 0
    replies: int = 0
    merged: int = 0
    """Replies whose action the node had already."""
    steps: int = 0
    """Turns played in the environment; those played again to reach a node are not counted."""
    scored: int = 0
    """Values from the callable."""
    repeats: int = 0
    """Turns that led back into a situation of their own path."""
    failed: int = 0
    """Branches that an environment's failure ended."""
    mismatches: int = 0
    """Of these, worlds that did not play the same again."""
    seconds: float = 0.0
    engine_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Named figures for tracking."""
        return {f"search/{name}": float(value) for name, value in vars(self).items()}


@dataclass(eq=False)
class _Run:
    """A tree with its strategy: results come into `answers` until none is missing."""

    tree: Tree
    search: Search
    answers: list[Any] | None = None
    missing: int = 0
    replies: dict[int, dict[int, tuple[_Reply, engines.Completion] | None]] = field(default_factory=dict)
    """Place of a Sample request → number of a reply → what came, None for one that broke."""
    expected: dict[int, int] = field(default_factory=dict)
    """Place of a Sample request → replies asked for."""
    done: bool = False


@dataclass(eq=False)
class _Reply:
    """A request on its way to the engine and back."""

    run: _Run
    place: int
    number: int
    node: Node
    request: engines.Request
    question: bool = False
    attempt: int = 1


class Searcher:
    """See the module's docstring.

    Args:
        engine: what samples; see rollout/engine.py.
        environment: whose tasks are searched.
        context, protocol: chat format and parser, as a rollout has them.
        rollout: limits of replies and episodes, and sampling.
        config: strategy, budget and values.
        shape: reward parts of a turn, added to the environment's reward; None adds nothing.
        system: system message of every conversation; None: the protocol's, with the environment's instructions.
        score: values of rows, needed where `config.value` is "model".
        judge: scores of whole episodes' last rows, needed where `config.judge` is "model".

    Raises:
        ValueError: `config.value` is "model" without `score`, `config.judge` without `judge`, or worlds that
            `config.state` cannot have.
    """

    def __init__(
        self,
        engine: engines.Engine,
        environment: Environment,
        context: Context,
        protocol: Protocol,
        rollout: RolloutConfig,
        config: SearchConfig,
        shape: Shape | None = None,
        system: str | None = None,
        score: ScoreRows | None = None,
        judge: ScoreRows | None = None,
    ):
        if config.judge == "model" and judge is None:
            raise ValueError("search.judge: expected environment without a reward model, got 'model'")
        if config.value == "model" and score is None and config.strategy in ("tot", "got", "mcts"):
            raise ValueError("search.value: expected reward, rollout or verbal without a value model, got 'model'")
        self.engine, self.environment, self.context, self.protocol = engine, environment, context, protocol
        self.rollout, self.config, self.shape = rollout, config, shape
        self.score, self.judge = score, judge
        self.stats = SearchStats()
        self._system = protocol.system_prompt(environment.instructions) if system is None else system
        self._proposals = Proposals(context, protocol, rollout, engine.max_length)
        self._growth = Growth(context, protocol, rollout, shape, self._system)
        self._asked: dict[int, _Reply] = {}
        self._stepping: dict[Proposal | Tree, list[tuple[_Run, int]]] = {}
        self._attempts: dict[Proposal | Tree, int] = {}
        self._scores: list[tuple[_Run, int, Score]] = []
        self._strategy: Strategy | None = None
        self._states: States | None = None
        self._waiting: deque[Tree] = deque()
        self._active = 0
        self._on_done: Callable[[Tree], None] | None = None

    def run(
        self, tasks: Sequence[Task], seeds: Sequence[int], on_done: Callable[[Tree], None] | None = None
    ) -> list[Tree]:
        """Searches each task once and returns the finished trees in the order of `tasks`.

        Args:
            tasks: what is played.
            seeds: one a task; each resets its world, and the replies' seeds follow from it.
            on_done: called with each tree as it ends.

        Raises:
            ValueError: not as many seeds as tasks.
        """
        if len(tasks) != len(seeds):
            raise ValueError(f"seeds: expected one for each of {len(tasks)} tasks, got {len(seeds)}")
        self.stats = SearchStats(trees=len(tasks))
        trees = [
            Tree(index, task, seed, self.config, self.environment.max_steps)
            for index, (task, seed) in enumerate(zip(tasks, seeds, strict=True))
        ]
        slots = min(self.config.trees, max(1, len(tasks)))
        self._strategy = make_strategy(self.config, slots)
        self._states = make_states(self.environment, self.config.state, slots)
        self._on_done = on_done
        self._waiting = deque(trees)
        began = time.perf_counter()
        try:
            for slot in range(min(slots, len(trees))):
                self._start(slot)
            while self._active:
                self._poll_states()
                self._poll_scores()
                self._poll_engine()
        finally:
            for id in self._asked:  # only after an exception: nothing may go on generating
                self.engine.abort(id)
            self._asked.clear()
            self._stepping.clear()
            self._scores.clear()
            self._active = 0
            self._states.close()
        self.stats.seconds = time.perf_counter() - began
        self.stats.mismatches = self._states.mismatches
        return trees

    # Trees

    def _start(self, slot: int) -> None:
        tree = self._waiting.popleft()
        tree.slot = slot
        run = _Run(tree, self._strategy(tree))
        self._active += 1
        self._send(tree, None, "", run, 0)

    def _resume(self, run: _Run) -> None:
        """Goes on with a tree whose answers are all there; several times where they are there at once."""
        while not run.done and run.missing == 0:
            tree = run.tree
            stops = self.config.stop_on_success and self.config.judge != "model"
            if tree.error is not None or (tree.solution is not None and stops):
                self._end(run, None)
                return
            try:
                requests = run.search.send(run.answers)
            except StopIteration as stop:
                self._end(run, stop.value)
                return
            if not requests:
                raise RuntimeError(f"search.{self.config.strategy}: a strategy asked for nothing")
            run.answers, run.missing = [None] * len(requests), len(requests)
            for place, request in enumerate(requests):
                self._ask(run, place, request)

    def _end(self, run: _Run, chosen: Node | None) -> None:
        run.search.close()
        run.done = True
        tree = run.tree
        tree.finish(chosen)
        self.stats.tokens += tree.tokens
        self.stats.merged += tree.merged
        self.stats.steps += tree.steps
        self.stats.failed += tree.failed
        self.stats.repeats += sum(node.repeats for node in tree.nodes)
        self._active -= 1
        if self._on_done is not None:
            self._on_done(tree)
        if self._waiting:
            self._start(tree.slot)

    def _answer(self, run: _Run, place: int, result: Any) -> None:
        run.answers[place] = result
        run.missing -= 1

    def _ask(self, run: _Run, place: int, request: Request) -> None:
        if isinstance(request, Sample):
            self._sample(run, place, request)
        elif isinstance(request, Step):
            proposal = request.proposal
            if proposal.child is not None:
                self._answer(run, place, proposal.child)
            else:
                self._send(proposal, proposal.node, proposal.action, run, place)
        elif isinstance(request, Score):
            self._scores.append((run, place, request))
        else:
            self._question(run, place, request)

    # Replies

    def _sample(self, run: _Run, place: int, sample: Sample) -> None:
        node, tree = sample.node, run.tree
        temperature = sample.temperature
        if temperature is None:
            temperature = self.rollout.temperature if self.config.temperature is None else self.config.temperature
        run.replies[place] = {}
        asked = 0
        for number in range(sample.count):
            request = self._proposals.request(tree, node, next(engines.NUMBERS), temperature)
            if request is None:
                break
            self._submit(_Reply(run, place, number, node, request))
            asked += 1
        run.expected[place] = asked
        if asked == 0:
            self._settle(run, place, node)

    def _question(self, run: _Run, place: int, ask: Ask) -> None:
        node, tree = ask.node, run.tree
        prompt = self._growth.question(node, ask.question)
        limits = [self.rollout.max_turn_tokens, self.engine.max_length - len(prompt)]
        limit = min([*limits, *(() if tree.remaining is None else (tree.remaining,))])
        if limit < 1:
            self._answer(run, place, None)
            return
        tree.reserved += limit
        temperature = self.rollout.temperature if self.config.temperature is None else self.config.temperature
        seed = derive(tree.seed, node.key, _QUESTION + ask.number)
        request = engines.Request(next(engines.NUMBERS), prompt, seed, limit, temperature)
        self._submit(_Reply(run, place, 0, node, request, question=True))

    def _submit(self, reply: _Reply) -> None:
        self._asked[reply.request.id] = reply
        self.stats.prompt_tokens += len(reply.request.prompt_ids)
        self.stats.replies += 1
        self.engine.submit(reply.request)

    def _poll_engine(self) -> None:
        if not self._asked:
            return
        began = time.perf_counter()
        completions = self.engine.poll(0.0 if self._stepping else _WAIT)
        self.stats.engine_seconds += time.perf_counter() - began
        for completion in completions:
            reply = self._asked.pop(completion.id, None)
            if reply is not None:  # else: a request that an interrupted call had aborted
                self._on_reply(reply, completion)

    def _on_reply(self, reply: _Reply, completion: engines.Completion) -> None:
        run, tree = reply.run, reply.run.tree
        tree.tokens += len(completion.ids)
        broken = completion.finish_reason in ("error", "abort")
        if broken and reply.attempt < _ATTEMPTS:
            reply.attempt += 1
            self._submit(reply)
            return
        tree.reserved -= reply.request.max_tokens
        if broken:
            tree.error = f"engine: {completion.error or 'the request was aborted'}"
        if reply.question:
            text = None if broken else self.context.format.decode(completion.ids)
            self._answer(run, reply.place, text)
            self._resume(run)
            return
        arrived = run.replies[reply.place]
        arrived[reply.number] = None if broken else (reply, completion)
        if len(arrived) == run.expected[reply.place]:
            self._settle(run, reply.place, reply.node)
            self._resume(run)

    def _settle(self, run: _Run, place: int, node: Node) -> None:
        """Reads the replies of a request in the order of their numbers, whatever order they came in."""
        proposals = []
        for _, arrived in sorted(run.replies.pop(place).items()):
            if arrived is not None:
                reply, completion = arrived
                proposal = self._proposals.accept(run.tree, node, reply.request, completion)
                if proposal is not None:
                    proposals.append(proposal)
        settle(node)
        self._answer(run, place, proposals)

    # Values

    def _poll_scores(self) -> None:
        if not self._scores:
            return
        asked, self._scores = self._scores, []
        for whole in (False, True):
            some = [one for one in asked if one[2].episode == whole]
            if not some:
                continue
            if whole:
                rows = [build_rows([run.tree.trajectory(request.node)])[-1] for run, _, request in some]
            else:
                rows = [prompt_row(request.node) for _, _, request in some]
            values = np.asarray((self.judge if whole else self.score)(rows), np.float64)
            if values.shape != (len(some),) or not np.isfinite(values).all():
                raise ValueError(
                    f"{'judge' if whole else 'score'}: expected {len(some)} finite values, got an array of shape "
                    f"{list(values.shape)} with {int((~np.isfinite(values)).sum())} that are not finite"
                )
            for (run, place, _), value in zip(some, values.tolist(), strict=True):
                self._answer(run, place, value)
        self.stats.scored += len(asked)
        for run in dict.fromkeys(run for run, _, _ in asked):
            self._resume(run)

    # Worlds

    def _send(self, key: Proposal | Tree, node: Node | None, action: str, run: _Run, place: int) -> None:
        waiting = self._stepping.setdefault(key, [])
        waiting.append((run, place))
        if len(waiting) == 1:
            self._states.send(Job(run.tree, node, action, key))

    def _poll_states(self) -> None:
        if not self._stepping:
            return
        for job, arrival in self._states.poll(0.0 if self._asked else _WAIT):
            self._on_arrival(job, arrival)

    def _on_arrival(self, job: Job, arrival: Arrival) -> None:
        key = job.tag
        attempt = self._attempts.pop(key, 1)
        if arrival.result.failed and attempt < _ATTEMPTS and not arrival.final:
            self._attempts[key] = attempt + 1
            self._states.send(job)
            return
        waiting = self._stepping.pop(key)
        run = waiting[0][0]
        if isinstance(key, Tree):
            node = self._growth.begin(run.tree, arrival)
        else:
            node = self._growth.grow(run.tree, key, arrival)
            for _, place in waiting:
                self._answer(run, place, node)
        self._states.place(arrival, node)
        self._resume(run)
