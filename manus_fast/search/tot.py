"""Tree of thoughts, breadth first (Yao et al., NeurIPS 2023): every proposal of a turn is played and valued, the best
`breadth` nodes go on. A node ranks by the return of its path with its value; the likelier path wins a tie."""

from __future__ import annotations

from collections.abc import Sequence

from manus_fast.search.base import Node, Search, Step, Tree
from manus_fast.search.beam import likelihood
from manus_fast.search.moves import expand, widening
from manus_fast.search.values import values


def tot(tree: Tree) -> Search:
    """Sweeps like beam search's, by value."""
    return (yield from widening(tree, _sweep))


def _sweep(tree: Tree, breadth: int, count: int) -> Search:
    frontier = [tree.root]
    while frontier:
        proposals = yield from expand(tree, frontier, count)
        if not proposals:
            return
        children: list[Node] = yield [Step(proposal) for proposal in proposals]
        frontier = yield from keep_best(tree, [child for child in children if not tree.dead(child)], breadth)


def keep_best(tree: Tree, nodes: Sequence[Node], breadth: int) -> Search:
    """The `breadth` nodes of highest return, values included, best first."""
    if len(nodes) > 1:  # one alone needs no value
        yield from values(tree, nodes)
    return sorted(nodes, key=lambda node: (-tree.return_of(node), -likelihood(node.proposal)))[:breadth]
