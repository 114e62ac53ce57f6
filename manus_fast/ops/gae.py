"""Generalised advantage estimation over masked rows, at token or at turn level, padded or packed.

Source: Schulman et al. 2016, arXiv 1506.02438, equation 16. Masked tokens carry the next value and advantage over
unchanged. Statistics for whitening come from the same pass: nothing reads the advantages again before the loss does.
"""

import torch

from manus_fast.ops import dispatch
from manus_fast.ops.checks import check_boundaries, check_tensors, is_finite


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
    *,
    bootstrap: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    turn_id: torch.Tensor | None = None,
    token_gamma: float = 1.0,
    token_lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantages, returns and statistics of rows of tokens.

    rewards, values: float32 `[B, T]`, or packed `[N]` with cu_seqlens int32 `[R + 1]` (row r is cu_seqlens[r] to
      cu_seqlens[r + 1], the first 0, the last N). values[t] is the value before token t. float64 runs on the reference.
    mask: bool, the shape of rewards. What rewards and values hold where it is False is never read, but that the
      reference, the specification, raises on a reward other than 0 there: it would be lost.
    bootstrap: float32 `[rows]`, the value after the last token of a truncated row and 0 for a finished one.
      NaN or infinity in any of these stays in its row, at its token and before it; the statistics then are not finite.
    turn_id: int32, the shape of rewards, neighbours of one id being one turn; the ids may be any but the two lowest of
      int32, which the GPU kernels keep. None: token level, where gamma and lam act on every step between tokens.
      With it gamma and lam act once a turn: a turn's reward is the sum of its tokens' rewards, its value that at its
      last token, and what follows it is credited there; token_gamma and token_lam act between the tokens of a turn.

    Returns advantages and returns = advantages + values, both 0 where mask is False, and float64 `[3]` = count, mean
    and sum of squared deviations of the advantages over the mask (`merge_stats` joins ranks, `normalizer` gives mean
    and rstd). No gradient flows. ValueError for shapes, dtypes or layouts other than these; inputs must be contiguous.
    """
    if torch.compiler.is_compiling():  # one node of the graph, which takes the way below when it runs
        arrays = [None if x is None else x.detach() for x in (rewards, values, mask, bootstrap, cu_seqlens, turn_id)]
        return _gae_in_graph(*arrays, gamma, lam, token_gamma, token_lam)
    _check(rewards, values, mask, bootstrap, cu_seqlens, turn_id)
    for name, value in (("gamma", gamma), ("lam", lam), ("token_gamma", token_gamma), ("token_lam", token_lam)):
        if not is_finite(value) or not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a number from 0 to 1, got {value}")
    run = dispatch.choose("gae", rewards.device)
    if rewards.dtype == torch.float64:
        if dispatch.requested() not in ("auto", "reference"):
            raise ValueError(f"rewards: expected float32 on backend '{dispatch.requested()}', got float64")
        from manus_fast.ops.reference import gae as run
    with torch.no_grad():
        return run(
            rewards, values, mask, gamma, lam,
            bootstrap=bootstrap, cu_seqlens=cu_seqlens, turn_id=turn_id, token_gamma=token_gamma, token_lam=token_lam,
        )  # fmt: skip


@torch.library.custom_op("manus_fast::gae", mutates_args=())
def _gae_in_graph(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    bootstrap: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    turn_id: torch.Tensor | None,
    gamma: float,
    lam: float,
    token_gamma: float,
    token_lam: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gae(
        rewards, values, mask, gamma, lam,
        bootstrap=bootstrap, cu_seqlens=cu_seqlens, turn_id=turn_id, token_gamma=token_gamma, token_lam=token_lam,
    )  # fmt: skip


@_gae_in_graph.register_fake
def _(rewards, *_):
    return torch.empty_like(rewards), torch.empty_like(rewards), rewards.new_empty(3, dtype=torch.float64)


def merge_stats(stats: torch.Tensor) -> torch.Tensor:
    """Joins statistics float64 `[..., 3]` (count, mean, squared deviations) of parts into those of the whole, `[3]`.

    The parts may come from ranks or micro-batches, in any number; empty ones do not matter. Chan et al. 1983.
    """
    if stats.dtype != torch.float64 or stats.shape[-1:] != (3,):
        raise ValueError(f"stats: expected float64 [..., 3], got {stats.dtype} {list(stats.shape)}")
    count, mean, m2 = stats.reshape(-1, 3).unbind(1)
    total = count.sum()
    centre = (count * mean).sum() / total.clamp(min=1)
    return torch.stack([total, centre, m2.sum() + (count * (mean - centre) ** 2).sum()])


def normalizer(stats: torch.Tensor, eps: float = 1e-8) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / sqrt(variance + eps) from statistics float64 `[3]`, each a float64 scalar tensor on their device.

    The variance has Bessel's correction. With a count of 0 or 1 it is 0, so (A - mean) * rstd is 0 and finite.
    """
    count, mean, m2 = stats.unbind(0)
    return mean, torch.rsqrt(m2 / (count - 1).clamp(min=1) + eps)


def _check(rewards, values, mask, bootstrap, cu_seqlens, turn_id):
    check_tensors(rewards=rewards, values=values, mask=mask)
    optional = {"bootstrap": bootstrap, "turn_id": turn_id}
    check_tensors(**{name: tensor for name, tensor in optional.items() if tensor is not None})
    if rewards.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rewards: expected float32, got {rewards.dtype}")
    want = (2, "[B, T]") if cu_seqlens is None else (1, "[N] with cu_seqlens")
    if rewards.dim() != want[0]:
        raise ValueError(f"rewards: expected shape {want[1]}, got {list(rewards.shape)}")
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, rewards.numel(), rewards.device)
    rows = rewards.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    expected = [
        ("rewards", rewards, rewards.dtype, rewards.shape),
        ("values", values, rewards.dtype, rewards.shape),
        ("mask", mask, torch.bool, rewards.shape),
        ("turn_id", turn_id, torch.int32, rewards.shape),
        ("bootstrap", bootstrap, rewards.dtype, (rows,)),
    ]
    for name, tensor, dtype, shape in expected:
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
            raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
        if tensor.device != rewards.device:
            raise ValueError(f"{name}: expected a tensor on {rewards.device}, got one on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
