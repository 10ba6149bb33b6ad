"""Data parallel: every process holds the whole model and optimizer; gradients are all-reduced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.strategies import BuildOptimizer, InitialValues, Strategy
from trainer.strategies.world import World


@dataclass(frozen=True)
class Config(strategies.Config):
    """Replicates everything.

    Attributes:
        bucket_mb: gradients are exchanged in buckets of this size while the backward pass goes on.
    """

    bucket_mb: int = 25

    @property
    def plan(self) -> str:
        return "ddp"

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> DataParallel:
        return DataParallel(accelerator, world, precision, self)


class DataParallel(Strategy):
    kind: ClassVar[str] = "ddp"

    def __init__(
        self, accelerator: Accelerator, world: World, precision: Precision, config: Config
    ) -> None:
        super().__init__(accelerator, world, precision)
        self._config = config

    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._materialise(model, initial_values)
        self._wrapped = self._wrap(model)
        return self._wrapped, build_optimizer(self.parameters.items())

    def _wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            model, bucket_cap_mb=self._config.bucket_mb, gradient_as_bucket_view=True
        )

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else cast(DistributedDataParallel, self._wrapped).no_sync()
