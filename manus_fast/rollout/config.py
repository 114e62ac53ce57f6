"""The `rollout` block of a config: what samples, how, and how much at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class RolloutConfig:
    """How episodes are played.

    Raises:
        ValueError: a value out of range.
    """

    engine: str = "hf"
    """What samples: hf | vllm | openai | auto (vllm for a model on a GPU where it is installed, else hf)."""
    vllm_eager: bool = False
    """vLLM without torch.compile and CUDA graphs: it starts in seconds and decodes slower."""
    vllm_adapters: bool = False
    """vLLM keeps the adapters of model.lora apart from the weights, where they are not rounded to the weights' dtype;
    it decodes slower. hf samples from the model that is trained in any case."""
    vllm_prefill_every: int = 1
    """Steps of vLLM between two that take in new prompts, while others decode. Where replies are short (commands of
    some ten tokens) about half a reply's length plays more episodes an hour; with 36 tokens it makes no difference.
    1 takes in prompts at once."""
    sleep: int = 0
    """What the engine gives back while the weights are updated: 0 nothing, 1 its cache, 2 its weights too."""
    slots: int = 64
    """Requests that the engine samples at the same time, per process."""
    oversubscription: float = 1.0
    """Episodes under way for each slot: above 1 where worlds are slow, so that slots decode for one episode while
    another waits for its world."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Tokens kept; 0 keeps all."""
    min_p: float = 0.0
    max_turn_tokens: int = 128
    """Sampled tokens of one reply."""
    max_traj_tokens: int = 4096
    """Sampled tokens of one episode, over all its replies; observations do not count."""
    max_length: int = 4096
    """Tokens that the engine holds of an episode, prompt and reply together; the model's own limit goes before it."""
    max_consecutive_invalid: int = 0
    """Turns in a row without an admissible action after which an episode is cut; 0 never cuts."""
    cut_is_format_failure: bool = False
    """Whether a reply that a token limit cut counts against format and action."""
    staleness: int = 0
    """Policy versions that sampled tokens may lag behind the update they enter. 0 is strictly on policy: every episode
    begins and ends between two updates. With k, slots that have nothing left to do for an iteration begin episodes of
    the next k, which go on under new weights after the update."""
    correction: str = "token_truncate"
    """Correction of the difference between sampling and training policy."""

    def __post_init__(self) -> None:
        for name, low in (
            ("slots", 1),
            ("vllm_prefill_every", 1),
            ("oversubscription", 1),
            ("max_turn_tokens", 1),
            ("max_traj_tokens", 1),
            ("max_length", 2),
            ("max_consecutive_invalid", 0),
            ("staleness", 0),
            ("temperature", 0),
            ("top_k", 0),
        ):
            if not getattr(self, name) >= low:
                raise ValueError(f"rollout.{name}: expected a number >= {low}, got {getattr(self, name)}")
        if self.sleep not in (0, 1, 2):
            raise ValueError(f"rollout.sleep: expected 0, 1 or 2, got {self.sleep}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p: expected a number in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"rollout.min_p: expected a number in [0, 1), got {self.min_p}")

    @property
    def episodes(self) -> int:
        """Episodes that are under way at the same time, per process."""
        return math.ceil(self.slots * self.oversubscription)
