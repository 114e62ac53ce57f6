"""From replies to proposals: what is asked of the engine, and how replies that mean the same action are merged.

The prior of an action is its share of exp(sum log-prob / length), summed over the distinct replies that meant it: the
geometric mean of a token's probability, so that long thoughts do not lose to short ones.
"""

from __future__ import annotations

import math

from manus_fast.agent.context import Context
from manus_fast.agent.protocol import NO_ACTION, Protocol
from manus_fast.rollout import engine
from manus_fast.rollout.scheduler import RolloutConfig
from manus_fast.rollout.seeds import derive
from manus_fast.search.base import Node, Proposal, Tree


class Proposals:
    """Makes requests at nodes and reads their completions.

    Args:
        context, protocol: chat format, parser.
        rollout: limits and sampling.
        max_length: tokens that the engine holds of a prompt and its reply.
    """

    def __init__(self, context: Context, protocol: Protocol, rollout: RolloutConfig, max_length: int):
        self.context, self.protocol, self.rollout, self.max_length = context, protocol, rollout, max_length

    def limit(self, tree: Tree, node: Node) -> int:
        """Tokens that the next reply at a node may have; below 1: there is no room for one."""
        said = sum(len(above.proposal.ids) for above in node.path)
        room = self.max_length - len(node.conversation.prompt())
        limits = [self.rollout.max_turn_tokens, self.rollout.max_traj_tokens - said, room]
        if tree.remaining is not None:
            limits.append(tree.remaining)
        return min(limits)

    def request(self, tree: Tree, node: Node, id: int, temperature: float) -> engine.Request | None:
        """The request for the next reply at a node, its tokens reserved; None where there is no room for it."""
        limit = self.limit(tree, node)
        if limit < 1:
            return None
        tree.reserved += limit
        number, node.asked = node.asked, node.asked + 1
        rollout = self.rollout
        return engine.Request(
            id=id,
            prompt_ids=node.conversation.prompt(),
            seed=derive(tree.seed, node.key, number),
            max_tokens=limit,
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
        )

    def accept(self, tree: Tree, node: Node, asked: engine.Request, completion: engine.Completion) -> Proposal | None:
        """The proposal that a reply means. None for a reply that the budget cut: nobody knows what it would have said.
        Priors are made anew by `settle`."""
        cut = completion.finish_reason == "length"
        if cut and asked.max_tokens < self.rollout.max_turn_tokens and tree.remaining is not None:
            return None
        excused = cut and not self.rollout.cut_is_format_failure
        text = self.context.format.decode(completion.ids)
        parsed = self.protocol.parse(text)
        proposal = next((p for p in node.proposals if p.action == parsed.action), None)
        if proposal is None:
            known = node.admissible
            proposal = Proposal(
                node=node,
                action=parsed.action,
                thought=parsed.thought,
                text=text,
                ids=completion.ids,
                log_probs=completion.log_probs,
                finish_reason=completion.finish_reason,
                version=completion.version,
                format_ok=parsed.format_ok or excused,
                admissible=parsed.action != NO_ACTION and (known is None or parsed.action in known),
                excused=excused,
                temperature=asked.temperature,
            )
            node.proposals.append(proposal)
        else:
            tree.merged += 1
        proposal.replies += 1
        node.drawn += 1
        mark = completion.ids.tobytes()
        if mark not in proposal.seen:
            proposal.seen.add(mark)
            proposal.weight += weight(completion)
        return proposal


def weight(completion: engine.Completion) -> float:
    """exp(sum log-prob / length): 0 for an empty reply."""
    return math.exp(float(completion.log_probs.mean())) if len(completion.ids) else 0.0


def settle(node: Node) -> None:
    """Makes the priors of a node's proposals anew: shares of their weights, equal ones where all weights are 0."""
    total = sum(p.weight for p in node.proposals)
    for proposal in node.proposals:
        proposal.prior = proposal.weight / total if total > 0 else 1.0 / len(node.proposals)
