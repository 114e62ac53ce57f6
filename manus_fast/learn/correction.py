"""Importance weights for tokens that were sampled by another policy than the one the update starts from.

Engines round differently from the trainer, and stale rollouts come from earlier weights, so three policies are kept
apart: the one that sampled (`rollout_log_prob`), the one the update starts from (`old_log_prob`), and the current one.
The loss clips current / old; the weight here, old / sampled, is a constant factor of the policy term. With
w = exp(old - sampled), clamped to e^±20, per token, and W its product over the row:

| mode              | weight                                             | source                                     |
|-------------------|----------------------------------------------------|--------------------------------------------|
| none              | 1                                                  |                                            |
| token_truncate    | min(w, 2)                                          | Yao et al. 2025, truncated importance      |
| token_mask        | w where 0.5 <= w <= 5, else 0                      | IcePop, Ling team 2025, arXiv 2510.18855   |
| sequence_truncate | min(W, 2) for every token of the row               | the same at sequence level                 |
| sequence_mask     | W where W <= 3, else 0                             |                                            |
| geometric_mask    | 1 where the mean of log w is within ±1 % , else 0  |                                            |
"""

from __future__ import annotations

import logging

import torch

from manus_fast.data.packing import PackedRows

log = logging.getLogger("manus_fast.learn")

MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")

TRUNCATE = 2.0
TOKEN_BAND = (0.5, 5.0)
SEQUENCE_LIMIT = 3.0
GEOMETRIC_BAND = (0.99, 1.01)


def importance_weights(packed: PackedRows, mode: str) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Weights float32 [N] (None where all are 1), and what was seen.

    Args:
        packed: with `old_log_prob`. A token whose sampled log-probability is not finite gets weight 0.
        mode: one of MODES.

    Returns:
        The weights, and "correction/…": mean and largest |old - sampled|, mean and 95th percentile of the ratio,
        effective sample size as a share of the tokens, share of tokens whose weight the mode changed.
    """
    check_mode(mode)
    where = packed.trainable
    if len(where) == 0:
        return None, {}
    gap = (packed.old_log_prob - packed.rollout_log_prob)[where].float()
    usable = torch.isfinite(gap)
    log_ratio = torch.where(usable, gap, 0.0).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    weight = torch.where(usable, _weights(log_ratio, packed.row[where], packed.rows, mode), 0.0)
    seen = ratio[usable]
    metrics = {}
    if len(seen):
        plain = _plain(log_ratio, packed.row[where], packed.rows, mode)
        metrics = {
            "correction/gap_mean": float(gap[usable].abs().mean()),
            "correction/ratio_mean": float(seen.mean()),
            "correction/gap_max": float(gap[usable].abs().max()),
            "correction/ratio_p95": float(seen.kthvalue(max(1, round(0.95 * len(seen)))).values),
            "correction/effective_share": float(seen.sum() ** 2 / (len(seen) * seen.square().sum())),
            "correction/changed_share": float((weight != plain)[usable].float().mean()),
        }
    if mode == "none" and bool(usable.all()):
        return None, metrics
    return torch.zeros_like(packed.reward).index_copy(0, where, weight), metrics


def check_mode(mode: str) -> None:
    """Raises ValueError for a name outside MODES."""
    if mode not in MODES:
        raise ValueError(f"rollout.correction: expected one of {', '.join(MODES)}, got {mode!r}")


def warn_of_truncated_sampling(
    mode: str, top_p: float, top_k: int, min_p: float, measured: float | None = None
) -> bool:
    """Warns, and returns True, where a correction is on while sampling leaves tokens out: the mean ratio is then the
    mass that was kept (about 0.9 at top_p 0.9) instead of 1, which no weight can undo.

    Args:
        mode: one of MODES.
        top_p, top_k, min_p: of the sampling.
        measured: the mean ratio of a collection; None where none was measured.
    """
    truncated = top_p < 1.0 or top_k > 0 or min_p > 0.0
    if mode != "none" and truncated:
        seen = "" if measured is None else f", by a mean ratio of {measured:.3f} where 1 was expected"
        log.warning(
            "rollout.correction is %r while sampling leaves tokens out (top_p %g, top_k %d, min_p %g): the weights are "
            "biased%s; use top_p 1, top_k 0 and min_p 0 for training rollouts",
            mode, top_p, top_k, min_p, seen,
        )  # fmt: skip
        return True
    return False


def _weights(log_ratio: torch.Tensor, row: torch.Tensor, rows: int, mode: str) -> torch.Tensor:
    plain = _plain(log_ratio, row, rows, mode)
    if mode in ("token_truncate", "sequence_truncate"):
        return plain.clamp(max=TRUNCATE)
    if mode == "token_mask":
        return torch.where((plain >= TOKEN_BAND[0]) & (plain <= TOKEN_BAND[1]), plain, 0.0)
    if mode == "sequence_mask":
        return torch.where(plain <= SEQUENCE_LIMIT, plain, 0.0)
    if mode == "geometric_mask":
        count = torch.zeros(rows, device=row.device).index_add(0, row, torch.ones_like(log_ratio))
        mean = (_row_sums(log_ratio, row, rows) / count.clamp(min=1)).exp()[row]
        return torch.where((mean >= GEOMETRIC_BAND[0]) & (mean <= GEOMETRIC_BAND[1]), plain, 0.0)
    return plain


def _plain(log_ratio: torch.Tensor, row: torch.Tensor, rows: int, mode: str) -> torch.Tensor:
    """The weight before the mode cuts it."""
    if mode in ("none", "geometric_mask"):
        return torch.ones_like(log_ratio)
    if mode in ("sequence_truncate", "sequence_mask"):
        return _row_sums(log_ratio, row, rows).clamp(-20.0, 20.0).exp()[row]
    return log_ratio.exp()


def _row_sums(x: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.float64, device=x.device).index_add(0, row, x.double()).float()
