"""CPU log-prob and entropy from logits: csrc/ops/logprob_cpu.cpp under autograd.

float32, float64 and bf16 logits are read where they lie; fp16 in chunks of rows, converted to float32.
"""

import torch
from torch.autograd.function import once_differentiable

from manus_fast.ops import dispatch
from manus_fast.ops.cpu.gae import pointer

CHUNK_BYTES = 64 << 20
CONVERTED_BYTES = 4 << 20  # of a chunk in float32: it is in the cache when it is read again
SUFFIXES = {torch.float32: "", torch.float64: "_double", torch.bfloat16: "_bfloat16"}  # what the extension reads


def chunk_rows(vocabulary: int, dtype: torch.dtype, nbytes: int | None = None) -> int:
    """How many rows of `vocabulary` numbers fit a chunk of `nbytes` (default: CHUNK_BYTES), at least one."""
    return max(1, (CHUNK_BYTES if nbytes is None else nbytes) // (vocabulary * dtype.itemsize))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Rows:
    """What the forward learns of rows of logits `[R, V]`, and their gradient.

    target int64 `[R]`, negative for a row to ignore; temperature: a number or a tensor `[R]`; dtype: of the logits,
    float32, float64 or bfloat16. log_prob, entropy (None when not asked for), top and log_total are `[R]` of that type,
    float32 for bfloat16.
    """

    def __init__(self, target: torch.Tensor, temperature, entropy: bool, dtype: torch.dtype):
        self.target = target.contiguous()
        self.suffix = SUFFIXES[dtype]
        dtype = compute_dtype(dtype)
        per_row = isinstance(temperature, torch.Tensor)
        self.temperature = temperature.to(dtype).contiguous() if per_row else None
        self.one_temperature = 1.0 if per_row else float(temperature)
        self.log_prob, self.top, self.log_total, *rest = target.new_empty(4 if entropy else 3, len(target), dtype=dtype)
        self.entropy = rest[0] if rest else None

    def read(self, logits: torch.Tensor, rows: slice = slice(None)) -> None:
        """Fills log_prob, entropy, top and log_total of `rows` from their logits."""
        function = getattr(dispatch.extension(), f"logprob_statistics_cpu{self.suffix}")
        function(**self._arguments(logits, rows), log_prob=pointer(self.log_prob[rows]))

    def gradient(self, logits, grad_log_prob, grad_entropy, to, rows: slice = slice(None)) -> torch.Tensor:
        """The gradient of the logits of `rows`, written to `to`, which may be the logits. grad_entropy None: zero."""
        upstream = [None if g is None else g[rows].contiguous() for g in (grad_log_prob, grad_entropy)]
        function = getattr(dispatch.extension(), f"logprob_gradient_cpu{self.suffix}")
        function(
            **self._arguments(logits, rows), grad_log_prob=pointer(upstream[0]), grad_entropy=pointer(upstream[1]),
            gradient=pointer(to), gradient_stride=to.stride(0),
        )  # fmt: skip
        return to

    def _arguments(self, logits, rows) -> dict:
        def part(x):
            return pointer(None if x is None else x[rows])

        return {
            "logits": pointer(logits), "stride": logits.stride(0), "rows": logits.shape[0],
            "vocabulary": logits.shape[1], "target": part(self.target), "temperature": part(self.temperature),
            "one_temperature": self.one_temperature, "top": part(self.top), "log_total": part(self.log_total),
            "entropy": part(self.entropy),
        }  # fmt: skip


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, temperature, entropy, inplace_backward):
        dtype = logits.dtype if logits.dtype in SUFFIXES else compute_dtype(logits.dtype)
        state = Rows(target, temperature, entropy, dtype)
        parts = _parts(logits, dtype)
        for rows in parts:
            state.read(logits[rows].to(dtype), rows)
        ctx.save_for_backward(logits)
        ctx.state, ctx.parts, ctx.dtype, ctx.inplace = state, parts, dtype, inplace_backward
        ctx.set_materialize_grads(False)
        return state.log_prob.clone(), state.entropy.clone() if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        (logits,), state = ctx.saved_tensors, ctx.state
        grad_log_prob = torch.zeros_like(state.top) if grad_log_prob is None else grad_log_prob
        gradient = logits if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        if ctx.inplace:  # the kernel writes past autograd: whoever else needs the logits is told
            torch.autograd.graph.increment_version(logits)
        for rows in ctx.parts:
            wide = logits[rows].to(ctx.dtype)
            own = wide.dtype != logits.dtype  # a chunk of our own, overwritten and rounded back
            written = state.gradient(wide, grad_log_prob, grad_entropy, wide if own else gradient[rows], rows)
            if own:
                gradient[rows] = written
        return gradient, None, None, None, None


def _parts(logits, dtype) -> list[slice]:
    """Rows at a time: all where nothing is converted."""
    step = max(1, len(logits)) if logits.dtype == dtype else chunk_rows(logits.shape[1], dtype, CONVERTED_BYTES)
    return [slice(i, min(i + step, len(logits))) for i in range(0, len(logits), step)]


def logprob(logits, target, *, temperature=1.0, entropy=True, inplace_backward=False):
    """`manus_fast.ops.logprob` on the CPU; arguments already checked."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach()
    return _Logprob.apply(logits, target, temperature, entropy, inplace_backward)
