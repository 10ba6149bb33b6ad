"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from samestep.errors import ConfigError
from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.strategies import Strategy
from trainer.strategies.world import World

if TYPE_CHECKING:
    from trainer.strategies.exact import GradientSums


@dataclass(frozen=True)
class Config(strategies.Config):
    """One process with the whole model: the reference for the other strategies."""

    supports_exact = True

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

    @cached_property
    def _units(self) -> GradientSums:
        from trainer.strategies.exact import GradientSums

        return GradientSums(None)

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        return self._units.unit(self.parameters.values(), last) if self.exact else nullcontext()
