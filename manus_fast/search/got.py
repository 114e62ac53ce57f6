"""Graph of thoughts over actions (after Besta et al., AAAI 2024): generate, refine, merge, score, keep.

As tree of thoughts, and besides: a refused or empty action is answered by the policy, which now sees the refusal
(refine), and nodes that stand in the same situation become one: the better path stays, the other ends (merge). The
situation is what the environment's rules depend on, so that whatever solves one solves the other; environments that
do not tell theirs are never merged.
"""

from __future__ import annotations

from manus_fast.search.base import Node, Search, Step, Tree
from manus_fast.search.moves import expand, widening
from manus_fast.search.tot import keep_best


def got(tree: Tree) -> Search:
    """Sweeps over a graph. Nodes that are merged away carry `merged_into`."""
    return (yield from widening(tree, _sweep))


def _sweep(tree: Tree, breadth: int, count: int) -> Search:
    frontier = [tree.root]
    known: dict[int, Node] = {} if tree.root.situation is None else {tree.root.situation: tree.root}
    while frontier:
        proposals = yield from expand(tree, frontier, count)
        if not proposals:
            return
        children: list[Node] = yield [Step(proposal) for proposal in proposals]
        children += yield from _refine(tree, [child for child in children if child.repeats])
        fresh = [node for node in children if not tree.dead(node)]
        frontier = yield from keep_best(tree, _merge(tree, fresh, known), breadth)


def _refine(tree: Tree, refused: list[Node]) -> Search:
    """Lets the policy answer each refusal, `refinements` times; returns what that led to."""
    found: list[Node] = []
    for _ in range(tree.config.refinements):
        refused = [node for node in refused if not node.closed]
        proposals = yield from expand(tree, refused, 1)
        if not proposals:
            break
        children: list[Node] = yield [Step(proposal) for proposal in proposals]
        found += children
        refused = [child for child in children if child.repeats]
    return found


def _merge(tree: Tree, nodes: list[Node], known: dict[int, Node]) -> list[Node]:
    """The nodes in situations that no better node has; `known` holds the best node of each situation so far."""
    discount = tree.config.discount
    kept: dict[int, Node] = {}
    alone: list[Node] = []
    for node in nodes:
        if node.situation is None:
            alone.append(node)
            continue
        rival = known.get(node.situation)
        if rival is None or rival is node:
            better = True
        else:
            better = (node.total(discount), -node.depth) > (rival.total(discount), -rival.depth)
        if better:
            if rival is not None and rival is not node and rival not in (tree.root, *node.path):
                rival.merged_into = node  # never one of its own path, which would end with it
            node.merged_into = None
            known[node.situation] = kept[node.situation] = node
        else:
            node.merged_into = rival
    return alone + [node for node in kept.values() if node.merged_into is None]
