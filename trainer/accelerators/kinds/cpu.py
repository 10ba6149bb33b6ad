"""The CPU, for development, tests and small runs; collectives by gloo."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from trainer import accelerators
from trainer.accelerators import Accelerator, Precision


@dataclass(frozen=True)
class Config(accelerators.Config):
    """Runs on the CPU, even on a machine with GPUs.

    Attributes:
        threads: threads of each process's matrix products. None: as torch and OMP_NUM_THREADS say.
    """

    threads: int | None = None

    def repeatable(self) -> Config:
        # By default there are as many threads as cores for each process of a machine.
        return replace(self, threads=self.threads or 1)

    def build(self) -> CpuAccelerator:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return CpuAccelerator()


class CpuAccelerator(Accelerator):
    device = torch.device("cpu")
    collective_backend = "gloo"

    @property
    def description(self) -> str:
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' if threads > 1 else ''}"

    def peak_flops(self, precision: Precision) -> None:
        return None
