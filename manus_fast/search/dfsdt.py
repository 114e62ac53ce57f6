"""Depth first with siblings (the DFSDT of Qin et al., "ToolLLM", ICLR 2024): a path is played to its end; from a dead
end the search goes back `backtrack` turns and lets the policy try something else there.

A dead end is an episode that ended unsolved, a turn back into a situation of the path, or a failed branch. A node
has at most `breadth` children; when none is left at the root the bound rises by one and the walk begins again
(iterative broadening, Ginsberg and Harvey, 1992), through the nodes that are there.
"""

from __future__ import annotations

from manus_fast.search.base import Node, Sample, Search, Step, Tree

# Replies a node may draw for each child it may have: a policy that is sure of itself repeats what it said.
_DRAWS = 2


def dfsdt(tree: Tree) -> Search:
    """Plays to the best leaf that the walk met."""
    breadth, node = tree.config.breadth, tree.root
    walked: set[Node] = set()
    before = -1
    while True:
        child = yield from _next(tree, node, breadth, walked)
        if child is None and node.parent is not None:
            node = node.parent
        elif child is None:
            if not tree.config.widen or not tree.limited or tree.exhausted or tree.tokens == before:
                return None
            before, breadth = tree.tokens, breadth + 1
            walked.clear()
        elif not tree.dead(child):
            node = child
        elif child.terminated or child.truncated:
            tree.simulations += 1
            node = _back(child, tree.config.backtrack)


def _next(tree: Tree, node: Node, breadth: int, walked: set[Node]) -> Search:
    """The next child to go to: one that this walk has not been at, else a new one; None where there is none."""
    children = [proposal.child for proposal in node.proposals if proposal.child is not None]
    for child in children:
        if child not in walked and not tree.dead(child):
            walked.add(child)
            return child
    while len(children) < breadth and node.drawn < _DRAWS * breadth and not tree.exhausted:
        (proposals,) = yield [Sample(node, 1)]
        if not proposals:
            return None
        if proposals[0].child is None:
            (child,) = yield [Step(proposals[0])]
            walked.add(child)
            return child
    return None


def _back(node: Node, turns: int) -> Node:
    for _ in range(turns):
        node = node.parent or node
    return node
