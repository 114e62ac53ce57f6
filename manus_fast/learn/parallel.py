"""Data-parallel training: every rank holds the policy and the optimizer, and gradients are summed over ranks.

Each rank has the whole mini-batch and works through its own micro-batches of it; losses are divided by counts over
the whole, so the sum is the gradient that one process would get.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from manus_fast.learn.backend import BackendConfig, SingleProcessBackend
from manus_fast.learn.optim import OptimizerConfig
from manus_fast.learn.policy import Policy
from manus_fast.ranks import Ranks

# Small gradients travel together: a message costs some 20 µs whatever its size.
BUCKET_BYTES = 32 << 20


class RankSums:
    """What a backend of several ranks does with numbers; `rank` and `world_size` are set by who inherits it."""

    rank: int
    world_size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    def merge(self, parts: torch.Tensor, join: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        everybodys = [torch.empty_like(parts) for _ in range(self.world_size)]
        dist.all_gather(everybodys, parts.contiguous())
        return join(torch.cat(everybodys))


class DataParallelBackend(RankSums, SingleProcessBackend):
    """`SingleProcessBackend` on every rank, with gradients summed during the last micro-batch's backward pass.

    Args:
        ranks: of the run; all of them make this backend with the same policy. Rank 0's weights are sent to the others.
        Others: as for SingleProcessBackend.
    """

    def __init__(
        self,
        policy: Policy,
        config: BackendConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        dtype: str = "float32",
        ranks: Ranks | None = None,
    ):
        super().__init__(policy, config, optimizer, dtype)
        policy.side_by_side = False  # buckets are sent as gradients arrive, in one order on all ranks
        ranks = ranks or Ranks()
        self.rank, self.world_size = ranks.rank, ranks.size
        with torch.no_grad():
            for master in self._masters.values():
                dist.broadcast(master, 0)
        self._publish()
        self._buckets = _buckets({name: m.numel() * 4 for name, m in reversed(self._masters.items())})
        self._bucket_of = {name: number for number, names in enumerate(self._buckets) for name in names}
        self._local = False
        self._missing: list[int] = []
        self._sent: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        for name, parameter in self._params.items():
            # After the hook that adds to the master's gradient: hooks run in the order of their registration.
            parameter.register_post_accumulate_grad_hook(self._arrived(name))

    def _arrived(self, name: str) -> Callable[[torch.Tensor], None]:
        number = self._bucket_of[name]

        def arrived(_: torch.Tensor) -> None:
            if self._local:
                return
            self._missing[number] -= 1
            # In one order on all ranks, whatever the order in which autograd comes by.
            while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
                self._send()

        return arrived

    def _send(self) -> None:
        """Starts the sum of the next bucket."""
        masters = [self._masters[name] for name in self._buckets[len(self._sent)]]
        for master in masters:
            if master.grad is None:  # nothing of this rank's reached it
                master.grad = torch.zeros_like(master)
        gradients = [master.grad for master in masters]
        flat = gradients[0] if len(gradients) == 1 else torch.cat([g.flatten() for g in gradients])
        self._sent.append((dist.all_reduce(flat, async_op=True), flat, gradients))

    def backward(self, loss: torch.Tensor) -> None:
        self._missing = [len(names) for names in self._buckets]
        self._sent = []
        loss.backward()
        if self._local:
            return
        while len(self._sent) < len(self._buckets):
            self._send()
        for work, flat, gradients in self._sent:
            work.wait()
            if len(gradients) > 1:
                parts = flat.split([g.numel() for g in gradients])
                torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
        self._sent = []

    @contextlib.contextmanager
    def _keep_local(self) -> Iterator[None]:
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._keep_local()


def _buckets(sizes: dict[str, int]) -> list[list[str]]:
    """Names in order, in groups of at most BUCKET_BYTES; what is larger goes alone."""
    groups: list[list[str]] = []
    filled = BUCKET_BYTES
    for name, size in sizes.items():
        if filled + size > BUCKET_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups
