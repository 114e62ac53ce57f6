"""Named algorithms as settings of the `ppo` block; every field can still be set otherwise.

| name            | source                                                                             |
|-----------------|------------------------------------------------------------------------------------|
| ppo             | Schulman et al. 2017, arXiv 1707.06347, with turn-level GAE                        |
| grpo            | Shao et al. 2024, arXiv 2402.03300                                                 |
| dr_grpo         | Liu et al. 2025, arXiv 2503.20783: no division by the deviation nor by the length  |
| dapo            | Yu et al. 2025, arXiv 2503.14476: clip-higher, dynamic sampling, overlong penalty  |
| rloo            | Ahmadian et al. 2024, arXiv 2402.14740                                             |
| reinforce++     | Hu 2025, arXiv 2501.03262: returns whitened over the batch, KL in the reward       |
| gigpo           | Feng et al. 2025, arXiv 2505.10978                                                 |
| gspo            | Zheng et al. 2025, arXiv 2507.18071: ratio of the sequence                         |
| cispo           | MiniMax 2025, arXiv 2506.13585: clipped weight, no clipped gradient                |
"""

from __future__ import annotations

from typing import Any

from manus_fast.learn.advantages import GROUP_KINDS

# Episodes of one task that group advantages compare, where the config does not say: as GiGPO's authors play ALFWorld.
GROUP_SIZE = 8

_GRPO = {"advantage": "grpo", "aggregation": "seq-mean-token-mean"}

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": "turn"},
    "grpo": _GRPO,
    "dr_grpo": {"advantage": "grpo", "group_std": False, "aggregation": "seq-mean-token-sum-norm", "norm_length": 1024},
    "dapo": {
        "advantage": "grpo",
        "aggregation": "token-mean",
        "clip_range_high": 0.28,
        "dynamic_sampling": True,
        "overlong_buffer": 0.2,
    },
    "rloo": {"advantage": "rloo", "aggregation": "token-mean"},
    "reinforce++": {"advantage": "return", "gamma": 1.0, "kl_in": "reward"},
    "gigpo": {"advantage": "gigpo", "gamma": 0.95, "aggregation": "token-mean"},
    "gspo": {**_GRPO, "ratio": "sequence", "clip_range": 3e-4, "clip_range_high": 4e-4},
    "cispo": {"advantage": "grpo", "clip": "cispo", "clip_range": 1.0, "clip_range_high": 0.28},
}


def group_size(algorithm: str) -> int:
    """`training.group_size` of a preset: group advantages need more than one episode of a task."""
    return GROUP_SIZE if PRESETS[algorithm]["advantage"] in GROUP_KINDS else 1


def preset(algorithm: str) -> dict[str, Any]:
    """The keys of the `ppo` block that `algorithm` sets; the config file and the command line go over them.

    Raises:
        ValueError: unknown name.
    """
    if algorithm not in PRESETS:
        raise ValueError(f"algorithm: expected one of {', '.join(PRESETS)}, got {algorithm!r}")
    return dict(PRESETS[algorithm])
