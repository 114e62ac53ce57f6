"""Beam search: the paths that the policy finds likeliest, a turn at a time.

The likelihood of a path is the sum over its turns of the mean log-probability of a reply's tokens. A path that fails,
ends or turns in a circle leaves its place to the next one.
"""

from __future__ import annotations

from manus_fast.search.base import Node, Proposal, Search, Step, Tree
from manus_fast.search.moves import expand, widening


def beam(tree: Tree) -> Search:
    """Sweeps from the root to the last turn with `breadth` paths, then with twice as many while budget is left."""
    return (yield from widening(tree, _sweep))


def _sweep(tree: Tree, breadth: int, count: int) -> Search:
    frontier = [tree.root]
    while frontier:
        candidates = sorted((yield from expand(tree, frontier, count)), key=likelihood, reverse=True)
        frontier = []
        while candidates and len(frontier) < breadth:
            taken, candidates = candidates[: breadth - len(frontier)], candidates[breadth - len(frontier) :]
            children: list[Node] = yield [Step(proposal) for proposal in taken]
            frontier += [child for child in children if not tree.dead(child)]


def likelihood(proposal: Proposal) -> float:
    """Of the path that ends with a proposal."""
    return proposal.score + sum(node.proposal.score for node in proposal.node.path)
