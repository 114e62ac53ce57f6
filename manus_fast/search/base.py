"""What every strategy works on: the tree of one task, what it may ask for, and how strategies are found.

A strategy is a generator. It yields a list of requests, is resumed with the list of their results, and returns the
node that it would play to (or None: the best leaf). It never waits by itself, so all trees of a batch go on at their
own pace and share the engine; see driver.py.

    def greedy(tree):
        node = tree.root
        while not node.closed:
            (proposals,) = yield [Sample(node, 1, temperature=0.0)]
            if not proposals:
                return node                       # no budget for another reply
            (node,) = yield [Step(proposals[0])]
        return node
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manus_fast.agent.context import Conversation
from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.envs.base import Task
from manus_fast.search.config import SearchConfig

# Node ids are unique over all trees of a run: the tree's number in the high bits.
ID_BITS = 32


@dataclass(eq=False)
class Proposal:
    """An action proposed at a node, with the first reply that meant it: the tokens as the policy sampled them."""

    node: Node
    action: str
    thought: str
    text: str
    ids: np.ndarray
    """int32 [S]."""
    log_probs: np.ndarray
    """float32 [S], under the sampling policy."""
    finish_reason: str
    version: int
    format_ok: bool
    admissible: bool
    excused: bool
    """The reply was cut by a token limit, and such replies are not held against the agent."""
    temperature: float
    """That the reply was sampled at; 0: it is no sample, and must stay out of a policy gradient."""
    replies: int = 0
    """Replies that meant this action."""
    weight: float = 0.0
    """Sum of exp(sum log-prob / length) over the distinct ones among them."""
    prior: float = 0.0
    """Its share of the weights at the node."""
    child: Node | None = None
    seen: set[bytes] = field(default_factory=set)

    @property
    def score(self) -> float:
        """Mean log-probability of a token of the reply."""
        return float(self.log_probs.mean()) if len(self.log_probs) else 0.0


@dataclass(eq=False)
class Node:
    """A situation of an episode: what was said and seen so far, and the world as it then was."""

    id: int
    """Unique over the trees of a run."""
    key: int
    """Hash of the actions that lead here: seeds the replies sampled here, whatever the order of arrival."""
    parent: Node | None = None
    proposal: Proposal | None = None
    """The turn that led here; None at the root."""
    depth: int = 0
    observation: str = ""
    admissible: list[str] | None = None
    conversation: Conversation | None = None
    reward: float = 0.0
    """Of the turn that led here, shaping included."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    score: float | None = None
    progress: float = 0.0
    """Share of the task's subgoals that are fulfilled here, where the environment tells it."""
    repeats: bool = False
    """Its situation occurs on its own path already."""
    merged_into: Node | None = None
    """A better node in the same situation (got)."""
    error: str | None = None
    """The environment failed here: the branch is counted and never played."""
    state: bytes | None = None
    """The world, where it is kept."""
    situation: int | None = None
    """The environment's hash of what its rules depend on."""
    invalid_run: int = 0
    value: float | None = None
    """Estimated return from here on."""
    visits: int = 0
    """Of the tree engine (mcts)."""
    q: float | None = None
    """Mean return of the turn that led here, from it on (mcts)."""
    proposals: list[Proposal] = field(default_factory=list)
    """Distinct actions, in the order in which they were first sampled."""
    asked: int = 0
    """Replies asked for here: the number that seeds the next one."""
    drawn: int = 0
    """Replies that came."""

    @property
    def closed(self) -> bool:
        """Nothing can follow."""
        return self.terminated or self.truncated or self.error is not None

    @property
    def path(self) -> list[Node]:
        """The nodes from the root's child to this one, in order; empty at the root."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def total(self, discount: float) -> float:
        """Discounted return of the path to this node."""
        return float(sum(node.reward * discount**turn for turn, node in enumerate(self.path)))


@dataclass(frozen=True)
class Sample:
    """Ask the policy for `count` replies at a node. Result: a list with the proposal of each reply that came whole, in
    the order of their numbers; shorter, or empty, where budget or length ran out."""

    node: Node
    count: int = 1
    temperature: float | None = None


@dataclass(frozen=True)
class Step:
    """Play a proposal. Result: its child node (made once, however often it is asked for)."""

    proposal: Proposal


@dataclass(frozen=True)
class Score:
    """Ask the callable `score` for a node's value; with `episode` the callable `judge` for the worth of the whole
    episode that ends there. Result: a float."""

    node: Node
    episode: bool = False


@dataclass(frozen=True)
class Ask:
    """Ask the policy a question about a node, outside of the episode. Result: the text of its reply, or None."""

    node: Node
    question: str
    number: int = 0


Request = Sample | Step | Score | Ask
Search = Generator[list[Request], list[Any], Any]
Strategy = Callable[["Tree"], Search]


class Tree:
    """The search of one task: nodes, budget, and what came of it.

    Args:
        index: its number within the run.
        task, seed: what is played.
        config: see SearchConfig.
        max_steps: turns of an episode.
    """

    def __init__(self, index: int, task: Task, seed: int, config: SearchConfig, max_steps: int):
        self.index, self.task, self.seed, self.config, self.max_steps = index, task, seed, config, max_steps
        self._ids = itertools.count(index << ID_BITS)
        self.nodes: list[Node] = []
        self.root = self.add(None, None)
        self.slot = 0
        """Number among the trees that are searched at the same time."""
        self.tokens = 0
        """Tokens generated, those of replies that came to nothing included."""
        self.reserved = 0
        """Most tokens that replies on their way may still add."""
        self.simulations = 0
        self.steps = 0
        """Turns played in the environment."""
        self.merged = 0
        """Replies whose action the node had already."""
        self.failed = 0
        """Branches that an environment's failure ended."""
        self.solution: Node | None = None
        """The first solved node, or a later one with a higher return."""
        self.solved_at: int | None = None
        """Tokens generated when the first solution was found."""
        self.played: Node = self.root
        """The node that the search plays to: set at its end."""
        self.error: str | None = None

    def add(self, parent: Node | None, proposal: Proposal | None) -> Node:
        """A new node under `parent`."""
        node = Node(id=next(self._ids), key=0, parent=parent, proposal=proposal)
        if parent is not None:
            node.depth = parent.depth + 1
        self.nodes.append(node)
        return node

    @property
    def remaining(self) -> int | None:
        """Tokens that may still be asked for; None: no limit."""
        budget = self.config.budget_tokens
        return None if budget is None else budget - self.tokens - self.reserved

    @property
    def limited(self) -> bool:
        """Whether there is a budget at all."""
        return self.config.budget_tokens is not None or self.config.simulations is not None

    def circles(self, node: Node) -> bool:
        """Whether a node is given up because its path turns in a circle."""
        return node.repeats and self.config.prune_repeats

    def dead(self, node: Node) -> bool:
        """Whether a search has no business beyond a node."""
        return node.closed or node.merged_into is not None or self.circles(node)

    @property
    def exhausted(self) -> bool:
        """Whether the budget is spent."""
        limit = self.config.simulations
        return (self.remaining is not None and self.remaining < 1) or (limit is not None and self.simulations >= limit)

    def return_of(self, node: Node) -> float:
        """Return of the path to a node with what is expected beyond it."""
        future = 0.0 if node.terminated or node.value is None else node.value
        return node.total(self.config.discount) + self.config.discount**node.depth * future

    def best(self) -> Node:
        """The solution, else the leaf of highest return, finished episodes first; the earliest of equals."""
        if self.solution is not None:
            return self.solution
        leaves = [node for node in self.nodes if node.error is None and all(p.child is None for p in node.proposals)]
        ended = [node for node in leaves if node.terminated or node.truncated]
        return max(ended or leaves or [self.root], key=self.return_of)

    def solve(self, node: Node) -> None:
        """Notes a solved node."""
        if self.solution is None:
            self.solved_at = self.tokens
        if self.solution is None or self.return_of(node) > self.return_of(self.solution):
            self.solution = node

    def finish(self, chosen: Node | None) -> None:
        """Fixes what is played: the solution, else the strategy's choice, else the best leaf. A judge's choice comes
        before a solution, which it was not told of."""
        judged = chosen if self.config.judge == "model" else None
        self.played = judged or self.solution or chosen or self.best()

    def trajectory(self, node: Node | None = None, env: str = "", member: int = 0) -> Trajectory:
        """The episode that leads to a node (default: the one that is played), in the form that a rollout has.

        An episode that the search left unfinished is truncated.
        """
        node = self.played if node is None else node
        turns = [_turn(child) for child in node.path]
        return Trajectory(
            id=f"{self.task.id}/{self.index}/{member}",
            env=env,
            task=self.task.id,
            task_type=self.task.type,
            split=self.task.split,
            seed=self.seed,
            group=self.index,
            member=member,
            turns=turns,
            success=node.success,
            score=node.score,
            terminated=node.terminated,
            truncated=not node.terminated,
            error=self.error or node.error,
            final_observation=node.observation if turns else "",
        )


def _turn(node: Node) -> Turn:
    proposal, before = node.proposal, node.parent
    assert proposal is not None and before is not None and before.conversation is not None
    return Turn(
        prompt_ids=before.conversation.prompt(),
        ids=proposal.ids,
        log_probs=proposal.log_probs,
        finish_reason=proposal.finish_reason,
        observation=before.observation,
        version=proposal.version,
        text=proposal.text,
        thought=proposal.thought,
        action=proposal.action,
        reward=node.reward,
        reward_parts=dict(node.reward_parts),
        format_ok=proposal.format_ok or proposal.excused,
        admissible=proposal.admissible,
        value=before.value,
        node_id=node.id,
    )
