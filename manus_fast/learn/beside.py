"""Two networks at the same time on the cores of one machine: each gets half of torch's threads.

    trunk, values = both(lambda: policy_forward(), lambda: critic_forward())

Matrices of small models are too small to be worth several threads each: two networks side by side keep two cores busy
where each in turn on both does not. The second network runs in a thread of its own, forward and backward; both backward
passes run when the joint loss is differentiated. Nothing else is computed, so results differ as they do for another
number of threads: by the order in which a product's terms are added.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd import Variable

from manus_fast.ops import dispatch

First = TypeVar("First")

_thread: ThreadPoolExecutor | None = None


def possible(device: torch.device) -> bool:
    """Whether there are threads to share."""
    return device.type == "cpu" and torch.get_num_threads() > 1 and not torch.is_autocast_enabled("cpu")


def both(
    first: Callable[[], First], second: Callable[[], Sequence[torch.Tensor]]
) -> tuple[First, tuple[torch.Tensor, ...]]:
    """(first(), second()), computed at the same time. The two must share no parameter that is trained.

    Tensors that `second` returns are differentiable where gradients are enabled; what it closes over gets a gradient
    only if it is a leaf. Errors of either are raised here, or by backward.
    """
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()

    def run() -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return tuple(second())

    future = _submit(run, threads)
    try:
        with _part(threads - threads // 2, threads):
            results = first()
    finally:
        wait((future,))
    outputs = future.result()
    if grad and any(x.requires_grad for x in outputs):
        # Made after everything of `first`, so that backward comes to it before, and starts the other thread early.
        outputs = _Joint.apply(torch.zeros((), requires_grad=True), outputs, threads)
    return results, outputs


class _Joint(torch.autograd.Function):
    """Tensors with a graph of their own, whose backward pass runs in the other thread."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, outputs: Sequence[torch.Tensor], threads: int):
        # anchor is there for its requires_grad alone: the outputs are not seen by autograd here.
        ctx.outputs, ctx.threads = outputs, threads
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None):
        pairs = [(x, g) for x, g in zip(ctx.outputs, gradients, strict=True) if g is not None and x.requires_grad]
        if pairs:
            future = _submit(lambda: torch.autograd.backward(*zip(*pairs, strict=True)), ctx.threads)
            part = ExitStack()
            part.callback(future.result)
            part.enter_context(_part(ctx.threads - ctx.threads // 2, ctx.threads))
            Variable._execution_engine.queue_callback(part.close)  # when this pass is through with the first network
        return None, None, None


def _submit(work: Callable[[], Any], threads: int) -> Future:
    global _thread
    if _thread is None:
        _thread = ThreadPoolExecutor(1, "manus_fast_beside")

    def run() -> Any:
        with _part(max(1, threads // 2), 1):
            return work()

    return _thread.submit(run)


def _forget() -> None:
    global _thread
    _thread = None


os.register_at_fork(after_in_child=_forget)  # a child has none of its parent's threads


@contextmanager
def _part(threads: int, after: int) -> Iterator[None]:
    """Gives the calling thread so many of torch's threads, and `after` when the block ends."""
    extension = dispatch.extension()
    torch.set_num_threads(threads)
    if extension is not None:
        extension.run_inline(threads == 1)
    try:
        yield
    finally:
        torch.set_num_threads(after)
        if extension is not None:
            extension.run_inline(False)
