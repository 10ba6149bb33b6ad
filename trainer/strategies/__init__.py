"""How parameters, gradients, optimizer state and batches are split over devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.accelerators import Accelerator
from trainer.strategies.world import World

NamedParameters: TypeAlias = Iterable[tuple[str, nn.Parameter]]
BuildOptimizer: TypeAlias = Callable[[NamedParameters], torch.optim.Optimizer]
InitialValues: TypeAlias = Callable[[str, int, int], Tensor]
"""(parameter name, start, stop) -> elements [start, stop) of the flattened whole parameter, fp32."""


class Shardable(Protocol):
    """What a strategy asks of a model."""

    def sharding_units(self) -> list[nn.Module]:
        """Sub-modules whose parameters are gathered and freed together, in the order of the forward pass."""
        ...


@dataclass(frozen=True)
class Replica:
    """The data-parallel coordinate of this process: it feeds slice `index` of `count` of each global batch."""

    index: int
    count: int


class Strategy(ABC):
    """Splits a training step over the processes of a run, without changing what the step computes.

    Attributes:
        parameters: by their own names, whatever wraps the model; the partitions that the optimizer updates. (Asking
            an FSDP2 module instead gives its gathered parameters when it happens to hold them.)
    """

    parameters: dict[str, nn.Parameter]

    def __init__(self, accelerator: Accelerator, world: World) -> None:
        self.accelerator = accelerator
        self.world = world
        self.replica = Replica(world.rank, world.size)

    @abstractmethod
    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Places a model built on the meta device, fills its parameters, and builds its optimizer.

        Returns:
            The module to call in the forward pass, and the optimizer.
        """

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        """Surrounds one micro-batch; gradients are exchanged in the last one of a step only."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this replica's share of the loss; over replicas they are summed, not averaged."""
        (loss * self.replica.count).backward()  # type: ignore[no-untyped-call]  # undoes the collectives' mean

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scales gradients down to a global norm of `max_norm` (None: leaves them); returns the norm before."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return norm

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sums a tensor over all replicas, in place."""
        dist.all_reduce(value)
        return value

    def _materialise(self, model: nn.Module, initial_values: InitialValues) -> None:
        """Gives a meta model memory on the device and fills the partition that this process holds."""
        model.to_empty(device=self.accelerator.device)
        self.parameters = dict(model.named_parameters())
        for name, parameter in self.parameters.items():
            local, start = _partition(parameter)
            with torch.no_grad():
                local.copy_(initial_values(name, start, start + local.numel()).view(local.shape))


def _partition(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """The part of a parameter that this process holds, and where it starts in the flattened whole one."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    rows, start = parameter.shape[0], 0
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0), "FSDP2 splits parameters over their first dimension"
            chunk = -(-rows // parameter.device_mesh.size(dimension))
            start = min(rows, parameter.device_mesh.get_local_rank(dimension) * chunk)
    row_elements = parameter.numel() // rows
    return parameter.to_local(), start * row_elements
