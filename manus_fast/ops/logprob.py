"""`logprob`: log-probability of a target and entropy from logits, forward in one pass and backward in one pass."""

import torch

from manus_fast.ops import dispatch, graph
from manus_fast.ops.checks import check_tensors, is_finite

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def logprob(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    entropy: bool = True,
    inplace_backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of `target` and entropy under softmax(logits / temperature).

    logits `[N, V]` (fp16, bf16, fp32 or fp64; unit stride along V, rows at any stride), target int64 `[N]` in [0, V),
    or negative for a row to ignore. temperature > 0: a number, or a tensor `[N]` (no gradient flows to it). Returns
    log_prob `[N]` and entropy `[N]` in float32 (float64 for fp64 logits), in nats; entropy is None when not asked for.
    An ignored row gives exact zeros and a zero gradient, whatever it holds; a logit of -inf has probability 0.

    `inplace_backward=True` lets backward write the gradient over `logits`, which are lost then: autograd raises if
    anything else in the graph still needs them. Rows that overlap, as expanded ones do, are refused then. A function
    under torch.compile gives the gradient memory of its own.

    Raises ValueError for a wrong shape, dtype, device, stride, temperature, or target >= V (on CUDA, where the check
    would wait for the device, such a row is NaN instead).
    """
    if torch.compiler.is_compiling():  # one node of the graph, which takes the way below when it runs
        rows_temperature, number = graph.number_or_tensor(temperature)
        trained = graph.wanted(logits)
        log_prob, row_entropy, _ = _in_graph(logits, target, rows_temperature, number, entropy, trained)
        return log_prob, row_entropy if entropy else None
    check_floats("logits", logits, 2)
    check_rows(target, temperature, logits.shape[0], logits.shape[1], logits.device)
    if inplace_backward and logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(
            "logits: expected rows that do not overlap for inplace_backward,"
            f" got shape {list(logits.shape)} and strides {logits.stride()}"
        )
    implementation = dispatch.choose("logprob", logits.device, logits.dtype)
    return implementation(logits, target, temperature=temperature, entropy=entropy, inplace_backward=inplace_backward)


@torch.library.custom_op("manus_fast::logprob", mutates_args=())
def _in_graph(
    logits: torch.Tensor,
    target: torch.Tensor,
    rows_temperature: torch.Tensor | None,
    temperature: float,
    entropy: bool,
    trained: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    temperature = temperature if rows_temperature is None else rows_temperature

    def run(logits):
        return logprob(logits, target, temperature=temperature, entropy=entropy)

    (log_prob, row_entropy), ticket = graph.record(run, [logits], trained)
    return log_prob, row_entropy, ticket


@_in_graph.register_fake
def _(logits, target, rows_temperature, temperature, entropy, trained):
    return *outputs_like(logits, entropy), graph.empty_ticket()


graph.register_gradient(_in_graph, places=[0], trained=5, outputs=2)


def outputs_like(x: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised log-prob and entropy for the rows of x; an entropy not asked for is empty."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[0], dtype=dtype), x.new_empty(x.shape[0] if entropy else 0, dtype=dtype)


def check_floats(name: str, tensor: torch.Tensor, dimensions: int) -> None:
    """ValueError unless `tensor` is a floating tensor of that many dimensions with unit stride along the last."""
    check_tensors(**{name: tensor})
    if tensor.dim() != dimensions:
        raise ValueError(f"{name}: expected {dimensions} dimensions, got shape {list(tensor.shape)}")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.shape[-1] == 0:
        raise ValueError(f"{name}: expected a last dimension of at least 1, got shape {list(tensor.shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected unit stride along the last dimension, got strides {tensor.stride()}")


def check_rows(target: torch.Tensor, temperature, rows: int, vocabulary: int, device: torch.device) -> None:
    """ValueError unless `target` and `temperature` fit `rows` rows over `vocabulary` columns on `device`."""
    check_tensors(target=target)
    if target.shape != (rows,):
        raise ValueError(f"target: expected shape [{rows}], got {list(target.shape)}")
    if target.dtype != torch.int64:
        raise ValueError(f"target: expected int64, got {target.dtype}")
    if target.device != device:
        raise ValueError(f"target: expected a tensor on {device}, got one on {target.device}")
    if device.type == "cpu" and rows and int(target.max()) >= vocabulary:
        raise ValueError(f"target: expected ids below {vocabulary}, got {int(target.max())}")
    if isinstance(temperature, torch.Tensor):
        if temperature.shape != (rows,) or not temperature.dtype.is_floating_point:
            raise ValueError(
                f"temperature: expected a number or a floating tensor [{rows}],"
                f" got {temperature.dtype} {list(temperature.shape)}"
            )
        if temperature.device != device:
            raise ValueError(f"temperature: expected a tensor on {device}, got one on {temperature.device}")
        if device.type == "cpu" and rows:
            low, high = (x.item() for x in temperature.detach().aminmax())
            if not 0 < low <= high < float("inf"):
                got = high if low > 0 else low
                raise ValueError(f"temperature: expected finite values above 0, got {got}")
    elif not is_finite(temperature) or temperature <= 0:
        raise ValueError(f"temperature: expected a finite number above 0, got {temperature}")
