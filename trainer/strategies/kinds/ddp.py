"""Data parallelism: every process has the whole model and optimizer; gradients are all-reduced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.strategies import Strategy
from trainer.strategies.exact import GradientSums
from trainer.strategies.world import World


@dataclass(frozen=True)
class Config(strategies.Config):
    """Replicates parameters and optimizer state in every process.

    Attributes:
        bucket_mb: gradients are all-reduced in buckets of this size during the backward pass.
    """

    supports_exact = True

    bucket_mb: int = 25

    @property
    def plan(self) -> str:
        return "ddp"

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> DataParallel:
        return DataParallel(accelerator, world, precision, self.bucket_mb)


class DataParallel(Strategy):
    kind = "ddp"

    def __init__(
        self, accelerator: Accelerator, world: World, precision: Precision, bucket_mb: int
    ) -> None:
        super().__init__(accelerator, world, precision)
        self._bucket_mb = bucket_mb
        self._units = GradientSums(dist.group.WORLD)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.exact:
            return model
        # As a view, a gradient is not copied out of the bucket that was reduced.
        return DistributedDataParallel(
            model, bucket_cap_mb=self._bucket_mb, gradient_as_bucket_view=True
        )

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        if self.exact:
            return self._units.unit(self.parameters.values(), last)
        return nullcontext() if last else cast(DistributedDataParallel, self._module).no_sync()
