"""A value model from finished search trees: V(situation) regressed on the best return that search found from there.

    policy = fit_values(model, trees)
    trees = player.search(tasks, config=SearchConfig(value="model"), score=policy.value_of())
    save_values(policy, "runs/value")

The value model is a copy of the policy's decoder with a linear head (learn/policy.py, critic "separate"); the policy
itself is left as it is. Each node counts once, however many paths share it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import pack
from manus_fast.learn.minibatch import mini_batches
from manus_fast.learn.policy import Policy
from manus_fast.paths import check_path
from manus_fast.search.base import Node, Tree
from manus_fast.search.targets import outcomes
from manus_fast.search.values import prompt_row

FILE = "value.safetensors"


def value_rows(trees: Sequence[Tree]) -> tuple[list[Row], np.ndarray]:
    """One row a leaf path with the positions of its nodes, and what they are worth.

    Returns:
        Rows whose loss mask is True on the first token after each node's prompt, nodes that an earlier row has left
        out; and float32 [N] targets over all rows laid end to end, 0 off the mask: the best discounted return that
        was found from the node on.
    """
    rows: list[Row] = []
    targets: list[np.ndarray] = []
    for tree in trees:
        found, seen = outcomes(tree), set()
        for leaf in tree.nodes:
            if leaf.error is not None or any(p.child in found for p in leaf.proposals) or leaf.parent is None:
                continue
            row, target = _path(tree, leaf, found, seen)
            if row.loss_mask.any():
                rows.append(row)
                targets.append(target)
    return rows, np.concatenate(targets) if targets else np.zeros(0, np.float32)


def _path(tree: Tree, leaf: Node, found: dict[Node, tuple[float, bool]], seen: set[Node]) -> tuple[Row, np.ndarray]:
    row = prompt_row(leaf.parent)
    row.token_ids = np.concatenate([row.token_ids, leaf.proposal.ids.astype(np.int64)])
    length = len(row.token_ids)
    row.loss_mask, row.turn_id = np.zeros(length, bool), np.full(length, -1, np.int32)
    row.log_prob, row.reward = np.zeros(length, np.float32), np.zeros(length, np.float32)
    target = np.zeros(length, np.float32)
    for turn, node in enumerate([tree.root, *leaf.path[:-1]]):
        at = len(node.conversation.prompt())
        whole = at < length and np.array_equal(node.conversation.prompt(), row.token_ids[:at])
        if node in seen or not whole:  # a windowed context has its own prompt for every turn
            continue
        seen.add(node)
        row.loss_mask[at], row.turn_id[at] = True, turn
        target[at] = max(found[p.child][0] for p in node.proposals if p.child in found)
    return row, target


def fit_values(
    model: Any,
    trees: Sequence[Tree],
    *,
    epochs: int = 4,
    batch_size: int = 32,
    learning_rate: float = 5e-4,
    head_scale: float = 10.0,
    seed: int = 0,
) -> Policy:
    """A policy with a separate critic that fits the trees' values by mean squared error, every node weighing the same.

    Args:
        model: the causal LM that searched. It is not changed.
        head_scale: learning rate of the head, which starts at 0, as a multiple of the decoder's.

    Raises:
        ValueError: no tree with a played turn, or a number below 1.
    """
    for name, number in (("epochs", epochs), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {number}")
    rows, targets = value_rows(trees)
    if not rows:
        raise ValueError("trees: expected at least one played turn, got none")
    policy = Policy(model, "separate")
    packed = pack(rows)
    packed.returns = torch.from_numpy(targets)
    optimizer = torch.optim.AdamW(
        [
            {"params": list(policy.critic.parameters()), "lr": learning_rate},
            {"params": list(policy.value_head.parameters()), "lr": head_scale * learning_rate},
        ],
        weight_decay=0.01,
    )
    frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        for epoch in range(epochs):
            for index in mini_batches(len(rows), min(batch_size, len(rows)), seed, epoch):
                batch = packed.select(index).to(policy.device)
                where = batch.trainable
                value = policy.score(batch, value=True).value[where]
                loss = (value - batch.returns[where]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return policy


def save_values(policy: Policy, folder: str | os.PathLike[str]) -> None:
    """Writes critic and head to `folder`/value.safetensors."""
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    tensors = {f"critic.{name}": t.detach().contiguous() for name, t in policy.critic.state_dict().items()}
    tensors |= {f"head.{name}": t.detach() for name, t in policy.value_head.state_dict().items()}
    save_file(tensors, Path(folder) / FILE)


def load_values(model: Any, folder: str | os.PathLike[str]) -> Policy:
    """A policy over `model` with the value model that `save_values` wrote.

    Raises:
        ValueError: no such file, or one for a decoder of another shape.
    """
    from safetensors.torch import load_file

    check_path("value model", folder)
    file = Path(folder) / FILE
    if not file.is_file():
        raise ValueError(f"value model: expected a folder with {FILE}, got {str(folder)!r}")
    tensors = load_file(file)
    policy = Policy(model, "separate")
    for part, module in (("critic.", policy.critic), ("head.", policy.value_head)):
        own = {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            raise ValueError(f"value model: expected one for this model's decoder in {str(folder)!r}") from error
    return policy
