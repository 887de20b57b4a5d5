"""The processes of a run: one, or those that torchrun started. Each handles its part of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import distributed, nn

from ridgeline.ops.reference.backend import torch_device
from ridgeline.ops.table import REFERENCE


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of a run. rank: 0 to world_size - 1. device: its own, as `training_device` names it."""

    device: str
    rank: int = 0
    world_size: int = 1

    @property
    def on_host(self) -> bool:
        """Return whether the ranks compute on CPUs."""
        return self.device == REFERENCE

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes files and prints."""
        return self.rank == 0

    def replicate(self, model: nn.Module) -> nn.Module:
        """Wrap the model in torch's DistributedDataParallel, which averages gradients over the ranks."""
        if self.world_size == 1:
            return model
        device_ids = None if self.on_host else [torch.device(self.device)]
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)

    def local(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep the gradients that are computed in this context on their rank, until a pass outside of it."""
        return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()

    def total(self, value: float) -> float:
        """Return the sum of a value over all ranks."""
        if self.world_size == 1:
            return value
        sum_ = torch.tensor(value, dtype=torch.float64, device=torch_device(self.device))
        distributed.all_reduce(sum_)
        return float(sum_)

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        if self.world_size > 1:
            distributed.barrier()


@contextmanager
def open_ranks(device: str) -> Iterator[Ranks]:
    """Connect the ranks that torchrun's environment describes (NCCL on GPUs, Gloo on CPUs); without torchrun there is
    one.
    """
    if not distributed.is_torchelastic_launched():
        yield Ranks(device)
        return
    local = int(os.environ["LOCAL_RANK"])
    if device.startswith("cuda"):
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Ranks(device, distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
