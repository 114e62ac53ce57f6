"""What strategies are made of: searches side by side, proposals of nodes, whole episodes, sweeps that widen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from manus_fast.search.base import Node, Request, Sample, Search, Step, Tree


def together(searches: Sequence[Search]) -> Search:
    """Runs several searches of one tree side by side, a round of requests at a time; returns their results in order.
    Rounds keep the order of events, and with it the tree, independent of who answers first."""
    results: list[Any] = [None] * len(searches)
    waiting: list[tuple[int, Search, list[Request]]] = []

    def advance(number: int, search: Search, answers: list[Any] | None) -> None:
        try:
            waiting.append((number, search, next(search) if answers is None else search.send(answers)))
        except StopIteration as stop:
            results[number] = stop.value

    for number, search in enumerate(searches):
        advance(number, search, None)
    while waiting:
        round_, waiting = waiting, []
        answers = yield [request for _, _, requests in round_ for request in requests]
        at = 0
        for number, search, requests in round_:
            advance(number, search, answers[at : at + len(requests)])
            at += len(requests)
    return results


def propose(node: Node, count: int) -> Search:
    """The node's proposals, sampled until `count` replies were drawn there; what rollouts drew counts too."""
    if node.drawn < count:
        yield [Sample(node, count - node.drawn)]
    return node.proposals


def expand(tree: Tree, nodes: Sequence[Node], count: int) -> Search:
    """Proposals of several nodes, `count` replies each, in the nodes' order. Each node that needs replies is a
    simulation; once the budget is spent, nodes give what they have."""
    searches = []
    for node in nodes:
        fresh = node.drawn < count and not tree.exhausted
        tree.simulations += fresh
        searches.append(propose(node, count if fresh else 0))
    found = yield from together(searches)
    return [proposal for proposals in found for proposal in proposals]


def widening(tree: Tree, sweep: Callable[[Tree, int, int], Search]) -> Search:
    """Sweeps with the config's breadth and proposals, then with twice as many of both as long as budget is left and
    the last sweep had something to ask for. Returns None: the best leaf is played."""
    breadth, count = tree.config.breadth, tree.config.proposals
    while True:
        before = tree.tokens
        yield from sweep(tree, breadth, count)
        if not (tree.config.widen and tree.limited) or tree.exhausted or tree.tokens == before:
            return None
        breadth, count = 2 * breadth, 2 * count


def play_out(node: Node, temperature: float | None = None) -> Search:
    """Plays the policy from a node until nothing can follow or no budget is left; returns the last node."""
    while not node.closed:
        (proposals,) = yield [Sample(node, 1, temperature)]
        if not proposals:
            break
        (node,) = yield [Step(proposals[0])]
    return node
