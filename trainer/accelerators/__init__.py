"""One kind of hardware each: where tensors live, which collectives it speaks, how fast it can be."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from trainer.errors import ConfigError

logger = logging.getLogger(__name__)

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def local_rank() -> int:
    """This process's number on its machine, as the launcher says; 0 when there is only one."""
    if "LOCAL_RANK" not in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "the launcher sets WORLD_SIZE and no LOCAL_RANK, so that all processes would take the same "
            "device; start them with samestep train or torchrun, or set LOCAL_RANK"
        )
    return int(os.environ.get("LOCAL_RANK", "0"))


class Accelerator(ABC):
    """The device of this process.

    Attributes:
        device: where parameters and batches live.
        collective_backend: what torch.distributed uses between such devices.
    """

    device: torch.device
    collective_backend: str

    @property
    @abstractmethod
    def description(self) -> str:
        """The device in words, for the start-up report."""

    @abstractmethod
    def peak_flops(self, precision: Precision) -> float | None:
        """The data sheet's dense FLOP/s of one device, or None where there is no such figure."""

    @abstractmethod
    def expected_flops(self, precision: Precision) -> float | None:
        """FLOP/s that a training step may be expected to reach on one device, for the estimate of a run's time."""

    @abstractmethod
    def memory(self) -> int | None:
        """The bytes of device memory that this process may use, or None where the device has none of its own."""

    @abstractmethod
    def peak_memory(self) -> int | None:
        """The most bytes of it that this process has held since it began, or since `reset_peak_memory`."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Gives back what is cached, and starts to measure anew."""

    @abstractmethod
    def mark(self) -> Any:
        """Marks the place in the device's work that has been reached so far, without waiting for the device."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """What the device took from one mark to another, idle time included; waits until it gets there."""

    def energy(self) -> float | None:
        """Joules that the device has used since some time in the past, or None where it does not tell."""
        return None

    def autocast(self, precision: Precision) -> AbstractContextManager[object]:
        """Runs matrix products in `precision`; parameters stay in fp32."""
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[precision])

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies a batch of CPU tensors to the device, without waiting for the copy where the device allows."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def step_boundary(self) -> None:
        """Marks the end of an optimizer step; back-ends that trace graphs cut them here."""
        return


def detect() -> Accelerator:
    """The best device that this machine has; warns where that is the CPU although there are GPUs."""
    from trainer.accelerators import cpu, cuda

    if torch.cuda.is_available():
        return cuda.Config().build()
    if reason := cuda.unusable():
        logger.warning(
            "training on the CPU, although this machine has GPUs: %s; accelerator=cpu says it is meant so", reason
        )
    return cpu.Config().build()
