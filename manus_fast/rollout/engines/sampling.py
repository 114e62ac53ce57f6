"""Sampling many rows of logits at once, each with its own random number and its own truncation."""

from __future__ import annotations

import numpy as np
import torch


def sample(
    logits: torch.Tensor,
    uniform: np.ndarray,
    temperature: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    min_p: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws one token a row by inverting the cumulative distribution.

    Args:
        logits: float32 [n, V]; may be overwritten.
        uniform: float64 [n] in [0, 1): the row's random number.
        temperature: float32 [n]; 0 takes the most probable token.
        top_p: float32 [n]; 1 keeps everything. Counted after `min_p` and `top_k`, on what they left.
        top_k: int64 [n]; 0 keeps everything.
        min_p: float32 [n]: keeps tokens with at least this share of the greatest probability; 0 keeps everything.

    Returns:
        tokens int64 [n] and log_probs float32 [n] under the distribution that the token was drawn from, softmax(logits
        / temperature) over the tokens that truncation keeps; for greedy rows at temperature 1 and over all tokens. A
        row with NaN logits has a NaN log-probability.
    """
    device = logits.device
    greedy = temperature == 0
    if (temperature != 1).any():
        scale = np.where(greedy, np.float32(1), temperature)
        logits = logits / torch.from_numpy(scale).to(device)[:, None]
    log_probs = torch.log_softmax(logits, dim=-1)
    kept: torch.Tensor | None = None  # mass that truncation leaves
    if greedy.all():
        tokens = log_probs.argmax(-1)
    else:
        weights = log_probs.exp()
        truncates = bool((top_p < 1).any() or (top_k > 0).any() or (min_p > 0).any())
        if truncates:
            weights = _truncate(weights, *(torch.from_numpy(x).to(device) for x in (top_p, top_k, min_p)))
        # float64: at 150,000 entries float32 sums would lose the tail.
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        kept = cumulative[:, -1] if truncates else None
        target = torch.from_numpy(uniform).to(device)[:, None] * cumulative[:, -1:]
        # right=True finds the first entry above the target, which therefore has a weight above 0.
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(device), log_probs.argmax(-1), tokens)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    if kept is not None:
        chosen = chosen - torch.where(torch.from_numpy(greedy).to(device), 0.0, kept.log().float())
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _truncate(weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Probabilities [n, V] with everything outside min_p, then top_k, then top_p set to 0."""
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    kept = ordered >= min_p[:, None] * ordered[:, :1]
    kept &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    ordered = ordered * kept
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    before = cumulative - ordered
    kept &= (before < top_p[:, None] * cumulative[:, -1:]) | (top_p[:, None] >= 1)
    return torch.zeros_like(weights).scatter_(-1, index, ordered * kept)
