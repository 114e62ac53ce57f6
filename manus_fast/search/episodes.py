"""Whole episodes without a tree: `greedy` plays one, `best_of_n` plays several and keeps the best.

Episodes that begin alike share their nodes, and so are played (but not generated) once.
"""

from __future__ import annotations

import itertools

from manus_fast.search.base import Node, Score, Search, Tree
from manus_fast.search.moves import play_out


def greedy(tree: Tree) -> Search:
    """The most probable reply at every turn."""
    tree.simulations += 1
    return (yield from play_out(tree.root, temperature=0.0))


def best_of_n(tree: Tree) -> Search:
    """Sampled episodes, one after the other, `n` of them or as many as the budget gives. The best leaf is played, or
    the episode that the judge scores highest, the first of equals."""
    config = tree.config
    ends: dict[Node, None] = {}
    for number in itertools.count():
        if tree.exhausted or (not tree.limited and number >= config.n):
            break
        before = tree.tokens
        tree.simulations += 1
        end = yield from play_out(tree.root)
        if end.error is None and end is not tree.root:
            ends[end] = None
        if tree.tokens == before:  # no reply fits: more episodes would say nothing either
            break
    if config.judge != "model" or not ends:
        return None
    scores = yield [Score(end, episode=True) for end in ends]
    return max(zip(scores, ends, strict=True), key=lambda pair: pair[0])[1]
