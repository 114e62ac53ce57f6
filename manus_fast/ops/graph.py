"""Ops with a gradient as one node of a graph that torch.compile makes.

A node takes the op's eager way when it runs: every backend, budget and kept buffer is then the same inside and outside
of a compiled function, and so are the gradients, bit for bit. What the way leaves for the backward is not tensors of
shapes known beforehand, as the graph would have them (`linear_logprob` keeps what fits). So the forward of a node hands
out a ticket, a few bytes on the CPU that own the recorded work: the graph saves the ticket, the backward node reads it,
and when the graph lets go of it the work is freed. Inductor puts no CUDA graph around a node with a CPU tensor, which
is right here: its replay would not run the op's Python.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch

TICKET_BYTES = 8
_numbers = itertools.count(1)
_recorded: weakref.WeakValueDictionary[int, "_Recorded"] = weakref.WeakValueDictionary()


class _Recorded(bytearray):
    """Outputs with their autograd graph, and its leaves; alive as long as the tensor that shares these bytes."""

    outputs: list[torch.Tensor | None]
    leaves: list[torch.Tensor]


def _autograd():
    """Autograd within a node: the dispatcher has switched it off there, for the node's own gradient is registered."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def record(
    run: Callable[..., Sequence[torch.Tensor | None]], inputs: Sequence[torch.Tensor | None], trained: Sequence[bool]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Runs run(*inputs) in the forward of a node; `trained` says which inputs a gradient will be asked of.

    Returns the outputs without their graph (an absent one as an empty tensor of their type) and the ticket for
    `gradients`.
    """
    held = _Recorded(next(_numbers).to_bytes(TICKET_BYTES, "little"))
    with _autograd(), torch.set_grad_enabled(any(trained)):
        given = [None if x is None else x.detach() for x in inputs]
        held.leaves = [x.requires_grad_() for x, wanted in zip(given, trained, strict=True) if wanted]
        held.outputs = list(run(*given))
    present = next(x for x in held.outputs if x is not None)
    outputs = [present.new_empty(0) if x is None else x.detach() for x in held.outputs]
    if held.leaves:
        _recorded[int.from_bytes(held, "little")] = held
    else:
        held.outputs = []
    return outputs, torch.frombuffer(held, dtype=torch.uint8)


def empty_ticket() -> torch.Tensor:
    """What stands for a ticket while a graph is traced."""
    return torch.empty(TICKET_BYTES, dtype=torch.uint8, device="cpu")


@torch.library.custom_op("manus_fast::gradients", mutates_args=())
def gradients(
    ticket: torch.Tensor, upstream: list[torch.Tensor | None], leaves: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The backward of a node: gradients of its trained inputs, of which `leaves` are the ones saved in the graph."""
    held = _recorded[int.from_bytes(bytes(ticket.tolist()), "little")]
    pairs = [(x, g) for x, g in zip(held.outputs, upstream, strict=True) if g is not None and x.requires_grad]
    with _autograd():
        found = torch.autograd.grad(
            [x for x, _ in pairs], held.leaves, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(held.leaves, found, strict=True)]


@gradients.register_fake
def _(ticket, upstream, leaves):
    return [torch.empty_like(x) for x in leaves]


def register_gradient(node, places: Sequence[int], trained: int, outputs: int) -> None:
    """Gives `node` its gradient. It returns `outputs` tensors and then the ticket.

    places: where its differentiable inputs stand among its arguments. trained: where the list[bool] does that says, in
    the same order, which of them a gradient is asked of.
    """

    def save(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.wanted = [place for place, wanted in zip(places, inputs[trained], strict=True) if wanted]
        ctx.arguments = len(inputs)
        ctx.save_for_backward(output[-1], *[inputs[place] for place in ctx.wanted])

    def backward(ctx, *upstream):
        ticket, *leaves = ctx.saved_tensors
        found = [None] * ctx.arguments
        given = list(upstream[:outputs])
        if any(g is not None for g in given):
            for place, gradient in zip(ctx.wanted, gradients(ticket, given, leaves), strict=True):
                found[place] = gradient
        return tuple(found)

    node.register_autograd(backward, setup_context=save)


def wanted(*inputs: torch.Tensor | None) -> list[bool]:
    """Which of the inputs a gradient will be asked of."""
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]


def number_or_tensor(x: torch.Tensor | float) -> tuple[torch.Tensor | None, float]:
    """A scalar argument as the two that a node takes: the tensor or None, and the number."""
    return (x.detach(), 0.0) if isinstance(x, torch.Tensor) else (None, float(x))
