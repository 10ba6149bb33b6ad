"""Accelerators: one module per kind of hardware, with its device, collectives and peak FLOP/s."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from samestep.config import kind_name
from samestep.environment import number
from samestep.errors import ConfigError

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def local_device(count: int, kind: str) -> int:
    """Returns the index of this process's device on its machine, which is its local rank.

    Args:
        count: number of devices of the machine.
        kind: the name of such a device, for the error.

    Raises:
        ConfigError: the launcher does not set LOCAL_RANK, or there are more processes than devices.
    """
    # Without LOCAL_RANK all processes would share device 0, and only be slow.
    if not os.environ.get("LOCAL_RANK") and number("WORLD_SIZE", 1) > 1:
        raise ConfigError(
            "the launcher sets WORLD_SIZE but not LOCAL_RANK, so all processes would take the same "
            "device. Start them with samestep train or torchrun, or set LOCAL_RANK."
        )
    rank = number("LOCAL_RANK", 0)
    if rank >= count:
        raise ConfigError(
            f"process {rank} of this machine, counted from 0, has no {kind}: there are {count}. "
            f"Use --processes {count} or fewer."
        )
    return rank


class Config(ABC):
    """The section `accelerator` of an experiment: base class of the `Config` of each module.

    Attributes:
        measures_memory: whether its devices tell how much memory they have, so that
            `micro_batch_size: auto` measures what fits.
    """

    measures_memory: ClassVar[bool] = False

    @abstractmethod
    def build(self) -> Accelerator:
        """Initializes the device.

        Raises:
            ConfigError: the device is not available.
        """

    def repeatable(self) -> Config:
        """These settings, changed so that the same work gives the same bits each time."""
        return self

    @property
    def varies(self) -> str | None:
        """What to set to make them `repeatable`, as YAML; None: nothing."""
        now, wanted = vars(self), vars(self.repeatable())
        changed = [f"{name}: {wanted[name]}".lower() for name in now if now[name] != wanted[name]]
        kind = kind_name(self)
        return f"{{kind: {kind}, {', '.join(changed)}}}" if changed else None

    def processes(self) -> list[dict[str, str]]:
        """The processes that use all devices of this machine: environment variables of each.

        The variables give the process a device of its own. By default, one process drives all
        devices and needs none.
        """
        return [{}]

    def planned_attention(self, width: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
        """What `Accelerator.fused_attention` returns on a device that can run it, for plans."""
        return None


class Accelerator(ABC):
    """The device, or devices, that this process drives.

    Attributes:
        device: where parameters and batches are.
        collective_backend: the back-end of torch.distributed for this device.
        precisions: supported precisions of matrix products.
        has_fp8: whether it multiplies matrices of 8-bit floating-point numbers.
        compiles: whether operations are recorded into graphs and compiled. Then neither a shape nor
            a number that is not a tensor may change from step to step.
        compilations: number of compilations of each graph so far, by the graph's name. A second
            compilation of a graph is an error.
        collective_device: the device from which collectives connect at once; None: in the first
            collective.
        attention_kernels: those that torch may choose from; "" if there is no choice.
        compile_options: arguments of torch.compile for this device.
        runs_behind: whether collectives on the device return before they have run.
    """

    device: torch.device
    collective_backend: str
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    has_fp8: bool = False
    compiles: bool = False
    compilations: Mapping[str, int] = MappingProxyType({})
    collective_device: torch.device | None = None
    attention_kernels: str = ""
    compile_options: Mapping[str, Any] = MappingProxyType({"backend": "inductor"})
    runs_behind: bool = False

    @property
    @abstractmethod
    def description(self) -> str:
        """The name of the device, for the start-up report."""

    @abstractmethod
    def peak_flops(self, precision: Precision) -> float | None:
        """Dense FLOP/s of this process's devices by the data sheet; None if there is no figure."""

    def memory(self) -> int | None:
        """Bytes of device memory available to this process; None if it is not measured."""
        return None

    def peak_memory(self) -> int | None:
        """Most bytes that this process has held since its start or `reset_peak_memory`."""
        return None

    def reset_peak_memory(self) -> None:  # noqa: B027
        """Frees cached memory and restarts the measurement of `peak_memory`."""

    def mark(self) -> Any:
        """Records a point in the device's queue of work, without waiting for the device.

        By default, the host's clock.
        """
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Device time between two marks, including idle time. Waits until `end` is reached."""
        return float(end - begin)

    def fused_attention(self, width: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
        """The kernel for `Model.fuse_attention` with heads of this width; None: there is none."""
        return None

    @property
    def fuses_attention(self) -> bool:
        """Whether `fused_attention` may return a kernel."""
        return type(self).fused_attention is not Accelerator.fused_attention

    def energy(self) -> float | None:
        """Joules consumed by the device since an arbitrary time; None if it has no counter."""
        return None

    def autocast(self, precision: Precision) -> AbstractContextManager[object]:
        """Computes matrix products in `precision`; parameters stay in fp32."""
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[precision])

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies CPU tensors [B, ...] to the device, asynchronously if it supports that."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def read_later(self, value: Tensor) -> Callable[[], float]:
        """Starts to copy a scalar to the host; the function that is returned waits for it."""
        return lambda: float(value)

    def graph(self, work: str) -> AbstractContextManager[object]:
        """Surrounds operations that form one graph if the accelerator `compiles`.

        Operations under the same name must be the same graph each time.
        """
        return nullcontext()


def version_of(distribution: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
