"""One process, one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.errors import ConfigError
from trainer.strategies import BuildOptimizer, InitialValues, Strategy
from trainer.strategies.world import World


@dataclass(frozen=True)
class Config(strategies.Config):
    """No splitting at all: the reference that the other strategies are compared with."""

    def check_devices(self, devices: int) -> None:
        if devices != 1:
            raise ConfigError(
                f"strategy single runs in one process, and there are {devices}; "
                "use strategy=fsdp or strategy=ddp, or start one process"
            )

    @property
    def plan(self) -> str:
        return "single"

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> Single:
        self.check_devices(world.size)
        return Single(accelerator, world, precision)


class Single(Strategy):
    kind: ClassVar[str] = "single"

    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._materialise(model, initial_values)
        return model, build_optimizer(self.parameters.items())
