"""What a finished tree teaches: step-level preference pairs, sibling groups, rows in which a shared turn counts once.

Only replies that the policy sampled are in a tree, with their log-probabilities; greedy ones (temperature 0) are no
samples and stay out of everything here that a policy gradient may use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manus_fast.agent.trajectory import Row, Trajectory, build_rows
from manus_fast.search.base import Node, Proposal, Tree


@dataclass(frozen=True)
class Sibling:
    """A played proposal with what its subtree came to."""

    proposal: Proposal
    outcome: float
    """Discounted return from its turn on: the best that was found beneath it."""
    solved: bool
    """A solution lies beneath."""


def outcomes(tree: Tree) -> dict[Node, tuple[float, bool]]:
    """Of every node: (best discounted return from the turn that led to it, whether a solution lies at or beneath it).

    An unfinished leaf counts with its value, where it has one. Failed branches are left out.
    """
    found: dict[Node, tuple[float, bool]] = {}
    for node in reversed(tree.nodes):  # children come after their parents
        if node.error is not None:
            continue
        below = [found[p.child] for p in node.proposals if p.child in found]
        future = max((value for value, _ in below), default=0.0 if node.value is None or node.closed else node.value)
        solved = node.success or any(won for _, won in below)
        found[node] = (node.reward + tree.config.discount * future, solved)
    return found


def sibling_groups(tree: Tree) -> list[list[Sibling]]:
    """Sets of proposals that were sampled at one node and played: by construction the same prompt and the same anchor,
    as GRPO's and GiGPO's step groups need them. In the order of the nodes; sets of one are left out."""
    found = outcomes(tree)
    groups = []
    for node in tree.nodes:
        group = [Sibling(p, *found[p.child]) for p in node.proposals if p.child in found and p.temperature > 0]
        if len(group) > 1:
            groups.append(group)
    return groups


def sibling_episodes(trees: Sequence[Tree]) -> list[Trajectory]:
    """`sibling_groups` in the form that a policy-gradient update takes: an episode of one turn for every sibling, its
    outcome as the reward, a group for every node.

        update = PolicyGradientUpdate(policy, backend, PPOConfig(advantage="grpo", share_prefixes=True), …)
        update.run(build_rows(episodes), Episodes.of(episodes), …)

    A group has one prompt and one anchor, so GRPO compares actions in the very same situation, and with
    `share_prefixes` what the nodes of a tree have in common is computed once. Replies with the same action count as
    one, the first of them.
    """
    episodes: list[Trajectory] = []
    groups = 0
    for tree in trees:
        for group in sibling_groups(tree):
            for member, sibling in enumerate(group):
                episode = tree.trajectory(sibling.proposal.child, member=member)
                turn = dataclasses.replace(episode.turns[-1], reward=sibling.outcome, reward_parts={})
                episodes.append(
                    dataclasses.replace(
                        episode, turns=[turn], group=groups, success=sibling.solved, terminated=True, truncated=False
                    )
                )
            groups += 1
    return episodes


def preference_pairs(
    tree: Tree, system: str, *, margin: float = 0.0, per_node: int = 1, tokenizer: str | None = None
) -> list[dict[str, Any]]:
    """Records of preferences.jsonl, level "step": at a node, a reply that led to a solution against one that did not.

    Args:
        system: the system message that every conversation began with.
        margin: by how much the chosen outcome has to be higher, at least.
        per_node: pairs of one node: the best reply against the `per_node` worst.
        tokenizer: fingerprint of the policy's (`data.preferences.fingerprint`): the pairs then carry what was sampled.

    Raises:
        ValueError: a negative margin, or no pair to a node.
    """
    if not margin >= 0 or per_node < 1:
        raise ValueError(f"margin, per_node: expected numbers >= 0 and >= 1, got {margin} and {per_node}")
    pairs = []
    for group in sibling_groups(tree):
        best = max(group, key=lambda sibling: (sibling.solved, sibling.outcome))
        losers = sorted((s for s in group if not s.solved), key=lambda sibling: sibling.outcome)[:per_node]
        if not best.solved:
            continue
        for loser in losers:
            difference = best.outcome - loser.outcome
            if difference < margin:
                continue
            sampled = {name: [_sampled(side.proposal)] for name, side in (("chosen", best), ("rejected", loser))}
            pairs.append(
                {
                    "prompt": messages(best.proposal.node, system),
                    "chosen": [{"role": "assistant", "content": best.proposal.text}],
                    "rejected": [{"role": "assistant", "content": loser.proposal.text}],
                    "level": "step",
                    "source": f"search/{tree.config.strategy}",
                    "margin": difference,
                    "outcome": [1.0, 0.0],
                    **({} if tokenizer is None else {"tokens": {"tokenizer": tokenizer, **sampled}}),
                }
            )
    return pairs


def _sampled(proposal: Proposal) -> dict[str, Any]:
    """A reply after its prompt, in the form of `data.preferences.encode_rows`."""
    prompt = proposal.node.conversation.prompt()
    ids = [int(token) for token in (*prompt, *proposal.ids)]
    return {"ids": ids, "spans": [[len(prompt), len(ids), proposal.node.depth]]}


def messages(node: Node, system: str) -> list[dict[str, str]]:
    """The conversation up to the reply at a node, without the list of admissible actions."""
    root = node
    turns: list[Node] = node.path
    while root.parent is not None:
        root = root.parent
    said = [{"role": "system", "content": system}, {"role": "user", "content": root.observation}]
    for turn in turns:
        said.append({"role": "assistant", "content": turn.proposal.text})
        said.append({"role": "user", "content": turn.observation})
    return said


def rows_once(trajectories: Sequence[Trajectory]) -> list[Row]:
    """Rows of episodes of one or several trees in which each turn is trained on once, whoever shares it: a turn whose
    node id an earlier episode had keeps its tokens as context, but neither mask nor reward. Rows that have nothing
    left are dropped. Turns without a node id count as their own.

    Trained with, the loss is that over the nodes of the trees, not over their paths.
    """
    seen: set[int] = set()
    kept: list[Row] = []
    for row in build_rows(trajectories):
        turns = trajectories[row.episode].turns
        for number in sorted(set(row.turn_id[row.loss_mask].tolist())):
            node = turns[number].node_id
            if node is None:
                continue
            if node in seen:
                where = row.turn_id == number
                row.loss_mask[where] = False
                row.turn_id[where] = -1
                row.log_prob[where] = 0.0
                row.reward[where] = 0.0
            seen.add(node)
        if row.loss_mask.any():
            kept.append(row)
    return kept
