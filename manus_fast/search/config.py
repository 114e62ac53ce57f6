"""The `search` block of a config: which strategy, with what parameters, on what budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

STRATEGIES = ("greedy", "best_of_n", "beam", "tot", "got", "dfsdt", "mcts")


@dataclass
class MCTSConfig:
    """The `search.mcts` block: what the tree engine is asked for (see engine.TreeBatch).

    Raises:
        ValueError: a number out of range.
    """

    rule: Literal["puct", "uct"] = "puct"
    c: float = 1.25
    normalize: bool = True
    """Scale Q by the smallest and largest seen in the tree: returns need not lie in any range."""
    leaves: int = 1
    """Leaves of one tree that are evaluated together, kept apart by virtual loss."""
    noise_alpha: float = 0.0
    """Dirichlet noise on the root's priors; 0: none."""
    noise_fraction: float = 0.25
    gumbel_considered: int = 0
    """Root actions that Gumbel scores and sequential halving choose among; 0: the rule serves the root too."""
    per_move: int | None = None
    """Simulations after which the most visited action is played for good and its subtree kept; null: nothing is
    played before the budget is spent, the best episode found counts."""
    max_nodes: int = 1024
    """Nodes that a tree holds at most; a full tree ends its search."""

    def __post_init__(self) -> None:
        for name, low, high in (("c", 0, 1e6), ("leaves", 1, 255), ("noise_alpha", 0, 1e6), ("noise_fraction", 0, 1),
                                ("gumbel_considered", 0, 65535), ("max_nodes", 2, 1 << 24)):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"search.mcts.{name}: expected a number from {low} to {high:g}, got {getattr(self, name)}"
                )
        if self.per_move is not None and self.per_move < 1:
            raise ValueError(f"search.mcts.per_move: expected null or an integer >= 1, got {self.per_move}")


@dataclass
class SearchConfig:
    """See the module's docstring. A search ends at its budget, on success, or when its strategy has nothing left.

    Raises:
        ValueError: a number out of range, or Gumbel scores without a number of simulations to plan for.
    """

    strategy: Literal["greedy", "best_of_n", "beam", "tot", "got", "dfsdt", "mcts"] = "mcts"
    budget_tokens: int | None = None
    """Tokens that a task's search may have generated, never exceeded; null: no limit."""
    simulations: int | None = None
    """Units of search a task may take: leaves evaluated (mcts), nodes expanded (beam, tot, got), paths played to
    their end (greedy, best_of_n, dfsdt); null: no limit. Without any limit mcts takes 32."""
    proposals: int = 4
    """Replies sampled at a node that is expanded; those with the same action are merged."""
    breadth: int = 4
    """Nodes that beam, tot and got keep a turn; siblings that dfsdt tries at a node."""
    temperature: float | None = None
    """Of the proposals; null: rollout.temperature. `greedy` always takes 0."""
    value: Literal["reward", "rollout", "model", "verbal"] = "rollout"
    """What an unfinished path is worth beyond its rewards. reward: nothing; rollout: the return of an episode that
    the policy plays from there; model: the callable `score`; verbal: the policy's own word (sure, likely,
    impossible)."""
    judge: Literal["environment", "model"] = "environment"
    """Who chooses among the episodes of best_of_n. environment: what was solved, then the highest return; model: the
    callable `judge`, which sees the episodes and not what the environment says of them."""
    votes: int = 1
    """Rollouts or verbal judgements averaged for one value."""
    n: int = 8
    """Episodes of best_of_n where no budget is set."""
    backtrack: int = 1
    """Turns that dfsdt goes back from a dead end before it tries a sibling."""
    refinements: int = 1
    """Times that got lets the policy answer a refused action before it gives the path up."""
    widen: bool = True
    """Whether beam, tot, got and dfsdt go on with twice the breadth (one more sibling) while budget is left."""
    stop_on_success: bool = True
    """Whether the first solved episode ends the search of its task."""
    prune_repeats: bool = True
    """Whether a turn that leads back into a situation of its own path is given up. Needs an environment that knows
    its situations (`state_hash`); others never prune."""
    state: Literal["auto", "save", "replay"] = "auto"
    """How a node's world is reached. save: bytes of it are kept; replay: its actions are played again and every
    observation is checked; auto: save where the environment can."""
    trees: int = 64
    """Tasks that are searched at the same time."""
    discount: float = 0.99
    """Per turn."""
    mcts: MCTSConfig = field(default_factory=MCTSConfig)

    def __post_init__(self) -> None:
        for name in ("proposals", "breadth", "votes", "n", "backtrack", "trees"):
            if getattr(self, name) < 1:
                raise ValueError(f"search.{name}: expected an integer >= 1, got {getattr(self, name)}")
        for name in ("budget_tokens", "simulations"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"search.{name}: expected null or an integer >= 0, got {getattr(self, name)}")
        if self.judge == "model" and self.strategy != "best_of_n":
            raise ValueError(f"search.strategy: expected best_of_n with search.judge model, got {self.strategy!r}")
        if self.refinements < 0:
            raise ValueError(f"search.refinements: expected an integer >= 0, got {self.refinements}")
        if self.temperature is not None and not self.temperature >= 0:
            raise ValueError(f"search.temperature: expected null or a number >= 0, got {self.temperature}")
        if not 0 <= self.discount <= 1:
            raise ValueError(f"search.discount: expected a number in [0, 1], got {self.discount}")
        if self.mcts.gumbel_considered and self.simulations is None and self.mcts.per_move is None:
            raise ValueError(
                "search.simulations: expected a number with search.mcts.gumbel_considered, whose halving plans for it, "
                "got null"
            )
