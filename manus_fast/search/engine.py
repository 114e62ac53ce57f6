"""`TreeBatch`: many search trees in one fixed block of memory, worked on by C++ threads with the GIL released.

    trees = TreeBatch(num_trees=1024, max_nodes=256, max_actions=16, discount=0.99)
    trees.set_roots(values, priors)
    for _ in range(200):
        leaves = trees.select()                      # one leaf per tree; leaves.parent, leaves.action say which
        ...                                          # step the environments, ask the model
        trees.update(leaves, values, priors, rewards=rewards, terminal=terminal)
    trees.root_visits()                              # [trees, actions]

The rules (scores, ties, virtual loss, noise) are those of `reference.py`, bit for bit, whatever the number of threads
(`manus_fast._C.set_num_threads`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from manus_fast import _C

EVALUATE, TERMINAL, COLLISION, FULL = range(4)
"""Status of a leaf row: waits for an answer | closed leaf, backed up at once | in flight already | no memory left."""


class Leaves:
    """Rows of selected leaves; `rows` is int32 [5, n]. Index with a mask or indices to answer some rows only."""

    __slots__ = ("rows",)

    def __init__(self, rows: np.ndarray):
        self.rows = rows

    @property
    def tree(self) -> np.ndarray:
        """Tree of each row, int32 [n]."""
        return self.rows[0]

    @property
    def node(self) -> np.ndarray:
        """Node id within its tree, int32 [n]; -1 where the status is FULL. Ids hold until the root moves."""
        return self.rows[1]

    @property
    def parent(self) -> np.ndarray:
        """Node id of the parent, int32 [n]; -1 for a root."""
        return self.rows[2]

    @property
    def action(self) -> np.ndarray:
        """Action that leads from the parent to the leaf, int32 [n]; -1 for a root."""
        return self.rows[3]

    @property
    def status(self) -> np.ndarray:
        """EVALUATE, TERMINAL, COLLISION or FULL, int32 [n]."""
        return self.rows[4]

    def __len__(self) -> int:
        return self.rows.shape[1]

    def __getitem__(self, index: Any) -> Leaves:
        return Leaves(np.ascontiguousarray(self.rows[:, np.atleast_1d(index) if np.isscalar(index) else index]))


@dataclass(frozen=True)
class TreeView:
    """Every node of one tree; arrays over node ids, parents before children."""

    parent: np.ndarray  # int32, -1 at the root
    action: np.ndarray  # int32, from the parent, -1 at the root
    num_actions: np.ndarray  # int32, -1: not expanded or closed
    closed: np.ndarray  # bool
    visits: np.ndarray  # int32
    in_flight: np.ndarray  # int32
    value: np.ndarray  # float64, mean return from the node on; 0 without visits
    q: np.ndarray  # float64, reward + discount · value; the root: its value
    reward: np.ndarray  # float32, of the edge into the node
    priors: list[np.ndarray]  # float32 per node, empty where not expanded; below 0: failed

    def path(self, node: int) -> list[int]:
        """Node ids from the root to `node`, both included."""
        path = [int(node)]
        while (above := int(self.parent[path[-1]])) >= 0:
            path.append(above)
        return path[::-1]

    def children(self, node: int) -> np.ndarray:
        """Ids of the children that exist, in order of creation."""
        return np.flatnonzero(self.parent == node)


class TreeBatch:
    """A batch of trees that grow together.

    num_trees: how many. max_nodes: nodes of one tree at most, the root included. max_edges: edges of one tree at most
    (default max_nodes · max_actions); memory is 32 bytes a node and 12 an edge, taken once. A tree that has no room
    for its next leaf is full: `select` answers FULL for it and changes nothing until its root moves.

    rule: "puct" | "uct"; c: its constant; discount: per edge, that is per turn, 0 to 1; normalize: Q scaled by the
    smallest and largest seen in the tree (for values of unknown range). gumbel_considered > 0: the root picks by
    Gumbel scores and sequential halving over that many actions and `gumbel_simulations` simulations.

    Raises ValueError for numbers out of range; MemoryError where the block cannot be had.
    """

    def __init__(
        self,
        num_trees: int,
        max_nodes: int,
        *,
        max_actions: int | None = None,
        max_edges: int | None = None,
        rule: str = "puct",
        c: float = 1.25,
        discount: float = 1.0,
        normalize: bool = False,
        gumbel_considered: int = 0,
        gumbel_simulations: int = 0,
        gumbel_visit: float = 50.0,
        gumbel_scale: float = 1.0,
        seed: int = 0,
    ):
        if (max_actions is None) == (max_edges is None):
            raise ValueError(f"max_actions, max_edges: expected exactly one, got {max_actions} and {max_edges}")
        self.num_trees, self.max_nodes = num_trees, max_nodes
        self.max_edges = max_nodes * max_actions if max_edges is None else max_edges
        self._trees = _C.TreeBatch(
            num_trees=num_trees,
            max_nodes=max_nodes,
            max_edges=self.max_edges,
            rule=rule,
            c=c,
            discount=discount,
            normalize=normalize,
            gumbel_considered=gumbel_considered,
            gumbel_simulations=gumbel_simulations,
            gumbel_visit=gumbel_visit,
            gumbel_scale=gumbel_scale,
            seed=seed,
        )

    def select(self, leaves: int = 1, trees: ArrayLike | None = None) -> Leaves:
        """Descends `leaves` times (1 to 255) in every tree, or in `trees` (ascending indices); tree after tree.

        Each row that is EVALUATE must be answered by `update` (or `expand` and `backup`), or taken back by `drop`,
        in any order and in any number of calls. A fresh tree gives its root, with parent and action -1.
        """
        return Leaves(self._trees.select(leaves, trees))

    def update(
        self,
        leaves: Leaves,
        values: ArrayLike,
        priors: ArrayLike | None = None,
        *,
        counts: ArrayLike | None = None,
        rewards: ArrayLike | None = None,
        terminal: ArrayLike | None = None,
    ) -> None:
        """Expands the leaves and backs their values up. Rows that are not EVALUATE are not read.

        values: float64 [n], from the leaf on. priors: float32 [n, A], >= 0 with a positive sum, normalised here; None
        leaves the leaf unexpanded. counts: int32 [n], how many entries of each row are actions (default A); 0 closes
        the leaf. rewards: float32 [n], of the edge into the leaf. terminal: bool [n], closes the leaf: every later
        visit backs up the same value (0 where the episode is over, a bootstrap where it was cut).
        Raises ValueError naming the row for NaN, infinite or negative numbers, a zero sum, or a leaf not in flight;
        then nothing was changed.
        """
        self._trees.update(leaves.rows, values, priors, counts, rewards, terminal)

    def expand(
        self,
        leaves: Leaves,
        priors: ArrayLike,
        *,
        counts: ArrayLike | None = None,
        rewards: ArrayLike | None = None,
        terminal: ArrayLike | None = None,
    ) -> None:
        """The first half of `update`: the leaves get their actions but stay in flight until `backup`."""
        self._trees.expand(leaves.rows, priors, counts, rewards, terminal)

    def backup(self, leaves: Leaves, values: ArrayLike) -> None:
        """The second half of `update`, once per leaf in flight, expanded or not."""
        self._trees.backup(leaves.rows, values)

    def drop(self, leaves: Leaves, *, fail: bool = False) -> None:
        """Takes leaves back as if never selected; `fail`: the edges into them are never chosen again."""
        self._trees.drop(leaves.rows, fail)

    def set_roots(self, values: ArrayLike, priors: ArrayLike, *, counts: ArrayLike | None = None) -> None:
        """Evaluates the roots of fresh trees: values [trees], priors [trees, A]. Not a simulation."""
        if self.simulations.any() or self.in_flight.any():
            raise ValueError("set_roots: expected trees whose roots were not evaluated yet, got trees that have grown")
        leaves = self.select()
        try:
            self.update(leaves, values, priors, counts=counts)
        except Exception:
            self.drop(leaves)
            raise

    def advance_root(self, actions: Sequence[int]) -> list[np.ndarray]:
        """Makes the child under actions[b] the root of tree b and frees the rest; action -1 empties the tree.

        Returns per tree int32 [kept]: the id that each kept node had (its new id is the position); empty where the
        child was never visited. Raises ValueError while leaves of a tree are in flight, or where it has a world.
        """
        if len(actions) != self.num_trees:
            raise ValueError(f"actions: expected one per tree ({self.num_trees}), got {len(actions)}")
        return [self._trees.advance_root(tree, operator.index(action)) for tree, action in enumerate(actions)]

    def advance_tree(self, tree: int, action: int) -> np.ndarray:
        """`advance_root` of one tree."""
        return self._trees.advance_root(tree, action)

    def reset(self, tree: int) -> None:
        """Empties one tree; the world of one that has it (`set_tables`, `set_household`) stays where it is."""
        self._trees.reset(tree)

    def add_root_noise(self, alpha: float, fraction: float, tree: int | None = None) -> None:
        """Root priors become (1 - fraction) · P + fraction · Dirichlet(alpha), in one tree, or in every tree with an
        expanded root. Raises ValueError where the root of `tree` is not expanded."""
        self._trees.add_root_noise(alpha, fraction, tree)

    def gumbel_actions(self) -> np.ndarray:
        """Sequential halving's choice per tree, int32 [trees]; -1 where the root has no action."""
        return self._trees.gumbel_actions()

    def root_visits(self) -> np.ndarray:
        """Visits of the root's children, int64 [trees, widest root]; leaves in flight not counted."""
        return self._trees.root_visits()

    def root_priors(self) -> np.ndarray:
        """Priors at the root, noise included, float32 [trees, widest root]."""
        return self._trees.root_priors()

    def root_q(self) -> np.ndarray:
        """Q of the root's children, float64 [trees, widest root]; NaN where unvisited."""
        return self._trees.root_q()

    def root_values(self) -> np.ndarray:
        """Mean value of the roots, float64 [trees]; 0 where not evaluated."""
        return self._trees.root_values()

    def view(self, tree: int) -> TreeView:
        """A copy of every node of one tree."""
        fields = self._trees.snapshot(tree)
        widths = np.maximum(fields["num_actions"], 0)
        fields["priors"] = np.split(fields["priors"], np.cumsum(widths)[:-1])
        return TreeView(**fields)

    @property
    def num_nodes(self) -> np.ndarray:
        """Nodes per tree, int64 [trees]."""
        return self._trees.counts()[0]

    @property
    def simulations(self) -> np.ndarray:
        """Visits of each root, its own evaluation included, int64 [trees]."""
        return self._trees.counts()[2]

    @property
    def in_flight(self) -> np.ndarray:
        """Leaves that wait for an answer, int64 [trees]."""
        return self._trees.counts()[3]

    @property
    def full(self) -> np.ndarray:
        """Trees that found no room for a leaf, bool [trees]."""
        return self._trees.counts()[4].astype(bool)

    def memory(self) -> dict[str, int]:
        """Bytes: of a node, of an edge, of the whole block, and of what the trees use of it."""
        per_node, per_edge = _C.search_bytes
        nodes, edges = self._trees.counts()[:2].sum(axis=1)
        used = int(nodes) * per_node + int(edges) * per_edge
        return {"node": per_node, "edge": per_edge, "block": self._trees.arena_bytes(), "used": used}

    def search_given(self, simulations: int, priors: ArrayLike, values: ArrayLike, *, leaves: int = 1) -> None:
        """The closed loop in C++ over given answers: priors [R, trees, A], values [R, trees].

        Evaluation e of tree b takes row (e mod R, b); the root's own evaluation, if due, is the first and is not
        counted as a simulation.
        """
        self._trees.search_given(simulations, leaves, priors, values)

    def search_hashed(self, simulations: int, actions: int, *, leaves: int = 1, seed: int = 0) -> None:
        """The closed loop over priors and values in [-1, 1) hashed from (seed, tree, node)."""
        self._trees.search_hashed(simulations, leaves, actions, seed)

    def set_tables(
        self,
        *,
        actions: ArrayLike,
        next: ArrayLike,
        rewards: ArrayLike,
        terminal: ArrayLike,
        priors: ArrayLike,
        values: ArrayLike,
        roots: ArrayLike,
        rollout_depth: int = 0,
    ) -> None:
        """Empties the trees and puts them at `roots` [trees] of a finite Markov decision process given as tables.

        actions, values: [S]; next, rewards, terminal, priors: [S, A]. rollout_depth > 0: a state's value is one
        random rollout of that many turns instead of values[state].
        """
        self._trees.set_tables(actions, next, rewards, terminal, priors, values, roots, rollout_depth)

    def search_tables(self, simulations: int, *, leaves: int = 1) -> None:
        """The closed loop over native worlds (`csrc/search/world.h`), here those of `set_tables`."""
        self._trees.search_tables(simulations, leaves)

    def advance_tables(self, tree: int, action: int) -> tuple[float, bool]:
        """Steps the root world of a `set_tables` tree, keeps the subtree; returns (reward, terminal)."""
        return self._trees.advance_tables(tree, action)

    def set_household(self, batch: Any, slots: Sequence[int], *, rollout_depth: int = 0) -> None:
        """Empties the trees and puts tree b at the present game of slot slots[b] of a `HouseholdBatch`, which stays
        as it is. Actions are the admissible commands in their sorted order, with equal priors; an episode out of steps
        is worth 0. rollout_depth > 0: a state's value is one random rollout of that many commands instead of 0.

        Raises ValueError for a slot without a running game, or not as many slots as trees. `search_worlds` and
        `advance_world` go on from here.
        """
        self._trees.set_household(batch._batch, list(slots), rollout_depth)

    def search_worlds(self, simulations: int, *, leaves: int = 1) -> None:
        """The closed loop in C++ over the worlds of `set_tables` or `set_household`."""
        self._trees.search_tables(simulations, leaves)

    def advance_world(self, tree: int, action: int) -> tuple[float, bool]:
        """Plays an action in a tree's root world and keeps the subtree; returns (reward, terminal)."""
        return self._trees.advance_tables(tree, action)
