"""Accelerators: one kind of hardware each, with its device, collectives and peak throughput."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from trainer.errors import ConfigError

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
_EXPECTED_SHARE = 0.4  # of the peak
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def local_rank() -> int:
    """This process's number on its machine, as the launcher says; 0 when there is only one."""
    if "LOCAL_RANK" not in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "the launcher sets WORLD_SIZE and no LOCAL_RANK, so that all processes would take the "
            "same "
            "device; start them with samestep train or torchrun, or set LOCAL_RANK"
        )
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_device(count: int, kind: str) -> int:
    """The number of this process's device on its machine, one a process.

    Args:
        count: how many devices the machine has.
        kind: what they are called.

    Raises:
        ConfigError: there are more processes than devices.
    """
    if local_rank() >= count:
        raise ConfigError(
            f"process {local_rank()} of this machine has no {kind}: there are {count}; start at "
            "most that many "
            "processes"
        )
    return local_rank()


class Config(ABC):
    """The section `accelerator` of an experiment: the base of the `Config` of each module here."""

    @abstractmethod
    def build(self) -> Accelerator:
        """Takes the device.

        Raises:
            ConfigError: it cannot be had.
        """

    def processes(self) -> list[dict[str, str]]:
        """The processes that use all devices of this machine, one dictionary for each.

        It holds the environment variables that give the process a device of its own. Here it is one
        process that drives all devices, and needs none.
        """
        return [{}]


class Accelerator(ABC):
    """The device of this process.

    Attributes:
        device: where parameters and batches live.
        collective_backend: what torch.distributed uses between the processes of a run on such
            devices.
        precisions: what it computes matrix products with.
        compiles: whether it records operations into graphs and compiles these, which then must not
            change from step to step: neither in their shapes nor in their numbers that are not
            tensors.
        compilations: of each graph by its name, so far; at most 1 each, or the run would not go on.
    """

    device: torch.device
    collective_backend: str
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    compiles: bool = False
    compilations: Mapping[str, int] = MappingProxyType({})

    @property
    @abstractmethod
    def description(self) -> str:
        """The device in words, for the start-up report."""

    @abstractmethod
    def peak_flops(self, precision: Precision) -> float | None:
        """The data sheet's dense FLOP/s of what this process drives, or None where there is no such
        figure.
        """

    def expected_flops(self, precision: Precision) -> float | None:
        """FLOP/s that a training step may be expected to reach on that, for the estimate of a run's
        time.
        """
        peak = self.peak_flops(precision)
        return _EXPECTED_SHARE * peak if peak else None

    def memory(self) -> int | None:
        """The bytes of device memory that this process may use, or None where there is none of its
        own to measure.
        """
        return None

    def peak_memory(self) -> int | None:
        """The most bytes of it that this process has held since it began, or since
        `reset_peak_memory`.
        """
        return None

    def reset_peak_memory(self) -> None:  # noqa: B027
        """Gives back what is cached, and starts to measure anew."""

    def mark(self) -> Any:
        """Marks the place in the device's work that has been reached so far, without waiting for
        the device.

        By the host's clock, unless the device has one.
        """
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """What the device took from one mark to another, idle time included.

        Waits until it gets there.
        """
        return float(end - begin)

    def energy(self) -> float | None:
        """Joules that the device has used since some time in the past, or None where it does not
        tell.
        """
        return None

    def autocast(self, precision: Precision) -> AbstractContextManager[object]:
        """Runs matrix products in `precision`; parameters stay in fp32."""
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[precision])

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies a batch of CPU tensors to the device, without waiting for the copy where the
        device allows.
        """
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def graph(self, work: str) -> AbstractContextManager[object]:
        """Surrounds work on the device that is one graph where it `compiles`, the same one for the
        same name.
        """
        return nullcontext()


def version_of(distribution: str) -> str | None:
    """The version of a package that is installed, which is not imported for that; else None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
