"""The processes of one run: which one this is, and what they tell each other.

Any launcher will do that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: `manus-fast ppo --gpus N`,
torchrun, deepspeed. Every rank plays its share of the episodes; then each is told all of them, so that what follows
(advantages, the order of rows, schedules, whether to stop) is computed everywhere alike, and only gradients are summed.

    ranks = connect()
    mine = [play(tasks[i]) for i in ranks.share(len(tasks))]
    everybodys = ranks.gather(mine)          # in the order of tasks, on every rank
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

# Ranks wait for the slowest one's episodes. One that died is noticed at once by the launcher and by its sockets.
_PATIENCE = timedelta(hours=6)

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among `size`. The default is a run of one process, where nothing is sent."""

    rank: int = 0
    size: int = 1
    channel: Any = None
    """Process group on the hosts (gloo), for what is not a tensor on a device."""

    @property
    def first(self) -> bool:
        """Whether this rank writes the run's files and speaks for it."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's part of 0 … count-1: neighbours together, in the order of ranks, sizes differing by one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, items: Sequence[T]) -> list[T]:
        """Everybody's items, in the order of ranks; what can be pickled can be sent. All ranks have to call it."""
        if self.size == 1:
            return list(items)
        import torch.distributed as dist

        lists: list[Any] = [None] * self.size
        dist.all_gather_object(lists, list(items), group=self.channel)
        return [item for part in lists for item in part]

    def of_first(self, value: T) -> T:
        """Rank 0's value, on every rank: for clocks and whatever else could differ."""
        return self.gather([value])[0]

    def wait(self) -> None:
        """Returns when all ranks have come here."""
        self.gather([None])


_joined: Ranks | None = None


def world_size() -> int:
    """Ranks that a launcher started, 1 without one. Raises ValueError where WORLD_SIZE is no integer >= 1."""
    return _integer("WORLD_SIZE", 1)


def _integer(name: str, least: int, most: int = 10**6) -> int:
    """A variable of the launcher; `least` where it is unset."""
    text = os.environ.get(name, "").strip() or str(least)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise ValueError(f"{name}: expected an integer from {least} to {most} from the launcher, got {text!r}")
    return int(text)


def connect() -> Ranks:
    """Joins the ranks that a launcher started; a run of one process where none did. Calling it again is fine.

    Raises:
        ValueError: some of the launcher's variables are missing or no integers, or this rank has no GPU of its own.
    """
    global _joined
    size = world_size()
    if size == 1:
        return Ranks()
    if _joined is not None:
        return _joined
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE: expected {', '.join(_VARIABLES)} from the launcher, got no {missing[0]}")
    _integer("RANK", 0, size - 1)
    _integer("MASTER_PORT", 1, 65535)
    import torch
    import torch.distributed as dist

    kinds = "gloo"
    if torch.cuda.is_available():
        local, gpus = _integer("LOCAL_RANK", 0), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"LOCAL_RANK: expected a rank for each of {gpus} GPUs at most, got rank {local}")
        torch.cuda.set_device(local)
        kinds = "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        dist.init_process_group(kinds, timeout=_PATIENCE)
        atexit.register(_leave)
    _joined = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_PATIENCE))
    return _joined


def _leave() -> None:
    """Ends the groups before the interpreter does: a gloo thread that still waits at exit aborts the process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
