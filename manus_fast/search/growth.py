"""How nodes come to be: what an environment's answer makes of the turn that asked for it."""

from __future__ import annotations

import numpy as np

from manus_fast.agent.context import Context
from manus_fast.agent.protocol import Protocol
from manus_fast.rewards.shaping import Shape, TurnFacts
from manus_fast.rollout.scheduler import RolloutConfig
from manus_fast.rollout.seeds import mix64
from manus_fast.search.base import Node, Proposal, Tree
from manus_fast.search.states import Arrival


class Growth:
    """Rewards, ends and conversations of nodes are those that a rollout would give the same turns.

    Args:
        context, protocol, rollout, shape: as a rollout has them.
        system: system message of every conversation.
    """

    def __init__(self, context: Context, protocol: Protocol, rollout: RolloutConfig, shape: Shape | None, system: str):
        self.context, self.protocol, self.rollout, self.shape, self.system = context, protocol, rollout, shape, system

    def begin(self, tree: Tree, arrival: Arrival) -> Node:
        """The root, once its task was reset. A failure there ends the whole tree."""
        root, result = tree.root, arrival.result
        if result.failed:
            tree.error = root.error = f"environment: {result.info['error']}"
        root.observation, root.admissible = result.observation, result.info.get("admissible")
        root.progress = float(result.info.get("progress", 0.0))
        root.state, root.situation = arrival.state, arrival.situation
        root.conversation = self.context.start(
            self.system, self.protocol.user_message(result.observation, root.admissible)
        )
        return root

    def grow(self, tree: Tree, proposal: Proposal, arrival: Arrival) -> Node:
        """The child that a proposal leads to."""
        parent, result = proposal.node, arrival.result
        node = tree.add(parent, proposal)
        proposal.child = node
        node.key = _key(parent.key, proposal.action)
        node.observation, node.admissible = result.observation, result.info.get("admissible")
        node.state, node.situation = arrival.state, arrival.situation
        tree.steps += 1
        if result.failed:
            node.error = f"environment: {result.info['error']}"
            tree.failed += 1
            return node
        node.success, node.score = bool(result.info.get("success", False)), result.score
        node.progress = float(result.info.get("progress", parent.progress))
        node.reward_parts = self._rewards(proposal, result.reward, node.success, node.progress - parent.progress)
        node.reward = sum(node.reward_parts.values())
        node.invalid_run = 0 if proposal.admissible else parent.invalid_run + 1
        node.terminated = result.terminated
        node.truncated = not result.terminated and (
            result.truncated
            or node.depth >= tree.max_steps
            or 0 < self.rollout.max_consecutive_invalid <= node.invalid_run
        )
        before = {tree.root.situation, *(above.situation for above in parent.path)}
        node.repeats = not node.success and node.situation is not None and node.situation in before
        if not node.closed:
            node.conversation = parent.conversation.clone()
            node.conversation.add(proposal.ids, self.protocol.user_message(node.observation, node.admissible))
        if node.success:
            tree.solve(node)
        return node

    def question(self, node: Node, question: str) -> np.ndarray:
        """int32 [P]: the prompt at a node as if its observation ended with a question."""
        user = self.protocol.user_message(f"{node.observation}\n{question}", node.admissible)
        if node.parent is None:
            return self.context.start(self.system, user).prompt()
        conversation = node.parent.conversation.clone()
        conversation.add(node.proposal.ids, user)
        return conversation.prompt()

    def _rewards(self, proposal: Proposal, reward: float, success: bool, progress: float) -> dict[str, float]:
        if self.shape is None:
            return {"environment": reward}
        return self.shape(
            TurnFacts(
                env_reward=reward,
                success=success,
                action=proposal.action,
                format_ok=proposal.format_ok and not proposal.excused,
                admissible=proposal.admissible,
                excused=proposal.excused,
                progress=progress,
            )
        )


def _key(parent: int, action: str) -> int:
    """Hash of a path of actions."""
    key = parent
    for byte in action.encode("utf-8", "surrogatepass"):
        key = mix64(key ^ byte)
    return key
