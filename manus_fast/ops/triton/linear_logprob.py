"""Log-prob and entropy from hidden states: cuBLAS products on vocabulary tiles, each reduced by Triton while in the L2.

Forward: tiles of logits small enough for the L2 are multiplied and folded at once into three numbers a token (running
maximum, Σ 2^y, Σ 2^y·y, as in triton/logprob.py). The target's logit is a float32 dot product of its own, and takes the
place of the tile's rounded one, so a log-prob never exceeds 0. Backward: the vocabulary in wide tiles over all tokens;
a tile's logits are made again (or were kept), turned into their gradient in place, and used twice: each tile of the
weight's gradient is one product over all tokens, written once; the gradient of hidden is summed over tiles in float32.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from manus_fast.ops.triton.logprob import (
    LN2,
    LOG2E,
    LOWEST,
    gradient_of_logits,
    lane_merge,
    lane_update,
    temperature_arguments,
)

# Forward tile: tokens × vocabulary, so that the logits stay in the L2 between the product and the reduction.
FORWARD_TOKENS = 4096
FORWARD_VOCABULARY = 8192
# Backward tile over all tokens: one tile of logits, in bytes.
BACKWARD_BYTES = 220 << 20
# Slices in flight in the backward: with 2, the next slice's gradient is made while the last products still run.
BUFFERS = 1
# Whether the two products of a slice run on two streams, each filling the multiprocessors that the other's end leaves.
TWO_STREAMS = True
# Tile of the product that leaves out ignored rows.
BAD_WORDS, BAD_WIDTH = 128, 64
# "auto" keeps logits for the backward in at most this share of the device memory that is free.
KEEP_SHARE = 0.25


@triton.jit
def capped(z, softcap, CAP: tl.constexpr):
    """softcap·tanh(z / softcap), or z."""
    if CAP:
        z = softcap * (1.0 - 2.0 / (tl.exp2(z * (2.0 * LOG2E / softcap)) + 1.0))
    return z


@triton.jit
def _target_logit_kernel(
    hidden, hidden_stride, weight, weight_stride, bias, target, softcap, z_target, top, total, weighted,
    V, H, BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The target's logit in float32, 0 for an ignored row, NaN for a target >= V; and the empty running sums."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target + row)
    known = (t >= 0) & (t < V)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (k < H) & known
        a = tl.load(hidden + row * hidden_stride + k, mask=mask, other=0.0).to(tl.float32)
        dot += a * tl.load(weight + t * weight_stride + k, mask=mask, other=0.0).to(tl.float32)
    z = tl.sum(dot, axis=0)
    if BIAS:
        z += tl.load(bias + t, mask=known, other=0.0).to(tl.float32)
    z = capped(z, softcap, CAP)
    z = tl.where(t >= V, float("nan"), z)
    tl.store(z_target + row, z)
    tl.store(top + row, LOWEST)
    tl.store(total + row, 0.0)
    tl.store(weighted + row, 0.0)


@triton.jit
def _tile_statistics_kernel(
    tile, tile_stride, bias, target, temperature, scale, softcap, z_target, top, total, weighted,
    first, width, PER_ROW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Folds columns [first, first + width) of the logits into the running sums of each row."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target + row)
    if t < 0:
        return
    shift_to = tl.load(z_target + row)
    shift = tl.where(shift_to == float("-inf"), 0.0, shift_to)
    if PER_ROW:
        scale = LOG2E / tl.load(temperature + row).to(tl.float32)
    lane_top = tl.full([L], LOWEST, tl.float32)
    lane_total = tl.zeros([L], tl.float32)
    lane_weighted = tl.zeros([L], tl.float32)
    inner = tl.arange(0, K)[:, None] * L + tl.arange(0, L)[None, :]
    for start in range(0, width, K * L):
        local = start + inner
        inside = local < width
        z = tl.load(tile + row * tile_stride + local, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            z += tl.load(bias + first + local, mask=inside, other=0.0).to(tl.float32)
        z = capped(z, softcap, CAP)
        z = tl.where(first + local == t, shift_to, z)
        y = tl.where(inside, (z - shift) * scale, float("-inf"))
        lane_top, lane_total, lane_weighted = lane_update(y, lane_top, lane_total, lane_weighted)
    tile_top, tile_total, tile_weighted = lane_merge(lane_top, lane_total, lane_weighted)
    old_top = tl.load(top + row)
    new_top = tl.maximum(old_top, tile_top)
    old_decay = tl.exp2(old_top - new_top)
    tile_decay = tl.exp2(tile_top - new_top)
    tl.store(top + row, new_top)
    tl.store(total + row, tl.load(total + row) * old_decay + tile_total * tile_decay)
    tl.store(weighted + row, tl.load(weighted + row) * old_decay + tile_weighted * tile_decay)


@triton.jit
def _finish_kernel(target, temperature, scale, z_target, top, total, weighted, log_prob, entropy, log_total_out,
                   N, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Log-prob, entropy and L = log2 Σ 2^y from the running sums."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < N
    valid = tl.load(target + row, mask=mask, other=-1) >= 0
    row_total = tl.load(total + row, mask=mask, other=1.0)
    log_total = tl.load(top + row, mask=mask, other=0.0) + tl.log2(row_total)
    z = tl.load(z_target + row, mask=mask, other=0.0)
    z = tl.where(z == float("-inf"), z, z - z)  # -inf, else 0; NaN stays
    tl.store(log_prob + row, tl.where(valid, (z - log_total) * LN2, 0.0), mask=mask)
    row_entropy = (log_total - tl.load(weighted + row, mask=mask, other=0.0) / row_total) * LN2
    tl.store(entropy + row, tl.where(valid, row_entropy, 0.0), mask=mask)
    tl.store(log_total_out + row, log_total, mask=mask)


@triton.jit
def _tile_gradient_kernel(
    tile, tile_stride, bias, target, temperature, inverse, softcap, grad_log_prob, grad_entropy, entropy,
    z_target, log_total, out, out_stride, first, width, blocks,
    PER_ROW: tl.constexpr, ENTROPY: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns a tile of products into the gradient with respect to them; `out` may be the tile itself."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    local = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = local < width
    t = tl.load(target + row)
    if t < 0:
        tl.store(out + row * out_stride + local, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)
        return
    z = tl.load(tile + row * tile_stride + local, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + first + local, mask=inside, other=0.0).to(tl.float32)
    z = capped(z, softcap, CAP)
    shift_to = tl.load(z_target + row)
    is_target = first + local == t
    z = tl.where(is_target, shift_to, z)
    g = tl.load(grad_log_prob + row).to(tl.float32)
    h = 0.0
    row_entropy = 0.0
    if ENTROPY:
        h = tl.load(grad_entropy + row).to(tl.float32)
        row_entropy = tl.load(entropy + row)
    if PER_ROW:
        inverse = 1.0 / tl.load(temperature + row).to(tl.float32)
    y = (z - tl.where(shift_to == float("-inf"), 0.0, shift_to)) * (inverse * LOG2E)
    gradient = gradient_of_logits(y, tl.load(log_total + row), is_target, g, h, row_entropy) * inverse
    if CAP:
        gradient *= 1.0 - (z / softcap) * (z / softcap)
    tl.store(out + row * out_stride + local, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _bad_rows_kernel(hidden, hidden_stride, target, found, H, BLOCK: tl.constexpr):
    """found = 1 if an ignored row of hidden holds NaN or inf; rows that count are not read."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(target + row) >= 0:
        return
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, H, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(hidden + row * hidden_stride + k, mask=k < H, other=0.0).to(tl.float32)
        bad |= (x - x != 0.0).to(tl.int32)
    if tl.max(bad, axis=0) > 0:
        tl.store(found, 1)


@triton.jit
def _product_of_valid_rows_kernel(
    found, tile, tile_stride, hidden, hidden_stride, target, out, out_stride, N, C, H, word_blocks,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out `[C, H]` = tileᵀ hidden over the rows with target >= 0; returns at once when `found` is 0.

    A program takes every gridth block of words of one block of columns.
    """
    if tl.load(found) == 0:
        return
    k = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    for block in range(tl.program_id(1), word_blocks, tl.num_programs(1)):
        c = block * WORDS + tl.arange(0, WORDS)
        total = tl.zeros([WORDS, WIDTH], tl.float32)
        for start in range(0, N, TOKENS):
            row = (start + tl.arange(0, TOKENS)).to(tl.int64)
            valid = tl.load(target + row, mask=row < N, other=-1) >= 0
            a = tl.load(
                tile + row[None, :] * tile_stride + c[:, None], mask=valid[None, :] & (c[:, None] < C), other=0.0
            )
            b = tl.load(
                hidden + row[:, None] * hidden_stride + k[None, :], mask=valid[:, None] & (k[None, :] < H), other=0.0
            )
            # bf16 fits into tf32; in its own type Triton's interpreter could not multiply it.
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
        place = out + c.to(tl.int64)[:, None] * out_stride + k[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(c[:, None] < C) & (k[None, :] < H))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b, with a float32 total whatever the dtype of a and b."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def slice_width(rows: int, itemsize: int) -> int:
    """Words in a backward slice of the vocabulary, such that its logits take at most BACKWARD_BYTES.

    A multiple of 2816 = 22·128 where that many fit: with output tiles of 128 × 256 and H = 1536, 6 of them wide, the
    product for a slice of the weight's gradient then fills 132 multiprocessors a whole number of times.
    """
    step = max(1, BACKWARD_BYTES // max(1, rows * itemsize))
    for multiple in (2816, 128):
        if step >= multiple:
            return step // multiple * multiple
    return step


def slices(rows: int, vocabulary: int, itemsize: int) -> list[tuple[int, int]]:
    """Backward slices [first, last) of the vocabulary."""
    step = slice_width(rows, itemsize)
    return [(first, min(first + step, vocabulary)) for first in range(0, vocabulary, step)]


def keep_budget(mode: str, keep_bytes: int | None, device: torch.device) -> int:
    """Bytes of logits that the forward may keep for the backward."""
    if mode == "recompute":
        return 0
    if keep_bytes is not None:
        return keep_bytes
    if mode == "keep":
        return 1 << 62
    if device.type != "cuda":
        return 256 << 20
    free = torch.cuda.mem_get_info(device)[0]
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + reusable) * KEEP_SHARE)


def gradient_in_place(
    tile, first, bias, target, temperature, number, per_row, softcap,
    grad_log_prob, grad_entropy, entropy, z_target, log_total,
):  # fmt: skip
    """Turns a slice of products `[N, C]`, from word `first` on, into the gradient with respect to them, and returns it.

    For fp16 it comes back as bf16 in the same memory: a probability of 1e-6 times an upstream gradient of a mean over
    tokens is below what fp16 can hold.
    """
    n, span = tile.shape
    out = tile.view(torch.bfloat16) if tile.dtype == torch.float16 else tile
    block = min(1024, triton.next_power_of_2(span))
    blocks = triton.cdiv(span, block)
    _tile_gradient_kernel[(n * blocks,)](
        tile, tile.stride(0), tile if bias is None else bias, target, temperature, 1.0 / number,
        1.0 if softcap is None else float(softcap),
        grad_log_prob, entropy if grad_entropy is None else grad_entropy, entropy, z_target, log_total,
        out, out.stride(0), first, span, blocks,
        PER_ROW=per_row, ENTROPY=grad_entropy is not None, BIAS=bias is not None, CAP=softcap is not None,
        BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream that backward passes on `device` use."""
    return torch.cuda.Stream(device)


class GradientProducts:
    """Gradients of hidden and weight, summed from slices of the gradient with respect to the logits.

    Each slice of the weight's gradient is one product over all tokens, written once. That of hidden is summed over
    slices in float32, also when there is one: a bf16 product over 150,000 words may be split into partial sums that
    cuBLAS rounds to bf16 (errors of 0.4 % were seen). For fp16 the products are made in bf16.

    An ignored row's gradient is 0, which times NaN or inf in that row of hidden would still be NaN in the gradient of
    the whole weight. A kernel looks at those rows; where it finds one, another makes the products without them, which
    otherwise returns at once. Neither makes the host wait, and no copy of hidden is held.
    """

    def __init__(self, hidden, weight, target, need_hidden: bool, need_weight: bool):
        self.half = hidden.dtype == torch.float16
        self.hidden, self.weight, self.dtype = hidden.bfloat16() if self.half else hidden, weight, hidden.dtype
        self.need_hidden, self.target = need_hidden, target
        make = torch.empty if hidden.shape[0] else torch.zeros
        self.grad_weight = make(weight.shape, dtype=weight.dtype, device=weight.device) if need_weight else None
        self.grad_hidden = None
        two = TWO_STREAMS and hidden.is_cuda and need_hidden and need_weight
        self.side = side_stream(hidden.device) if two else None
        self.done = {}
        if need_hidden:
            self.grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if need_weight and hidden.shape[0]:
            self.found_bad = torch.zeros(1, dtype=torch.int32, device=hidden.device)
            n, width = hidden.shape
            block = min(1024, triton.next_power_of_2(width))
            _bad_rows_kernel[(n,)](self.hidden, self.hidden.stride(0), target, self.found_bad, width, BLOCK=block)

    def wait(self, slot: int) -> None:
        """Has the current stream wait until the products that read buffer `slot` are done."""
        if slot in self.done:
            torch.cuda.current_stream(self.hidden.device).wait_event(self.done.pop(slot))

    def add(self, tile, first: int, last: int, slot: int = 0) -> None:
        """Takes in the slice `[N, last - first]`, which stands in buffer `slot`."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.hidden.device))
            with torch.cuda.stream(self.side):
                self.add_to_hidden(tile, first, last)
            self.done[slot] = self.side.record_event()
        elif self.need_hidden:
            self.add_to_hidden(tile, first, last)
        if self.grad_weight is not None:
            self.add_to_weight(tile, first, last)

    def add_to_weight(self, tile, first: int, last: int) -> None:
        """Writes the slice's rows of the weight's gradient."""
        if self.half:
            self.grad_weight[first:last] = tile.T @ self.hidden
        else:
            torch.mm(tile.T, self.hidden, out=self.grad_weight[first:last])
        (n, width), span = self.hidden.shape, last - first
        word_blocks, width_blocks = triton.cdiv(span, BAD_WORDS), triton.cdiv(width, BAD_WIDTH)
        _product_of_valid_rows_kernel[(width_blocks, min(word_blocks, 16))](
            self.found_bad, tile, tile.stride(0), self.hidden, self.hidden.stride(0), self.target,
            self.grad_weight[first:last], self.grad_weight.stride(0), n, span, width, word_blocks,
            TOKENS=32, WORDS=BAD_WORDS, WIDTH=BAD_WIDTH,
            PRECISION="ieee" if tile.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip

    def add_to_hidden(self, tile, first: int, last: int) -> None:
        """Adds the slice's part of the gradient of hidden."""
        add_product(self.grad_hidden, tile, self.weight[first:last].to(tile.dtype))

    def results(self):
        """(gradient of hidden, gradient of weight), None where not needed."""
        for slot in list(self.done):
            self.wait(slot)
        return None if self.grad_hidden is None else self.grad_hidden.to(self.dtype), self.grad_weight


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, temperature, softcap, budget):
        n, width = hidden.shape
        vocabulary, device = weight.shape[0], hidden.device
        target = target.contiguous()
        state = torch.empty(7, n, dtype=torch.float32, device=device)
        z_target, top, total, weighted, log_prob, entropy, log_total = state.unbind()
        pointer, number, per_row = temperature_arguments(temperature, log_prob)
        scale = LOG2E.value / number
        flags = {"BIAS": bias is not None, "CAP": softcap is not None}
        bias_pointer, cap = (weight if bias is None else bias), (1.0 if softcap is None else float(softcap))
        parts = slices(n, vocabulary, hidden.element_size()) if n else []
        kept = {}
        if n:
            _target_logit_kernel[(n,)](
                hidden, hidden.stride(0), weight, weight.stride(0), bias_pointer, target, cap,
                z_target, top, total, weighted, vocabulary, width,
                **flags, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=2,
            )  # fmt: skip
            step_n, step_v = min(n, FORWARD_TOKENS), min(vocabulary, FORWARD_VOCABULARY)
            scratch = None
            for index, (first, last) in enumerate(parts):
                size = n * (last - first) * hidden.element_size()
                buffer = None
                if sum(k.nbytes for k in kept.values()) + size <= budget:
                    buffer = torch.empty(n, last - first, dtype=hidden.dtype, device=device)
                    kept[index] = buffer
                elif scratch is None:
                    scratch = torch.empty(step_n * step_v, dtype=hidden.dtype, device=device)
                for c0 in range(first, last, step_v):
                    c1 = min(c0 + step_v, last)
                    for r0 in range(0, n, step_n):
                        r1 = min(r0 + step_n, n)
                        if buffer is None:
                            part = scratch[: (r1 - r0) * (c1 - c0)].view(r1 - r0, c1 - c0)
                        else:
                            part = buffer[r0:r1, c0 - first : c1 - first]
                        torch.mm(hidden[r0:r1], weight[c0:c1].T, out=part)
                        _tile_statistics_kernel[(r1 - r0,)](
                            part, part.stride(0), bias_pointer, target[r0:], pointer[r0:], scale, cap,
                            z_target[r0:], top[r0:], total[r0:], weighted[r0:], c0, c1 - c0,
                            PER_ROW=per_row, **flags, K=2, L=max(32, min(1024, triton.next_power_of_2(c1 - c0) // 2)),
                            num_warps=4,
                        )  # fmt: skip
            _finish_kernel[(triton.cdiv(n, 256),)](
                target, pointer, scale, z_target, top, total, weighted, log_prob, entropy, log_total,
                n, PER_ROW=per_row, BLOCK=256, num_warps=2,
            )  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, target, entropy, z_target, log_total)
        ctx.temperature, ctx.softcap, ctx.slices, ctx.kept = (pointer, number, per_row), softcap, parts, kept
        ctx.set_materialize_grads(False)
        return log_prob, entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, bias, target, entropy, z_target, log_total = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        pointer, number, per_row = ctx.temperature
        n = hidden.shape[0]
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(log_total)
        grad_log_prob = grad_log_prob.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        products = GradientProducts(hidden, weight, target, need_hidden, need_weight)
        grad_bias = torch.zeros_like(bias) if need_bias else None
        tile = scratch = None
        # Used up by this pass, and freed on the way; a second pass through the same graph makes the logits again.
        kept, ctx.kept = ctx.kept, {}
        for index, (first, last) in enumerate(ctx.slices):
            span = last - first
            tile = kept.pop(index, None)
            if tile is None:
                if scratch is None:
                    scratch = torch.empty(n * span, dtype=hidden.dtype, device=hidden.device)
                tile = scratch[: n * span].view(n, span)
                torch.mm(hidden, weight[first:last].T, out=tile)
            tile = gradient_in_place(
                tile, first, bias, target, pointer, number, per_row, ctx.softcap,
                grad_log_prob, grad_entropy, entropy, z_target, log_total,
            )  # fmt: skip
            products.add(tile, first, last)
            products.wait(0)
            if need_bias:
                grad_bias[first:last] = tile.sum(0, dtype=torch.float32)
        del tile, scratch  # before the result is converted: the peak is here
        return (*products.results(), grad_bias, None, None, None, None)


def linear_logprob(
    hidden, weight, target, *, temperature=1.0, bias=None, entropy=True, softcap=None, mode="auto", keep_bytes=None
):
    """`manus_fast.ops.linear_logprob` in Triton and cuBLAS; arguments already checked."""
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    budget = keep_budget(mode, keep_bytes, hidden.device) if needs_gradient else 0
    log_prob, row_entropy = _LinearLogprob.apply(hidden, weight, bias, target, temperature, softcap, budget)
    return log_prob, row_entropy if entropy else None
