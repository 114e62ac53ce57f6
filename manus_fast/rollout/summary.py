"""What a collection of episodes looks like, in named figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manus_fast.agent.trajectory import Trajectory


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the valid episodes (reward parts among them, and success by kind of task where there are several);
    failed ones are counted and in no mean."""
    valid = [t for t in trajectories if t.valid]
    numbers: dict[str, float] = {"train/episodes": len(trajectories), "train/failed": len(trajectories) - len(valid)}
    if not valid:
        return numbers
    turns = [turn for t in valid for turn in t.turns]
    numbers |= {
        "train/reward": float(np.mean([t.reward for t in valid])),
        "train/reward_std": float(np.std([t.reward for t in valid])),
        "train/success": float(np.mean([t.success for t in valid])),
        "train/turns": float(np.mean([len(t.turns) for t in valid])),
        "train/tokens": float(np.mean([t.sampled_tokens for t in valid])),
        "train/truncated_rate": float(np.mean([t.truncated for t in valid])),
        "train/valid_action_rate": float(np.mean([turn.admissible for turn in turns])),
        "train/format_rate": float(np.mean([turn.format_ok for turn in turns])),
        "train/repeat_rate": float(np.mean([repeat_rate([turn.ids for turn in t.turns]) for t in valid])),
    }
    kinds = sorted({t.task_type for t in valid})
    if len(kinds) > 1:
        for kind in kinds:
            numbers[f"train_success/{kind}"] = float(np.mean([t.success for t in valid if t.task_type == kind]))
    for name in sorted({name for t in valid for name in t.reward_parts}):
        numbers[f"reward/{name}"] = float(np.mean([t.reward_parts.get(name, 0.0) for t in valid]))
    return numbers


def repeat_rate(replies: Sequence[np.ndarray], n: int = 4) -> float:
    """Share of an episode's n-grams of sampled tokens (within replies) that occurred before in it: near 1 where a
    policy has collapsed into saying one thing. 0 where no reply has n tokens."""
    grams = []
    for ids in replies:
        tokens = np.asarray(ids).tolist()
        grams += [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
