"""AdamW over float32 master weights, with its state readable and writable by parameter name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """On matrices only: norms, biases and other vectors never decay."""
    max_grad_norm: float = 1.0
    """Global L2 norm that gradients are scaled down to; 0 turns clipping off."""
    value_head_scale: float = 1.0
    """Learning rate of the value head as a multiple of the policy's: the head starts from nothing."""

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"optimizer.{name}: expected a number in [0, 1), got {getattr(self, name)}")
        for name in ("weight_decay", "max_grad_norm", "value_head_scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}: expected a number >= 0, got {getattr(self, name)}")
        if not self.eps > 0:
            raise ValueError(f"optimizer.eps: expected a number above 0, got {self.eps}")


def adamw(named: Iterable[tuple[str, torch.Tensor]], config: OptimizerConfig, lr: float = 0.0) -> torch.optim.AdamW:
    """AdamW in three groups: matrices with decay, vectors and scalars without, and the value head (`value_head.*`)
    with a learning rate of its own. A group's "scale" times the learning rate is what `set_learning_rate` gives it."""
    head, decay, plain = [], [], []
    for name, parameter in named:
        group = head if name.startswith("value_head.") else decay if parameter.dim() >= 2 else plain
        group.append(parameter)
    groups = [
        {"params": decay, "weight_decay": config.weight_decay, "scale": 1.0},
        {"params": plain, "weight_decay": 0.0, "scale": 1.0},
        {"params": head, "weight_decay": 0.0, "scale": config.value_head_scale},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def moments(optimizer: torch.optim.AdamW, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Optimizer state as "exp_avg.NAME", "exp_avg_sq.NAME" (shaped like the parameter) and "step.NAME" (scalar)."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{key}.{name}"] = value
    return state


def load_moments(
    optimizer: torch.optim.AdamW, named: Iterable[tuple[str, torch.Tensor]], state: dict[str, torch.Tensor]
) -> None:
    """Restores what `moments` gave. Raises ValueError for a name or shape that does not fit the parameters."""
    left = set(state)
    for name, parameter in named:
        entry: dict[str, torch.Tensor] = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = state.get(f"{key}.{name}")
            if value is None:
                continue
            left.discard(f"{key}.{name}")
            if key != "step" and value.shape != parameter.shape:
                raise ValueError(
                    f"optimizer state of {name}: expected shape {list(parameter.shape)}, got {list(value.shape)}"
                )
            entry[key] = value.to(device=parameter.device, dtype=torch.float32, copy=True)
        if entry:
            optimizer.state[parameter] = entry
    if left:
        raise ValueError(f"optimizer state: expected names of this model's parameters, got {sorted(left)[0]!r}")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)


def grad_norm(parameters: Iterable[nn.Parameter | torch.Tensor]) -> torch.Tensor:
    """Global L2 norm of the gradients, a float32 scalar on their device; parameters without one count as 0."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(grads, foreach=True)


def clip_gradients(parameters: Iterable[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scales gradients by min(1, limit / norm), without waiting for the device; limit 0 leaves them."""
    if limit > 0:
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
