"""What an unfinished path is worth: its node's value, estimated once and kept there.

(value,) = yield from values(tree, [node])
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from manus_fast.agent.trajectory import Row
from manus_fast.search.base import Ask, Node, Proposal, Score, Search, Step, Tree
from manus_fast.search.moves import play_out, propose, together

QUESTION = (
    "Do not act now. Can the task still be fulfilled from here in the turns that are left? "
    "Answer with one word: sure, likely or impossible."
)
# The scale of Yao et al., "Tree of Thoughts" (NeurIPS 2023), app. B.1, brought from 20, 1, 0.001 into [0, 1].
VERDICTS = {"sure": 1.0, "likely": 0.05, "impossible": 0.0}


def values(tree: Tree, nodes: Sequence[Node]) -> Search:
    """Sets `value` of the nodes that have none yet and returns all of them; closed nodes are worth 0.

    A node whose value needs tokens that are no longer there keeps None and counts as 0.
    """
    kind = tree.config.value
    new = [node for node in nodes if node.value is None and not node.closed]
    if not new:
        pass  # an empty list of requests would be a mistake
    elif kind == "model":
        scores = yield [Score(node) for node in new]
        for node, score in zip(new, scores, strict=True):
            node.value = float(score)
    elif kind == "reward":
        for node in new:
            node.value = 0.0
    else:
        estimate = _rollouts if kind == "rollout" else _verdicts
        for node, estimated in zip(new, (yield from together([estimate(tree, n) for n in new])), strict=True):
            node.value = estimated
    return [0.0 if node.closed or node.value is None else node.value for node in nodes]


def _rollouts(tree: Tree, node: Node) -> Search:
    """Mean discounted return of `votes` episodes played from a node; None where no reply could be had.

    The first one begins with the reply that was sampled first at the node, so that its tokens serve twice. Nodes on
    the way belong to the tree as any others do.
    """
    starts = []
    if not node.proposals:
        yield from propose(node, 1)
    if node.proposals:
        first = node.proposals[0]
        starts = [_from(first), *(play_out(node) for _ in range(tree.config.votes - 1))]
    ends = yield from together(starts)
    returns = [end.total(tree.config.discount) for end in ends if end is not node and end.error is None]
    if not returns:
        return None
    so_far = node.total(tree.config.discount)
    return float(np.mean([(r - so_far) / tree.config.discount**node.depth for r in returns]))


def _from(proposal: Proposal) -> Search:
    (child,) = yield [Step(proposal)]
    return (yield from play_out(child))


def _verdicts(tree: Tree, node: Node) -> Search:
    """Mean verdict of `votes` replies to QUESTION; a reply without one of the words is worth nothing."""
    texts = yield [Ask(node, QUESTION, number) for number in range(tree.config.votes)]
    words = [re.search("|".join(VERDICTS), text.lower()) for text in texts if text is not None]
    if not words:
        return None
    return float(np.mean([VERDICTS[word[0]] if word else 0.0 for word in words]))


def prompt_row(node: Node) -> Row:
    """The row whose last token is the last one before the policy would reply at a node: what `score` is asked with."""
    ids = node.conversation.prompt().astype(np.int64)
    length = len(ids)
    return Row(
        token_ids=ids,
        loss_mask=np.zeros(length, bool),
        turn_id=np.full(length, -1, np.int32),
        log_prob=np.zeros(length, np.float32),
        reward=np.zeros(length, np.float32),
        episode=0,
        terminated=False,
    )
