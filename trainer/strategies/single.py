"""One process, one device."""

from __future__ import annotations

from dataclasses import dataclass

from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.errors import ConfigError
from trainer.strategies import Strategy
from trainer.strategies.world import World


@dataclass(frozen=True)
class Config(strategies.Config):
    """One process with the whole model: the reference for the other strategies."""

    def check_devices(self, devices: int) -> None:
        if devices != 1:
            raise ConfigError(
                f"strategy single runs in one process, and there are {devices}. "
                "Use strategy=fsdp or strategy=ddp, or start one process."
            )

    @property
    def plan(self) -> str:
        return "single"

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> Single:
        self.check_devices(world.size)
        return Single(accelerator, world, precision)


class Single(Strategy):
    kind = "single"
