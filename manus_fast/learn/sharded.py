"""ZeRO training through PyTorch's `fully_shard`: ranks divide the optimizer's state, the gradients and the weights.

Stages are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020:

1. each rank keeps master weights and moments of its part; gradients are divided once a step;
2. gradients too: each micro-batch's are summed over ranks and divided at once;
3. weights too: a layer's are gathered when it is computed, and forgotten after it.

The masters are float32; with dtype "bfloat16" what is gathered is rounded, and gradients are summed in float32.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from manus_fast.learn.backend import DTYPES, BackendConfig
from manus_fast.learn.optim import (
    OptimizerConfig,
    adamw,
    clip_gradients,
    grad_norm,
    load_moments,
    moments,
    set_learning_rate,
)
from manus_fast.learn.parallel import RankSums
from manus_fast.learn.policy import Policy
from manus_fast.modeling.attention import decoder_layers
from manus_fast.ranks import Ranks


class ShardedBackend(RankSums):
    """AdamW over ranks that each hold a part of every tensor; see the module's docstring and `Backend`.

    The policy's parameters become DTensors, and its `score` an operation of all ranks together: all of them call it
    equally often. `tensors`, `named_masters`, `gradients` and `load_weights` are such operations too.

    Args:
        policy: float32, the same on all ranks; rank 0's weights are sent to the others.
        config: `zero_stage` and `offload` are used: the latter keeps masters, moments and gradients on the host.
        optimizer: AdamW's settings.
        dtype: of the computation: "float32" | "bfloat16".
        ranks: of the run.

    Raises:
        ValueError: unknown dtype, or nothing to train.
    """

    def __init__(
        self,
        policy: Policy,
        config: BackendConfig,
        optimizer: OptimizerConfig | None = None,
        dtype: str = "float32",
        ranks: Ranks | None = None,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if not any(p.requires_grad for p in policy.parameters()):
            raise ValueError("model: expected at least one trainable parameter, got none")
        ranks = ranks or Ranks()
        self.rank, self.world_size = ranks.rank, ranks.size
        self.policy, self.stage = policy, config.zero_stage
        self.optimizer_config = optimizer or OptimizerConfig()
        self._device = policy.placed = policy.device
        with torch.no_grad():
            for parameter in policy.parameters():
                dist.broadcast(parameter, 0)
        self._shard(DTYPES[dtype], config.offload)
        self._params: dict[str, DTensor] = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        # This rank's parts, on the storage of the parameters: AdamW works on plain tensors.
        self._own = {name: parameter.detach().to_local() for name, parameter in self._params.items()}
        self.optimizer = adamw(self._own.items(), self.optimizer_config)

    def _shard(self, compute: torch.dtype, offload: bool) -> None:
        mesh = init_device_mesh(self._device.type, (self.world_size,))
        rounded = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        on_host = CPUOffloadPolicy() if offload and self._device.type == "cuda" else OffloadPolicy()
        shared: dict[str, Any] = {"mesh": mesh, "offload_policy": on_host}
        forget = self.stage == 3
        for trunk in (self.policy.model, self.policy.critic):
            for layer in decoder_layers(trunk) if trunk is not None else ():
                fully_shard(layer, mp_policy=rounded, reshard_after_forward=forget, **shared)
        if self.policy.value_head is not None:
            fully_shard(self.policy.value_head, mp_policy=exact, reshard_after_forward=False, **shared)
        # What is left: embeddings, last norm, output matrix. The backward pass begins with them, so they are kept.
        fully_shard(self.policy, mp_policy=rounded, reshard_after_forward=False, **shared)
        register_fsdp_forward_method(self.policy, "score")
        # torch warns of outputs that must not be changed in place, which nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for module in self._modules():
            # Losses are divided by counts over all ranks already. A plain sum is what gloo offers, too.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _modules(self) -> list[FSDPModule]:
        return [module for module in self.policy.modules() if isinstance(module, FSDPModule)]

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._keep_whole() if self.stage == 1 else contextlib.nullcontext()

    @contextlib.contextmanager
    def _keep_whole(self) -> Iterator[None]:
        self.policy.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.policy.set_requires_gradient_sync(True)

    def _take_gradients(self) -> None:
        for name, parameter in self._params.items():
            self._own[name].grad = None if parameter.grad is None else parameter.grad.to_local()

    def gradient_norm(self) -> torch.Tensor:
        self._take_gradients()
        own = grad_norm(self._own.values()).to(self._device)
        return self.sum(own.square()).sqrt()

    def first_bad_gradient(self) -> str | None:
        self._take_gradients()
        bad = [own.grad is not None and not bool(torch.isfinite(own.grad).all()) for own in self._own.values()]
        everywhere = self.sum(torch.tensor(bad, dtype=torch.float32, device=self._device))
        return next((name for name, count in zip(self._own, everywhere.tolist(), strict=True) if count), None)

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor) -> None:
        self._forget()
        clip_gradients(self._own.values(), norm.to(self._own_device), self.optimizer_config.max_grad_norm)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.discard()

    @property
    def _own_device(self) -> torch.device:
        return next(iter(self._own.values())).device

    def _forget(self) -> None:
        """Drops gathered weights, which a change of the masters would leave behind."""
        for module in self._modules():
            module.reshard()

    def discard(self) -> None:
        for name, parameter in self._params.items():
            parameter.grad = self._own[name].grad = None

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trainable weights in float32, by name, whole, one at a time."""
        for name, parameter in self._params.items():
            yield name, parameter.detach().full_tensor()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Accumulated float32 gradients by parameter name, whole."""
        return {name: p.grad.full_tensor() for name, p in self._params.items() if p.grad is not None}

    def tensors(self) -> dict[str, torch.Tensor]:
        """As SingleProcessBackend's, whole and on the host, on rank 0; the other ranks get nothing."""
        state: dict[str, torch.Tensor] = {}
        parts = moments(self.optimizer, self._own.items())
        for name, parameter in self._params.items():
            self._collect(state, f"master.{name}", parameter.detach())
            for key in ("exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in parts:
                    self._collect(state, f"{key}.{name}", self._like(parts[f"{key}.{name}"], parameter))
            if self.rank == 0 and f"step.{name}" in parts:
                state[f"step.{name}"] = parts[f"step.{name}"]
        return state

    def _collect(self, state: dict[str, torch.Tensor], name: str, tensor: DTensor) -> None:
        whole = tensor.full_tensor()
        if self.rank == 0:
            state[name] = whole.cpu()

    @staticmethod
    def _like(own: torch.Tensor, parameter: DTensor) -> DTensor:
        """This rank's part of a tensor that is divided as `parameter` is."""
        return DTensor.from_local(
            own, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restores what `tensors` of any backend and any number of ranks gave; every rank is given all of it.

        Raises:
            ValueError: missing weights, or shapes that do not fit.
        """
        self.load_weights({n.removeprefix("master."): t for n, t in tensors.items() if n.startswith("master.")})
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            key, _, parameter = name.partition(".")
            if key == "step" or parameter not in self._params:
                parts[name] = tensor
            elif key != "master":
                parts[name] = self._part(tensor, self._params[parameter])
        self.optimizer.state.clear()
        load_moments(self.optimizer, list(self._own.items()), {n: t for n, t in parts.items() if n[:7] != "master."})

    @staticmethod
    def _part(tensor: torch.Tensor, parameter: DTensor) -> torch.Tensor:
        """What this rank holds of a whole tensor."""
        if tensor.shape != parameter.shape:
            raise ValueError(f"tensor: expected shape {list(parameter.shape)}, got {list(tensor.shape)}")
        own = parameter.to_local()
        mesh, placements = parameter.device_mesh, parameter.placements
        # Every rank has read the whole: nothing needs to be sent.
        return distribute_tensor(tensor.to(own.device), mesh, placements, src_data_rank=None).to_local()

    @torch.no_grad()
    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Replaces every trainable weight, float32 by name, and keeps the optimizer's state."""
        missing = sorted(set(self._params) - set(weights))
        if missing:
            raise ValueError(f"weights: expected {len(self._params)} tensors, missing {missing[0]!r}")
        self._forget()
        for name, parameter in self._params.items():
            if weights[name].shape != parameter.shape:
                raise ValueError(
                    f"weights of {name}: expected shape {list(parameter.shape)}, got {list(weights[name].shape)}"
                )
            self._own[name].copy_(self._part(weights[name], parameter))
