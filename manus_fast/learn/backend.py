"""How a policy is optimised: in one process here, by ranks that each hold everything in parallel.py, by ranks that
divide it in sharded.py. The update code sees one interface.

backend = SingleProcessBackend(policy, BackendConfig(), OptimizerConfig(), dtype="bfloat16")
for part in parts:
    backend.backward(loss(part))
backend.step(1e-6, backend.gradient_norm())
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from manus_fast.learn.optim import (
    OptimizerConfig,
    adamw,
    clip_gradients,
    grad_norm,
    load_moments,
    moments,
    set_learning_rate,
)
from manus_fast.learn.policy import Policy
from manus_fast.ranks import Ranks

KINDS = ("auto", "single", "ddp", "fsdp")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class BackendConfig:
    kind: str = "auto"
    """single: one process; ddp: every rank holds everything; fsdp: ranks divide optimizer state, gradients and weights
    (ZeRO), and one rank alone is as single; auto: single, with several ranks ddp."""
    zero_stage: int = 2
    """What fsdp divides: 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload: bool = False
    """Keep the divided state in host memory, for fsdp."""

    def __post_init__(self) -> None:
        if self.kind == "deepspeed":
            raise ValueError("backend.kind: expected fsdp, which has DeepSpeed's stages as zero_stage, got 'deepspeed'")
        if self.kind not in KINDS:
            raise ValueError(f"backend.kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.zero_stage not in (1, 2, 3):
            raise ValueError(f"backend.zero_stage: expected 1, 2 or 3, got {self.zero_stage!r}")
        if self.offload and self.kind != "fsdp":
            raise ValueError(f"backend.offload: expected backend.kind 'fsdp' with it, got {self.kind!r}")


class Backend(Protocol):
    """What the update code relies on. Losses given to `backward` are already divided by global denominators, so
    gradients are summed over micro-batches and ranks, never averaged. Every rank is given the whole mini-batch and
    scores its own micro-batches of it; all ranks call the same methods in the same order."""

    policy: Policy
    rank: int
    world_size: int

    def backward(self, loss: torch.Tensor) -> None: ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around every micro-batch but the last: gradients stay local."""
        ...

    def gradient_norm(self) -> torch.Tensor:
        """Global L2 norm of the accumulated gradients, a scalar on the device."""
        ...

    def first_bad_gradient(self) -> str | None:
        """Name of the first parameter whose gradient holds nan or inf."""
        ...

    def step(self, lr: float, norm: torch.Tensor) -> None:
        """Clips, applies the accumulated gradients and clears them."""
        ...

    def discard(self) -> None:
        """Clears the accumulated gradients."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        ...

    def merge(self, parts: torch.Tensor, join: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`join` over [parts, …] of this rank's micro-batches and every other rank's."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state by parameter name, for a checkpoint; complete on rank 0."""
        ...

    def load(self, tensors: dict[str, torch.Tensor]) -> None: ...

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trainable weights in float32, by name."""
        ...

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Replaces every trainable weight, float32 by name, and keeps the optimizer's state."""
        ...


class SingleProcessBackend:
    """AdamW in one process. With dtype "bfloat16" the policy computes in bfloat16, while gradients are summed and
    weights kept and updated in float32.

    Args:
        policy: cast in place to the compute dtype.
        config: only checked; `make_backend` is what chooses by it.
        optimizer: AdamW's settings.
        dtype: "float32" | "bfloat16".

    Raises:
        ValueError: unknown dtype, or nothing to train.
    """

    rank = 0
    world_size = 1

    def __init__(
        self,
        policy: Policy,
        config: BackendConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        dtype: str = "float32",
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        self.policy = policy
        self.optimizer_config = optimizer or OptimizerConfig()
        names = [name for name, p in policy.named_parameters() if p.requires_grad]
        if not names:
            raise ValueError("model: expected at least one trainable parameter, got none")
        # Masters are taken before the cast, which replaces the parameters' storage, so a float32 model loses nothing.
        compute = DTYPES[dtype]
        exact = {name: p.detach().float() for name, p in policy.named_parameters() if p.requires_grad}
        policy.cast(compute)
        self._params = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._masters: dict[str, torch.Tensor] = {}
        for name, parameter in self._params.items():
            if parameter.dtype == torch.float32:
                self._masters[name] = parameter
            else:
                self._masters[name] = exact[name]
                parameter.register_post_accumulate_grad_hook(self._accumulator(self._masters[name]))
        self.optimizer = adamw(self._masters.items(), self.optimizer_config)
        policy.side_by_side = True

    @staticmethod
    def _accumulator(master: torch.Tensor) -> Any:
        def accumulate(parameter: torch.Tensor) -> None:
            # Sums of many bfloat16 gradients lose their small terms, so the running sum is float32.
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return accumulate

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gradient_norm(self) -> torch.Tensor:
        return grad_norm(self._masters.values())

    def first_bad_gradient(self) -> str | None:
        for name, master in self._masters.items():
            if master.grad is not None and not bool(torch.isfinite(master.grad).all()):
                return name
        return None

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor) -> None:
        clip_gradients(self._masters.values(), norm, self.optimizer_config.max_grad_norm)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.discard()
        self._publish()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def merge(self, parts: torch.Tensor, join: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return join(parts)

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trainable weights in float32, by name."""
        yield from self._masters.items()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Accumulated float32 gradients by parameter name."""
        return {name: m.grad for name, m in self._masters.items() if m.grad is not None}

    def tensors(self) -> dict[str, torch.Tensor]:
        """ "master.NAME" for every trainable weight, and AdamW's "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME"."""
        state = {f"master.{name}": master.detach() for name, master in self._masters.items()}
        return {**state, **moments(self.optimizer, self._masters.items())}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restores what `tensors` gave. Raises ValueError for missing weights or shapes that do not fit."""
        self.load_weights({n.removeprefix("master."): t for n, t in tensors.items() if n.startswith("master.")})
        self.optimizer.state.clear()
        rest = {n: t for n, t in tensors.items() if not n.startswith("master.")}
        load_moments(self.optimizer, list(self._masters.items()), rest)

    @torch.no_grad()
    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Replaces every trainable weight, float32 by name, and keeps the optimizer's state."""
        missing = sorted(set(self._masters) - set(weights))
        if missing:
            raise ValueError(f"weights: expected {len(self._masters)} tensors, missing {missing[0]!r}")
        for name, master in self._masters.items():
            if weights[name].shape != master.shape:
                raise ValueError(
                    f"weights of {name}: expected shape {list(master.shape)}, got {list(weights[name].shape)}"
                )
            master.copy_(weights[name])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Rounds the masters into the compute weights."""
        pairs = [(self._params[name], m) for name, m in self._masters.items() if self._params[name] is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])


def playing_model(model: Any, config: BackendConfig, dtype: str, ranks: Ranks) -> Any:
    """The model that an engine is made of and that is saved: the trained one, or where ranks divide that a whole copy
    in the compute dtype."""
    if config.kind != "fsdp" or ranks.size == 1:
        return model
    return copy.deepcopy(model).to(DTYPES[dtype]).requires_grad_(False).eval()


def make_backend(
    policy: Policy,
    config: BackendConfig,
    optimizer: OptimizerConfig | None = None,
    dtype: str = "float32",
    ranks: Ranks | None = None,
) -> Backend:
    """The backend that `config` names, for the ranks of the run.

    Raises:
        ValueError: kind "single" with several ranks, or offload with one.
    """
    ranks = ranks or Ranks()
    if ranks.size == 1:
        if config.offload:
            raise ValueError("backend.offload: expected several ranks with it, got 1")
        return SingleProcessBackend(policy, config, optimizer, dtype)
    if config.kind == "single":
        raise ValueError(f"backend.kind: expected 'ddp' or 'fsdp' for {ranks.size} ranks, got 'single'")
    if config.kind == "fsdp":
        from manus_fast.learn.sharded import ShardedBackend

        return ShardedBackend(policy, config, optimizer, dtype, ranks)
    from manus_fast.learn.parallel import DataParallelBackend

    return DataParallelBackend(policy, config, optimizer, dtype, ranks)
