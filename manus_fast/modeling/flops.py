"""What a forward pass costs, by what was asked of it: the count behind the share that common prefixes save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Work:
    """What forward passes computed since the last `take`, and what the same rows would cost one by one."""

    rows_tokens: int = 0
    """Tokens of the rows."""
    tokens: int = 0
    """Tokens that went through the decoder."""
    flops: float = 0.0
    rows_flops: float = 0.0

    def add(self, *, rows_tokens: int, tokens: int, rows_flops: float, flops: float) -> None:
        self.rows_tokens += rows_tokens
        self.tokens += tokens
        self.rows_flops += rows_flops
        self.flops += flops

    def take(self) -> dict[str, float]:
        """{"tokens_shared": share of the rows' tokens that needn't be computed, "flops_ratio": rows' FLOPs over those
        computed}, and begins anew; empty where nothing was computed."""
        if not self.tokens:
            return {}
        shared, ratio = 1.0 - self.tokens / self.rows_tokens, self.rows_flops / self.flops
        self.rows_tokens, self.tokens, self.rows_flops, self.flops = 0, 0, 0.0, 0.0
        return {"tokens_shared": shared, "flops_ratio": ratio}


def forward_flops(model: Any, tokens: int, pairs: int, trained: int) -> float:
    """FLOPs of one forward pass of a decoder with an lm head on trained tokens; a backward pass takes twice as many.

    Two for each weight of a layer's matrices and token, four for each (token, visible token) pair, query head and
    dimension of it, two for each weight of the lm head and trained token. Embeddings, norms and softmax do not count.

    Args:
        model: a Hugging Face causal LM.
        tokens: that go through the layers.
        pairs: (token, visible token) pairs of attention.
        trained: tokens that reach the lm head.
    """
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads * head
    layers = model.base_model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.dim() > 1)
    total = 2.0 * weights * tokens + 4.0 * queries * config.num_hidden_layers * pairs
    return total + 2.0 * model.get_output_embeddings().weight.numel() * trained
