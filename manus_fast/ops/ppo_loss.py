"""The policy-gradient loss: clip, dual clip, value clip, entropy, KL, and all statistics a trainer logs, in one pass.

Sources: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; dual clip, Ye et al. 2020, arXiv 1912.09729; sequence
ratio (GSPO), arXiv 2507.18071; CISPO, arXiv 2506.13585; KL estimators, http://joschu.net/blog/kl-approx.html.
"""

from dataclasses import dataclass, fields
from numbers import Integral, Real

import torch

from manus_fast.ops import dispatch, graph
from manus_fast.ops.checks import check_boundaries, check_scalar, check_tensors, is_finite
from manus_fast.ops.reference.ppo_loss import RATIO_BOUNDS

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
CLIPS = ("ppo", "cispo", "none")
KLS = ("k1", "k2", "k3", "k3+")

# The entries of the statistics vector, in the order of LossStat in csrc/ops/ops.h: sums, then two maxima. Losses are
# shares of the whole batch's loss (divided by its denominator): added over micro-batches and ranks they give its value.
STAT_NAMES = (
    "count", "dropped", "policy_loss", "value_loss", "kl_loss", "entropy_loss",
    "clip_low", "clip_high", "dual_clip", "value_clip",
    "k1", "k3", "ref_kl", "entropy", "ratio", "weight", "advantage", "return", "return_sq", "error", "error_sq",
    *(f"ratio_above_{bound:g}" for bound in RATIO_BOUNDS),
    "ratio_max", "log_ratio_max",
)  # fmt: skip
MAXIMA = 2


@dataclass(frozen=True)
class PPOLossConfig:
    """What the loss is made of. Every combination is allowed; the names of algorithms are combinations.

    clip_range, clip_range_high: the ratio is clipped to [1 - clip_range, 1 + clip_range_high]; None: symmetric.
    dual_clip: for a negative advantage the loss is at most dual_clip * |advantage|; None: off. Only with clip "ppo".
    value_clip: how far the value may move from the old one; None: off.
    kl: estimator of KL(policy | reference). "k3+" has the value of k3 and the gradient of k2.
    ratio: "token", or "sequence": the mean log ratio of the row at each of its tokens (GSPO).
    clip: "ppo", "cispo" (the clipped ratio is a constant weight of the log-probability), "none".
    aggregation: what the denominator counts, see `loss_denominator`.
    norm_length: the constant length of "seq-mean-token-sum-norm", in tokens.
    """

    clip_range: float = 0.2
    clip_range_high: float | None = None
    dual_clip: float | None = 3.0
    value_clip: float | None = 0.5
    vf_coef: float = 0.5
    ent_coef: float = 0.0
    kl_coef: float = 0.0
    kl: str = "k3"
    ratio: str = "token"
    clip: str = "ppo"
    aggregation: str = "token-mean"
    norm_length: int | None = None

    def __post_init__(self):
        for name, allowed in (
            ("kl", KLS),
            ("ratio", ("token", "sequence")),
            ("clip", CLIPS),
            ("aggregation", AGGREGATIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got '{getattr(self, name)}'")
        numbers = isinstance(self.clip_range, Real) and isinstance(self.high, Real)
        if not numbers or not 0 <= self.clip_range <= 1 or not self.high >= 0:
            raise ValueError(f"clip_range: expected 0 to 1 (high >= 0), got {self.clip_range}, high {self.high}")
        if self.dual_clip is not None and not (isinstance(self.dual_clip, Real) and self.dual_clip > 1):
            raise ValueError(f"dual_clip: expected a number > 1 or None, got {self.dual_clip}")
        if self.value_clip is not None and not (isinstance(self.value_clip, Real) and self.value_clip > 0):
            raise ValueError(f"value_clip: expected a number > 0 or None, got {self.value_clip}")
        for name in ("vf_coef", "ent_coef", "kl_coef"):
            if not is_finite(getattr(self, name)):
                raise ValueError(f"{name}: expected a finite number, got {getattr(self, name)}")
        needs_length = self.aggregation == "seq-mean-token-sum-norm"
        if needs_length and not (isinstance(self.norm_length, Integral) and self.norm_length >= 1):
            raise ValueError(f"norm_length: expected tokens >= 1 with {self.aggregation}, got {self.norm_length}")

    @property
    def high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


def ppo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    mean: torch.Tensor | float = 0.0,
    rstd: torch.Tensor | float = 1.0,
    denominator: torch.Tensor | float,
    weights: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    old_values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    ref_log_prob: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    config: PPOLossConfig = PPOLossConfig(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss = policy + vf_coef * value + kl_coef * KL - ent_coef * entropy, each a sum over the mask / denominator.

    Per-token arrays are float32 `[N]` packed or `[B, T]`, all of one shape, contiguous; mask is bool. What they hold
    where mask is False is never read. float64 runs on the reference. Gradients flow to log_prob, values and entropy.

    mean, rstd: the policy term uses (advantages - mean) * rstd; see `manus_fast.ops.gae.normalizer`.
    denominator: the count for the whole batch over all ranks and micro-batches (`loss_denominator`, summed); the
      gradient then does not depend on how the batch was cut. 0: loss and gradient are 0. These three: numbers or
      scalar tensors.
    weights: importance-correction weight of the policy term, constant. None: 1.
    values, returns: both or none; old_values besides, unless value_clip is None. values given: a value term.
    ref_log_prob: a KL term; entropy: an entropy term. None: no such term.
    cu_seqlens: int32 `[R + 1]`, the rows of a packed batch `[N]`; needed there by ratio "sequence" and
      "seq-mean-token-mean", refused with `[B, T]`, whose rows are its own.

    Gradients reach nothing but those three, whatever else requires one. A token whose log-probability, new or old, is
    not finite is left out, of the mean log ratio of its row too, and counted as dropped. Log ratios are clamped
    to ±20, where the gradient is 0; k3 to 10. Returns the loss, a float32 scalar, and float64 statistics
    `[len(STAT_NAMES)]` on the device: `merge_loss_stats` joins them, `loss_metrics` reads them. ValueError for other
    shapes, types or layouts.
    """
    if torch.compiler.is_compiling():  # one node of the graph, which takes the way below when it runs
        fixed = [old_log_prob, advantages, mask, weights, old_values, returns, ref_log_prob, cu_seqlens]
        fixed = [None if x is None else x.detach() for x in fixed]
        scalars = [part for x in (mean, rstd, denominator) for part in graph.number_or_tensor(x)]
        settings = [getattr(config, name) for name in _SETTINGS]
        trained = graph.wanted(log_prob, values, entropy)
        loss, stats, _ = _in_graph(log_prob, values, entropy, *fixed, *scalars, *settings, trained)
        return loss, stats.detach()
    check_tensors(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, mask=mask)
    if log_prob.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log_prob: expected float32, got {log_prob.dtype}")
    if log_prob.dim() not in (1, 2):
        raise ValueError(f"log_prob: expected shape [N] or [B, T], got {list(log_prob.shape)}")
    _check_config(config)
    arrays = {
        "log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages, "weights": weights,
        "values": values, "old_values": old_values, "returns": returns, "ref_log_prob": ref_log_prob,
        "entropy": entropy,
    }  # fmt: skip
    for name, tensor in (*arrays.items(), ("mask", mask)):
        dtype = torch.bool if name == "mask" else log_prob.dtype
        if tensor is None:
            continue
        check_tensors(**{name: tensor})
        if tensor.shape != log_prob.shape or tensor.dtype != dtype or tensor.device != log_prob.device:
            raise ValueError(
                f"{name}: expected {dtype} {list(log_prob.shape)} on {log_prob.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    if (values is None) != (returns is None):
        raise ValueError("returns: expected together with values, got one without the other")
    if values is not None and config.value_clip is not None and old_values is None:
        raise ValueError("old_values: expected with values unless value_clip is None, got None")
    for name, scalar in (("mean", mean), ("rstd", rstd), ("denominator", denominator)):
        check_scalar(name, scalar)
    mean, rstd, denominator = map(_constant, (mean, rstd, denominator))
    known = not isinstance(denominator, torch.Tensor) or denominator.device.type == "cpu"
    if known and not 0 <= float(denominator) < float("inf"):
        raise ValueError(f"denominator: expected a finite count >= 0, got {float(denominator)}")
    _check_rows(log_prob, cu_seqlens)
    fixed = (old_log_prob, advantages, weights, old_values, returns, ref_log_prob)
    old_log_prob, advantages, weights, old_values, returns, ref_log_prob = map(_constant, fixed)
    scale, sequence_log_ratio = _by_sequence(log_prob, old_log_prob, mask, cu_seqlens, config)
    run = dispatch.choose("ppo_loss", log_prob.device)
    if log_prob.dtype == torch.float64:
        if dispatch.requested() not in ("auto", "reference"):
            raise ValueError(f"log_prob: expected float32 on backend '{dispatch.requested()}', got float64")
        from manus_fast.ops.reference.ppo_loss import ppo_loss as run
    return run(
        log_prob, old_log_prob, advantages, mask,
        mean=mean, rstd=rstd, denominator=denominator, weights=weights, scale=scale,
        sequence_log_ratio=sequence_log_ratio, values=values, old_values=old_values, returns=returns,
        ref_log_prob=ref_log_prob, entropy=entropy, config=config,
    )  # fmt: skip


_SETTINGS = tuple(field.name for field in fields(PPOLossConfig))  # in the order of the arguments below


@torch.library.custom_op("manus_fast::ppo_loss", mutates_args=())
def _in_graph(
    log_prob: torch.Tensor,
    values: torch.Tensor | None,
    entropy: torch.Tensor | None,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None,
    old_values: torch.Tensor | None,
    returns: torch.Tensor | None,
    ref_log_prob: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    mean: torch.Tensor | None,
    mean_number: float,
    rstd: torch.Tensor | None,
    rstd_number: float,
    denominator: torch.Tensor | None,
    denominator_number: float,
    clip_range: float,
    clip_range_high: float | None,
    dual_clip: float | None,
    value_clip: float | None,
    vf_coef: float,
    ent_coef: float,
    kl_coef: float,
    kl: str,
    ratio: str,
    clip: str,
    aggregation: str,
    norm_length: int | None,
    trained: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    settings = (clip_range, clip_range_high, dual_clip, value_clip, vf_coef, ent_coef, kl_coef)
    config = PPOLossConfig(*settings, kl, ratio, clip, aggregation, norm_length)

    def run(log_prob, values, entropy):
        return ppo_loss(
            log_prob, old_log_prob, advantages, mask,
            mean=mean_number if mean is None else mean,
            rstd=rstd_number if rstd is None else rstd,
            denominator=denominator_number if denominator is None else denominator,
            weights=weights, values=values, old_values=old_values, returns=returns, ref_log_prob=ref_log_prob,
            entropy=entropy, cu_seqlens=cu_seqlens, config=config,
        )  # fmt: skip

    (loss, stats), ticket = graph.record(run, [log_prob, values, entropy], trained)
    return loss, stats, ticket


@_in_graph.register_fake
def _(log_prob, *_):
    stats = log_prob.new_empty(len(STAT_NAMES), dtype=torch.float64)
    return log_prob.new_empty(()), stats, graph.empty_ticket()


graph.register_gradient(_in_graph, places=[0, 1, 2], trained=17 + len(_SETTINGS), outputs=2)


def loss_denominator(mask: torch.Tensor, cu_seqlens: torch.Tensor | None, config: PPOLossConfig) -> torch.Tensor:
    """This batch's part of the denominator, a float64 scalar: add over micro-batches and ranks for `ppo_loss`.

    "token-mean": tokens in the mask. "seq-mean-*": rows with any, times norm_length for "seq-mean-token-sum-norm".
    """
    check_tensors(mask=mask)
    _check_config(config)
    if mask.dtype != torch.bool or mask.dim() not in (1, 2):
        raise ValueError(f"mask: expected bool [N] or [B, T], got {mask.dtype} {list(mask.shape)}")
    _check_rows(mask, cu_seqlens)
    if config.aggregation == "token-mean":
        return mask.sum(dtype=torch.float64)
    count = (_row_sums(mask, cu_seqlens)[0] > 0).sum(dtype=torch.float64)
    return count * config.norm_length if config.aggregation == "seq-mean-token-sum-norm" else count


def merge_loss_stats(stats: torch.Tensor) -> torch.Tensor:
    """Statistics float64 `[..., len(STAT_NAMES)]` of parts of a batch → of the whole: sums added, maxima taken.

    Of no part at all: zeros, as of an empty batch.
    """
    if stats.dtype != torch.float64 or stats.shape[-1:] != (len(STAT_NAMES),):
        raise ValueError(f"stats: expected float64 [..., {len(STAT_NAMES)}], got {stats.dtype} {list(stats.shape)}")
    parts = stats.reshape(-1, len(STAT_NAMES))
    if not len(parts):
        return stats.new_zeros(len(STAT_NAMES))
    return torch.cat([parts[:, :-MAXIMA].sum(0), parts[:, -MAXIMA:].amax(0)])


def loss_metrics(stats: torch.Tensor) -> dict[str, float]:
    """The statistics as numbers for a log; copies them to the host, so call it once a step. Means are over the tokens.

    approx_kl_k1, approx_kl_k3: KL(old | policy). ratio_p95_bound: at least 95 % of the ratios are at or below it.
    explained_variance: 1 - Var(return - value) / Var(return), 0 when the returns do not vary.
    """
    s = dict(zip(STAT_NAMES, stats.tolist(), strict=True))
    n = max(s["count"], 1.0)
    variance = s["return_sq"] / n - (s["return"] / n) ** 2
    unexplained = s["error_sq"] / n - (s["error"] / n) ** 2
    bounds = [b for b in RATIO_BOUNDS if s[f"ratio_above_{b:g}"] <= 0.05 * s["count"]]
    return {
        **{name: s[name] for name in ("count", "dropped", "policy_loss", "value_loss", "kl_loss", "entropy_loss")},
        **{f"{name}_fraction": s[name] / n for name in ("clip_low", "clip_high", "dual_clip", "value_clip")},
        "clip_fraction": (s["clip_low"] + s["clip_high"]) / n,
        "approx_kl_k1": s["k1"] / n, "approx_kl_k3": s["k3"] / n,
        "ref_kl": s["ref_kl"] / n, "entropy": s["entropy"] / n,
        "ratio_mean": s["ratio"] / n, "ratio_max": s["ratio_max"], "log_ratio_max": s["log_ratio_max"],
        "ratio_p95_bound": min(bounds[0], s["ratio_max"]) if bounds else s["ratio_max"],
        "weight_mean": s["weight"] / n, "advantage_mean": s["advantage"] / n, "return_mean": s["return"] / n,
        "explained_variance": 1 - unexplained / variance if variance > 1e-12 * s["return_sq"] / n else 0.0,
    }  # fmt: skip


def _constant(x):
    """x, as the kernels see it: what the reference computes from it must have no gradient either."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def _check_config(config):
    if not isinstance(config, PPOLossConfig):
        raise ValueError(f"config: expected a PPOLossConfig, got {type(config).__name__}")


def _check_rows(x, cu_seqlens):
    if cu_seqlens is None:
        return
    check_boundaries(cu_seqlens, x.numel(), x.device)
    if x.dim() != 1:
        raise ValueError(f"cu_seqlens: expected None with arrays [B, T], got boundaries with {list(x.shape)}")


def _by_sequence(log_prob, old_log_prob, mask, cu_seqlens, config):
    """Per-token 1 / (tokens of the row) and the row's mean log ratio, each None where the configuration needs none."""
    mean_of_rows, sequence = config.aggregation == "seq-mean-token-mean", config.ratio == "sequence"
    if not (mean_of_rows or sequence):
        return None, None
    with torch.no_grad():
        finite = mask & torch.isfinite(log_prob) & torch.isfinite(old_log_prob)
        log_ratio = torch.where(finite, log_prob - old_log_prob, 0.0)
        # The denominator counts dropped tokens, as it does for every aggregation; a mean of log ratios cannot.
        scale, ratio = None, None
        if mean_of_rows:
            length, _, row_of = _row_sums(mask, cu_seqlens)
            scale = (1 / length.clamp(min=1))[row_of].to(log_prob.dtype)
        if sequence:
            kept, total, row_of = _row_sums(finite, cu_seqlens, log_ratio)
            ratio = (total / kept.clamp(min=1))[row_of].to(log_prob.dtype)
    return scale, ratio


def _row_sums(mask, cu_seqlens, x=None):
    """Per row: tokens in the mask, the sum of x (both float64 `[R]`), and the row of each token, the shape of mask."""
    if mask.dim() == 2:
        total = None if x is None else x.sum(1, dtype=torch.float64)
        row_of = torch.arange(mask.shape[0], device=mask.device)[:, None].expand(mask.shape)
        return mask.sum(1, dtype=torch.float64), total, row_of
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: expected int32 [R + 1] for packed arrays with rows in the loss, got None")

    def sums(y):
        running = torch.cat([y.new_zeros(1, dtype=torch.float64), y.cumsum(0, dtype=torch.float64)])
        ends = running[cu_seqlens.long()]
        return ends[1:] - ends[:-1]

    position = torch.arange(mask.numel(), dtype=torch.int32, device=mask.device)
    row_of = torch.searchsorted(cu_seqlens, position, right=True) - 1
    return sums(mask), None if x is None else sums(x), row_of


class WrittenGradient(torch.autograd.Function):
    """Joins a kernel that writes loss and gradients together to autograd: backward only scales what is there."""

    @staticmethod
    def forward(ctx, launch, scale, log_prob, values, entropy):
        """launch() → loss, stats, gradients of (log_prob, values, entropy), None for absent inputs.

        scale(gradients, upstream) → the gradients times the scalar tensor upstream.
        """
        loss, stats, gradients = launch()
        ctx.save_for_backward(*[g for g in gradients if g is not None])
        ctx.present = [g is not None for g in gradients]
        ctx.scale, ctx.spent = scale, False
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, _):
        # The gradients are handed out, perhaps scaled in place: there is nothing left for a second call.
        if ctx.spent:
            raise RuntimeError("ppo_loss: backward was called twice; call the op again instead of retain_graph=True")
        ctx.spent = True
        scaled = iter(ctx.scale(ctx.saved_tensors, upstream))
        gradients = [next(scaled) if present else None for present in ctx.present]
        return None, None, *gradients
