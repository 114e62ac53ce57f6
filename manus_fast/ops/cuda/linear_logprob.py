"""`linear_logprob` on Hopper: the product and what is done to its tiles in one kernel (csrc/ops/linear_logprob.cu).

Forward: softmax statistics of each 128 × 256 tile of logits are taken from the float32 accumulators, and a small kernel
merges them; logits reach memory only where they are to be kept. Backward: for wide slices of the vocabulary the same
product ends in the gradient with respect to the logits, rounded once to bf16; two cuBLAS products follow, as in
triton/linear_logprob.py, whose plan of slices and budget this shares.

It takes bf16 without bias and soft cap, H a multiple of 8. Everything else goes to the Triton implementation, or is
refused when this backend was asked for by name.
"""

import functools

import torch
from torch.autograd.function import once_differentiable

from manus_fast.ops import dispatch
from manus_fast.ops.triton import linear_logprob as tiled
from manus_fast.ops.triton.logprob import LOG2E

TILE_VOCABULARY = 256
# With all logits kept and H at least this, their gradient is made in parts of OVERLAP_WORDS beside the products. At
# H = 1536 the products of a part are too short to hide anything.
OVERLAP_WIDTH = 2048
OVERLAP_WORDS = 16896


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def unsupported(hidden, weight, bias, softcap) -> str | None:
    """Why the fused kernel cannot take these arguments, as a phrase; None when it can."""
    if _capability(hidden.device.index) != (9, 0):
        return f"its kernel is for compute capability 9.0 and the device has {_capability(hidden.device.index)}"
    if hidden.dtype != torch.bfloat16:
        return f"its kernel takes bfloat16 and the tensors are {hidden.dtype}"
    if bias is not None or softcap is not None:
        return "its kernel has neither bias nor softcap"
    if hidden.shape[1] % 8 or hidden.stride(0) % 8 or weight.stride(0) % 8:
        return f"its kernel needs rows of a multiple of 8 elements and H is {hidden.shape[1]}"
    if hidden.data_ptr() % 16 or weight.data_ptr() % 16:
        return "its kernel needs addresses that are multiples of 16"
    return None


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _slices(rows: int, vocabulary: int, keep_all: bool) -> list[tuple[int, int]]:
    """Slices of the vocabulary: one when all logits are kept, else as for cuBLAS, at multiples of the kernel's tile."""
    if keep_all:
        return [(0, vocabulary)]
    step = tiled.slice_width(rows, 2)
    step = max(TILE_VOCABULARY, step // TILE_VOCABULARY * TILE_VOCABULARY)
    return [(first, min(first + step, vocabulary)) for first in range(0, vocabulary, step)]


def _logit_buffer(rows: int, columns: int, device) -> torch.Tensor:
    """bf16 `[rows, columns]` whose rows start at multiples of 8 elements."""
    return torch.empty(rows, (columns + 7) // 8 * 8, dtype=torch.bfloat16, device=device)[:, :columns]


def _overlapped(tile, products, turn_into_gradient) -> None:
    """All logits `[N, V]` were kept: their gradient is made a part ahead, on the second stream, of the products."""
    main = torch.cuda.current_stream(tile.device)
    vocabulary = tile.shape[1]
    parts = [(i, min(i + OVERLAP_WORDS, vocabulary)) for i in range(0, vocabulary, OVERLAP_WORDS)]
    turn_into_gradient(tile[:, : parts[0][1]], 0)
    for (first, last), following in zip(parts, [*parts[1:], None], strict=True):
        if following is not None:
            products.side.wait_stream(main)
            with torch.cuda.stream(products.side):
                turn_into_gradient(tile[:, following[0] : following[1]], following[0])
        products.add_to_weight(tile[:, first:last], first, last)
        main.wait_stream(products.side)
    products.add_to_hidden(tile, 0, vocabulary)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, budget):
        core = dispatch.extension()
        n, width = hidden.shape
        vocabulary, device = weight.shape[0], hidden.device
        stream = torch.cuda.current_stream(device).cuda_stream
        target = target.contiguous()
        per_row = isinstance(temperature, torch.Tensor)
        scales = temperature.detach().float().contiguous() if per_row else None
        inverse = 1.0 if per_row else 1.0 / float(temperature)
        log_prob, entropy, log_total = torch.empty(3, n, dtype=torch.float32, device=device)
        target_logit = torch.full((n,), torch.nan, dtype=torch.float32, device=device)
        tiles = -(-vocabulary // TILE_VOCABULARY)
        partials = torch.empty(tiles, 3, n, dtype=torch.float32, device=device)
        slices = _slices(n, vocabulary, n * vocabulary * 2 <= budget)
        kept = {}
        for index, (first, last) in enumerate(slices):
            if (index + 1) * n * (slices[0][1] - slices[0][0]) * 2 > budget:
                break
            kept[index] = _logit_buffer(n, last - first, device)
        common = {
            "hidden": _pointer(hidden),
            "hidden_stride": hidden.stride(0),
            "weight_stride": weight.stride(0),
            "target": _pointer(target),
            "temperature": _pointer(scales),
            "inverse_temperature": inverse,
            "tokens": n,
            "width": width,
            "stream": stream,
        }
        # What is not kept is one call: longer sweeps of the vocabulary leave fewer multiprocessors idle at their ends.
        calls = [(*slices[i], buffer) for i, buffer in kept.items()]
        if len(kept) < len(slices):
            calls.append((slices[len(kept)][0], vocabulary, None))
        for first, last, buffer in calls:
            core.logit_statistics(
                **common,
                weight=_pointer(weight[first:last]),
                vocabulary=last - first,
                first=first,
                partials=_pointer(partials),
                target_logit=_pointer(target_logit),
                out=_pointer(buffer),
                out_stride=0 if buffer is None else buffer.stride(0),
            )
        core.merge_statistics(
            target=_pointer(target),
            temperature=_pointer(scales),
            inverse_temperature=inverse,
            tokens=n,
            vocabulary=vocabulary,
            partials=_pointer(partials),
            target_logit=_pointer(target_logit),
            log_prob=_pointer(log_prob),
            entropy=_pointer(entropy),
            log_total=_pointer(log_total),
            stream=stream,
        )
        ctx.save_for_backward(hidden, weight, target, entropy, target_logit, log_total, scales)
        ctx.inverse, ctx.slices, ctx.kept = inverse, slices, kept
        ctx.set_materialize_grads(False)
        return log_prob, entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        core = dispatch.extension()
        hidden, weight, target, entropy, target_logit, log_total, scales = ctx.saved_tensors
        n, width = hidden.shape
        stream = torch.cuda.current_stream(hidden.device).cuda_stream
        grad_log_prob = torch.zeros_like(log_total) if grad_log_prob is None else grad_log_prob.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        products = tiled.GradientProducts(hidden, weight, target, *ctx.needs_input_grad[:2])
        kept, ctx.kept = ctx.kept, {}  # used up by this pass
        # The Triton kernel counts from the target's logit.
        relative = log_total - target_logit * (LOG2E.value * ctx.inverse if scales is None else LOG2E.value / scales)

        def turn_into_gradient(tile, first):
            tiled.gradient_in_place(
                tile, first, None, target, log_total if scales is None else scales, 1.0 / ctx.inverse,
                scales is not None, None, grad_log_prob, grad_entropy, entropy, target_logit, relative,
            )  # fmt: skip

        tile, buffers = None, {}
        for index, (first, last) in enumerate(ctx.slices):
            slot = index % tiled.BUFFERS
            tile = kept.pop(index, None)
            if tile is not None and len(ctx.slices) == 1 and products.side is not None and width >= OVERLAP_WIDTH:
                _overlapped(tile, products, turn_into_gradient)
                continue
            if tile is not None:
                turn_into_gradient(tile, first)
                products.add(tile, first, last, slot)
                products.wait(slot)  # before the tile is freed
            else:
                products.wait(slot)
                if slot not in buffers:
                    buffers[slot] = _logit_buffer(n, last - first, hidden.device)
                tile = buffers[slot][:, : last - first]
                core.logit_gradient(
                    hidden=_pointer(hidden),
                    hidden_stride=hidden.stride(0),
                    weight=_pointer(weight[first:last]),
                    weight_stride=weight.stride(0),
                    target=_pointer(target),
                    temperature=_pointer(scales),
                    inverse_temperature=ctx.inverse,
                    tokens=n,
                    width=width,
                    vocabulary=last - first,
                    first=first,
                    log_total=_pointer(log_total),
                    grad_log_prob=_pointer(grad_log_prob),
                    grad_entropy=_pointer(grad_entropy),
                    entropy=_pointer(entropy),
                    out=_pointer(tile),
                    out_stride=tile.stride(0),
                    stream=stream,
                )
                products.add(tile, first, last, slot)
        for slot in buffers:
            products.wait(slot)
        del tile, buffers  # before the result is converted: the peak is here
        return (*products.results(), None, None, None)


def linear_logprob(
    hidden, weight, target, *, temperature=1.0, bias=None, entropy=True, softcap=None, mode="auto", keep_bytes=None
):
    """`manus_fast.ops.linear_logprob` on Hopper; arguments already checked."""
    reason = unsupported(hidden, weight, bias, softcap)
    if reason is not None:
        if dispatch.requested() == "cuda":
            raise RuntimeError(f"linear_logprob: backend 'cuda' was asked for, but {reason}")
        return tiled.linear_logprob(
            hidden, weight, target,
            temperature=temperature, bias=bias, entropy=entropy, softcap=softcap, mode=mode, keep_bytes=keep_bytes,
        )  # fmt: skip
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    budget = tiled.keep_budget(mode, keep_bytes, hidden.device) if needs_gradient else 0
    log_prob, row_entropy = _LinearLogprob.apply(hidden, weight, target, temperature, budget)
    return log_prob, row_entropy if entropy else None
