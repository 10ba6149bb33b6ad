"""Which hardware this machine has."""

from __future__ import annotations

import logging
import os

import torch

from trainer import accelerators
from trainer.accelerators import Accelerator, chips, cpu, cuda, tpu, version_of, xla

logger = logging.getLogger(__name__)


def best() -> accelerators.Config:
    """The configuration of the best device that this machine has, and the software for."""
    if torch.cuda.is_available():
        return cuda.Config()
    if version_of("torch_tpu") and chips.count():
        return tpu.Config()
    if version_of("torch-xla") and ("PJRT_DEVICE" in os.environ or chips.count()):
        return xla.Config()
    return cpu.Config()


def processes(config: accelerators.Config | None) -> list[dict[str, str]]:
    """The processes that use all devices of this machine (`Config.processes`); None asks the GPUs.

    `best` is not asked instead, because it may start the driver.
    """
    return (config or cuda.Config()).processes()


def for_any_shapes(config: accelerators.Config | None = None) -> Accelerator:
    """An accelerator for work whose shapes change, as they do while text grows.

    The CPU in place of one that compiles.

    Args:
        config: the one that is asked for; None takes the best.
    """
    if isinstance(config or best(), xla.Config):
        return cpu.Config().build()
    return detect() if config is None else config.build()


def detect() -> Accelerator:
    """The best device that this machine has.

    Warns where that is the CPU although there are better ones.
    """
    config = best()
    if isinstance(config, cpu.Config):
        meant = "accelerator=cpu says it is meant so"
        if reason := cuda.unusable():
            logger.warning(
                "training on the CPU, although this machine has GPUs: %s; %s", reason, meant
            )
        elif chips.count():
            install = "pip install 'samestep[tpu]', in an environment of its own"
            logger.warning(
                "training on the CPU, although this machine has TPUs: %s; %s", install, meant
            )
    return config.build()
