"""Monte Carlo tree search over actions, on the C++ tree engine (rules: reference.py, docs/search.md).

A simulation selects an edge, plays its action, has the new node's proposals sampled (they are its edges, with their
priors) and its value estimated, and backs the value up with the reward of the turn. A branch that fails, or that turns
in a circle, is taken out of the tree: neither a reward nor a visit.
"""

from __future__ import annotations

import numpy as np

from manus_fast.search.base import Node, Search, Step, Tree
from manus_fast.search.config import SearchConfig
from manus_fast.search.engine import EVALUATE, TERMINAL, Leaves, TreeBatch
from manus_fast.search.moves import propose, together
from manus_fast.search.values import values

_DEFAULT_SIMULATIONS = 32
# Simulations in a row without a new leaf after which a tree counts as closed.
_IDLE = 64


class MCTS:
    """The strategy; one arena serves all trees that are searched at the same time, by their slots."""

    def __init__(self, config: SearchConfig, slots: int):
        own = config.mcts
        self.config = config
        self.simulations = config.simulations
        if self.simulations is None and config.budget_tokens is None:
            self.simulations = _DEFAULT_SIMULATIONS
        self._nodes: dict[int, list[Node]] = {}
        """By slot: the nodes of the arena tree, by arena id."""
        self._flying: dict[int, Leaves] = {}
        """By slot: leaves that wait for their answer."""
        self.trees = TreeBatch(
            slots,
            own.max_nodes,
            max_edges=own.max_nodes * config.proposals,
            rule=own.rule,
            c=own.c,
            discount=config.discount,
            normalize=own.normalize,
            gumbel_considered=own.gumbel_considered,
            gumbel_simulations=(own.per_move or config.simulations or 0) if own.gumbel_considered else 0,
        )

    def __call__(self, tree: Tree) -> Search:
        """Plays to the best leaf; with `per_move`, to where its moves have led and their tree points.

        A tree whose every leaf is closed starts again with twice the proposals (`widen`), over the nodes it has.
        """
        count, start = self.config.proposals, tree.root
        try:
            while True:
                before = tree.tokens
                nodes, ended = yield from self._grow(tree, start, count)
                again = not ended and self.config.widen and tree.limited and tree.tokens > before
                if not again or self._spent(tree):
                    break
                self._record(tree)
                start, count = nodes[0], 2 * count
        finally:  # a solution may close the search at any request
            waiting = self._flying.pop(tree.slot, None)
            if waiting is not None:
                self.trees.drop(waiting)
            self._record(tree)
        return None if self.config.mcts.per_move is None else _most_visited(nodes[0])

    def _grow(self, tree: Tree, start: Node, count: int) -> Search:
        """Searches from a node in an empty arena tree until the budget is spent (or an episode is played to its end:
        True), or nothing new is met (False). Returns the nodes by arena id, and which."""
        self.trees.reset(tree.slot)
        nodes = self._nodes[tree.slot] = [start]
        per_move, moved, idle = self.config.mcts.per_move, tree.simulations, 0
        if not (yield from self._root(tree, start, count)):
            return nodes, True
        while not self._spent(tree):
            before = tree.simulations
            new = yield from self._simulate(tree, nodes, count)
            idle = 0 if new else idle + 1
            if idle == _IDLE or (tree.simulations == before and not new):
                return nodes, bool(self.trees.full[tree.slot])
            if per_move is not None and tree.simulations - moved >= per_move:
                moved = tree.simulations
                left = self._move(tree, nodes)
                if left is None:
                    return nodes, False
                nodes = self._nodes[tree.slot] = left
                if nodes[0].closed:
                    return nodes, True
        return nodes, True

    def _spent(self, tree: Tree) -> bool:
        return tree.exhausted or (self.simulations is not None and tree.simulations >= self.simulations)

    def _root(self, tree: Tree, node: Node, count: int) -> Search:
        """Evaluates the root of an empty arena tree; False where it has no proposals."""
        own = self.config.mcts
        yield from propose(node, count)
        if not node.proposals:
            return False
        (value,) = yield from values(tree, [node])
        priors, _ = _edges([node])
        self.trees.update(self.trees.select(trees=[tree.slot]), [value], priors)
        if own.noise_alpha > 0:
            self.trees.add_root_noise(own.noise_alpha, own.noise_fraction, tree.slot)
        return True

    def _simulate(self, tree: Tree, nodes: list[Node], count: int) -> Search:
        """One simulation, or as many side by side as `leaves` says; returns how many new leaves they met."""
        limit = self.config.mcts.leaves
        if self.simulations is not None:
            limit = min(limit, self.simulations - tree.simulations)
        rows = self.trees.select(limit, trees=[tree.slot])
        tree.simulations += int(((rows.status == EVALUATE) | (rows.status == TERMINAL)).sum())
        new = rows[rows.status == EVALUATE]
        if len(new) == 0:
            return 0
        self._flying[tree.slot] = new
        edges = zip(new.parent.tolist(), new.action.tolist(), strict=True)
        children: list[Node] = yield [Step(nodes[parent].proposals[action]) for parent, action in edges]
        for arena, child in zip(new.node.tolist(), children, strict=True):
            nodes += [child] * (arena + 1 - len(nodes))
            nodes[arena] = child
        lost = np.array([child.error is not None or tree.circles(child) for child in children])
        if lost.any():
            self.trees.drop(new[lost], fail=True)
            self._flying[tree.slot] = new[~lost]
        kept = [child for child, gone in zip(children, lost, strict=True) if not gone]
        if kept:
            yield from self._answer(tree, new[~lost], kept, count)
        del self._flying[tree.slot]
        return len(new)

    def _answer(self, tree: Tree, leaves: Leaves, nodes: list[Node], count: int) -> Search:
        """Proposals, values, and the backup of both."""
        yield from together([propose(node, count) for node in nodes if not node.closed])
        found = yield from values(tree, nodes)
        priors, counts = _edges(nodes)
        self.trees.update(
            leaves,
            found,
            priors,
            counts=counts,
            rewards=[node.reward for node in nodes],
            terminal=[node.closed for node in nodes],
        )

    def _move(self, tree: Tree, nodes: list[Node]) -> list[Node] | None:
        """Plays the root's most visited action (or sequential halving's choice) and keeps its subtree; returns the
        nodes by their new arena ids, or None where every action has failed."""
        self._record(tree)
        if self.config.mcts.gumbel_considered:
            action = int(self.trees.gumbel_actions()[tree.slot])
        else:
            action = int(self.trees.root_visits()[tree.slot].argmax())
        child = nodes[0].proposals[action].child
        if child is None or child.error is not None or tree.circles(child):
            return None
        kept = self.trees.advance_tree(tree.slot, action)
        return [nodes[old] for old in kept.tolist()] or None

    def _record(self, tree: Tree) -> None:
        """Writes the engine's statistics onto the nodes."""
        nodes = self._nodes.get(tree.slot, [])
        view = self.trees.view(tree.slot)
        for node, visits, q in zip(nodes, view.visits.tolist(), view.q.tolist(), strict=False):
            node.visits, node.q = visits, q if visits else None


def _edges(nodes: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Priors float32 [n, widest] and how many of each row there are, int32 [n]; none closes the leaf."""
    counts = np.array([0 if node.closed else len(node.proposals) for node in nodes], np.int32)
    priors = np.zeros((len(nodes), max(1, counts.max())), np.float32)
    for row, node, count in zip(priors, nodes, counts, strict=True):
        row[:count] = [proposal.prior for proposal in node.proposals[:count]]
    return priors, counts


def _most_visited(node: Node) -> Node:
    """Where the most visited actions lead from a node."""
    while True:
        children = [p.child for p in node.proposals if p.child is not None and p.child.visits]
        if not children:
            return node
        node = max(children, key=lambda child: child.visits)
