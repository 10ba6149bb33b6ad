"""The machine and the software that the bits of a result depend on, besides the experiment."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch

from samestep.errors import ConfigError
from trainer.checkpoint.collective import gather
from trainer.models import Model
from trainer.strategies import Strategy


def arithmetic(strategy: Strategy, model: Model) -> dict[str, str]:
    """Describes the hardware and software that the bits of a result depend on. Collective.

    Raises:
        ConfigError: the ranks differ.
    """
    own = {
        "device": strategy.accelerator.description,
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "attention": "fused" if model.fuses_attention else "unfused",
    }
    ranks = gather(own, strategy.world.size)
    for rank, other in enumerate(ranks):
        for name, value in other.items():
            if value != ranks[0][name]:
                raise ConfigError(
                    f"training.exact is bitwise, and the {name} of rank {rank} is {value}, on "
                    f"rank 0 it is {ranks[0][name]}. Use equal machines, or set "
                    "training.exact=tolerance."
                )
    return own


def processor() -> str:
    """The name of this machine's CPU."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
