"""Which hardware this machine has."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

from samestep.errors import ConfigError, install_command
from trainer import accelerators
from trainer.accelerators import Accelerator, version_of
from trainer.accelerators.kinds import cpu

logger = logging.getLogger(__name__)


def best() -> accelerators.Config:
    """The configuration of the best device for which hardware and software are present."""
    if torch.cuda.is_available():
        return _gpu()
    if version_of("torch_tpu") and _tpu_chips():
        from trainer.accelerators.kinds import tpu

        return tpu.Config()
    if version_of("torch-xla") and ("PJRT_DEVICE" in os.environ or _tpu_chips()):
        from trainer.accelerators.kinds import xla

        return xla.Config()
    return cpu.Config()


def _gpu() -> accelerators.Config:
    from trainer.accelerators.kinds import cuda

    return cuda.Config()


def _tpu_chips() -> int:
    from trainer.accelerators import chips

    return chips.count()


def processes(config: accelerators.Config | None) -> list[dict[str, str]]:
    """The processes that use all devices of this machine, see `Config.processes`.

    Args:
        config: of the experiment; None: one process for each GPU.
    """
    # Not `best`: it may initialize CUDA, which a forked process could not use then.
    return (config or _gpu()).processes()


def device_counts(option: str, config: accelerators.Config | None) -> list[int]:
    """Parses the value of --devices: "8", "8,64", or "here" for the devices of this machine.

    Raises:
        ConfigError: it names no numbers above 0.
    """
    here = str(len(processes(config))) if "here" in option else ""
    numbers = [number.strip() for number in option.replace("here", here).split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ConfigError(
            f"--devices is {option}. Use numbers of at least 1, such as 8 or 8,64, or here."
        )
    return list(dict.fromkeys(map(int, numbers)))


def gpu_count() -> int:
    """Number of GPUs of this machine, counted without initializing CUDA in this process."""
    from trainer.accelerators.kinds import cuda

    return cuda.gpu_count()


def planned_attention(
    config: accelerators.Config | None, width: int, dtype: torch.dtype
) -> Callable[..., Tensor] | None:
    """See `Config.planned_attention`; without a configuration, of a GPU."""
    return (config or _gpu()).planned_attention(width, dtype)


def for_any_shapes(config: accelerators.Config | None = None) -> Accelerator:
    """An accelerator for work whose shapes change, such as generation.

    Where shapes must not change because graphs are compiled, it is the CPU.

    Args:
        config: of the experiment; None: the best device.
    """
    from trainer.accelerators.kinds import xla

    if isinstance(config or best(), xla.Config):
        return cpu.Config().build()
    return detect() if config is None else config.build()


def detect() -> Accelerator:
    """The best device of this machine. Warns of a CPU beside devices that cannot be used."""
    config = best()
    if isinstance(config, cpu.Config):
        from trainer.accelerators.kinds import cuda

        reason = cuda.unusable()
        hardware = "GPUs" if reason else "TPUs"
        if reason is None and _tpu_chips():
            reason = f"{install_command('tpu')}, in an environment of its own"
        if reason:
            logger.warning(
                "training on the CPU, although this machine has %s: %s. "
                "Set accelerator=cpu if that is intended.",
                hardware,
                reason,
            )
    return config.build()
