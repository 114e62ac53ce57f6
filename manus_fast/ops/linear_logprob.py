"""`linear_logprob`: log-probability and entropy straight from hidden states and the output matrix.

Nothing of size tokens × vocabulary is held, except, when memory allows and `mode` says so, bf16 logits for the
backward.
"""

import torch

from manus_fast.ops import dispatch, graph
from manus_fast.ops.checks import is_finite
from manus_fast.ops.logprob import check_floats, check_rows, outputs_like

MODES = ("auto", "recompute", "keep")


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    bias: torch.Tensor | None = None,
    entropy: bool = True,
    softcap: float | None = None,
    mode: str = "auto",
    keep_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of `target` and entropy under softmax(cap(hidden weightᵀ + bias) / temperature).

    hidden `[N, H]`, weight `[V, H]` of the same dtype (fp16, bf16, fp32; fp64 on the CPU), bias `[V]` or None, target
    int64 `[N]` in [0, V) or negative for a row to ignore. temperature > 0: a number or a tensor `[N]` (no gradient
    flows to it). `softcap` c applies c·tanh(z / c) to the logits (Gemma 2). Returns log_prob `[N]` and entropy `[N]`
    in float32 (float64 for fp64 input), in nats; entropy is None when not asked for. Ignored rows give exact zeros and
    zero gradients.

    Gradients go to hidden, weight and bias, each computed only where it is needed (a frozen weight costs nothing) and
    summed in float32. `mode`: "recompute" forms the logits again in the backward; "keep" holds them from the forward;
    "auto" keeps what fits `keep_bytes` (default: a quarter of the free device memory, 256 MiB on the CPU) and
    recomputes the rest. An explicit `keep_bytes` bounds "keep" as well.

    Raises ValueError for a wrong shape, dtype, device, stride, temperature, softcap or mode, or a target >= V (on CUDA,
    where the check would wait for the device, such a row is NaN instead).
    """
    if torch.compiler.is_compiling():  # one node of the graph, which takes the way below when it runs
        rows_temperature, number = graph.number_or_tensor(temperature)
        trained = graph.wanted(hidden, weight, bias)
        log_prob, row_entropy, _ = _in_graph(
            hidden, weight, bias, target, rows_temperature, number, entropy, softcap, mode, keep_bytes, trained
        )
        return log_prob, row_entropy if entropy else None
    check_floats("hidden", hidden, 2)
    check_floats("weight", weight, 2)
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    if weight.shape[1] != width:
        raise ValueError(f"weight: expected shape [V, {width}] to match hidden, got {list(weight.shape)}")
    if vocabulary == 0:
        raise ValueError(f"weight: expected at least one row, got shape {list(weight.shape)}")
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight: expected the dtype of hidden, {hidden.dtype}, got {weight.dtype}")
    if weight.device != hidden.device:
        raise ValueError(f"weight: expected a tensor on {hidden.device}, got one on {weight.device}")
    if bias is not None:
        check_floats("bias", bias, 1)
        if bias.shape != (vocabulary,):
            raise ValueError(f"bias: expected shape [{vocabulary}], got {list(bias.shape)}")
        if bias.device != hidden.device:
            raise ValueError(f"bias: expected a tensor on {hidden.device}, got one on {bias.device}")
    check_rows(target, temperature, rows, vocabulary, hidden.device)
    if softcap is not None and (not is_finite(softcap) or softcap <= 0):
        raise ValueError(f"softcap: expected None or a finite number above 0, got {softcap}")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got '{mode}'")
    if keep_bytes is not None and (not isinstance(keep_bytes, int) or keep_bytes < 0):
        raise ValueError(f"keep_bytes: expected None or a count of bytes >= 0, got {keep_bytes}")
    implementation = dispatch.choose("linear_logprob", hidden.device, hidden.dtype)
    return implementation(
        hidden,
        weight,
        target,
        temperature=temperature,
        bias=bias,
        entropy=entropy,
        softcap=softcap,
        mode=mode,
        keep_bytes=keep_bytes,
    )


@torch.library.custom_op("manus_fast::linear_logprob", mutates_args=())
def _in_graph(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    rows_temperature: torch.Tensor | None,
    temperature: float,
    entropy: bool,
    softcap: float | None,
    mode: str,
    keep_bytes: int | None,
    trained: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = {"temperature": temperature if rows_temperature is None else rows_temperature, "entropy": entropy}
    options.update(softcap=softcap, mode=mode, keep_bytes=keep_bytes)

    def run(hidden, weight, bias):
        return linear_logprob(hidden, weight, target, bias=bias, **options)

    (log_prob, row_entropy), ticket = graph.record(run, [hidden, weight, bias], trained)
    return log_prob, row_entropy, ticket


@_in_graph.register_fake
def _(hidden, weight, bias, target, rows_temperature, temperature, entropy, *_):
    return *outputs_like(hidden, entropy), graph.empty_ticket()


graph.register_gradient(_in_graph, places=[0, 1, 2], trained=10, outputs=2)
