"""Times and counters of each timed step of a turn, to explain a slow turn afterwards."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.accelerators.kinds.cuda import nvml_handle

ALLOCATOR = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
"""Counters of torch's allocator; the last two are calls of cudaMalloc and cudaFree."""

_REASONS = "nvmlClocksEventReason"


@dataclass(frozen=True)
class StepRecord:
    """A step, from the end of the one before to its own end on the host.

    Attributes:
        seconds: of the host, which only enqueues the work of a GPU.
        cpu_seconds: of all threads of the process.
        device_seconds: between the ends of both steps on the GPU; None on the CPU.
        graphs: number of graphs that torch.compile compiled.
        allocator: by how much the counters `ALLOCATOR` grew; None on the CPU.
        gpu: clocks in MHz, power in W, temperature in degrees Celsius and the reasons for lower
            clocks, when the host ended the step; None without nvidia-ml-py.
    """

    seconds: float
    cpu_seconds: float
    device_seconds: float | None
    graphs: int
    allocator: dict[str, int] | None
    gpu: dict[str, Any] | None


@dataclass(frozen=True)
class _Reading:
    """The state of all counters at the end of a step."""

    seconds: float
    cpu_seconds: float
    end: Any
    graphs: int
    allocator: Mapping[str, int] | None
    gpu: dict[str, Any] | None


class StepRecorder:
    """Reads all counters at the end of each step, without waiting for the device."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._gpu: Callable[[], dict[str, Any]] | None = None
        self._readings: list[_Reading] = []

    def start(self) -> None:
        """Begins with the next step."""
        if self._on_gpu and self._gpu is None:
            self._gpu = _gpu_reader()
        self._readings = [self._read()]

    def end_step(self) -> None:
        """Ends a step."""
        self._readings.append(self._read())

    def records(self) -> list[StepRecord]:
        """The steps since the start. The device must have reached their end."""
        pairs = zip(self._readings, self._readings[1:], strict=False)
        return [_difference(before, after) for before, after in pairs]

    def _read(self) -> _Reading:
        end = allocator = None
        if self._on_gpu:
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
            stats = torch.cuda.memory_stats_as_nested_dict()
            allocator = {name: int(stats.get(name, 0)) for name in ALLOCATOR}
        gpu = None if self._gpu is None else self._gpu()
        # The side that compiles nothing does not import Dynamo.
        dynamo = sys.modules.get("torch._dynamo.utils")
        graphs = 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
        return _Reading(time.perf_counter(), time.process_time(), end, graphs, allocator, gpu)


def _difference(before: _Reading, after: _Reading) -> StepRecord:
    device_seconds = allocator = None
    if after.end is not None:
        device_seconds = before.end.elapsed_time(after.end) / 1000
    if before.allocator is not None and after.allocator is not None:
        allocator = {name: after.allocator[name] - before.allocator[name] for name in ALLOCATOR}
    return StepRecord(
        seconds=after.seconds - before.seconds,
        cpu_seconds=after.cpu_seconds - before.cpu_seconds,
        device_seconds=device_seconds,
        graphs=after.graphs - before.graphs,
        allocator=allocator,
        gpu=after.gpu,
    )


def _gpu_reader() -> Callable[[], dict[str, Any]] | None:
    """A function that reads clocks and their limits by NVML; None without nvidia-ml-py."""
    handle = nvml_handle(torch.device("cuda", torch.cuda.current_device()))
    if handle is None:
        return None
    import pynvml

    # Some bits have two names: the first is the newer one.
    names: dict[int, str] = {}
    for name, bit in vars(pynvml).items():
        if name.startswith(_REASONS) and isinstance(bit, int) and bit.bit_count() == 1:
            names.setdefault(bit, name.removeprefix(_REASONS))

    def read(query: Callable[..., Any], *arguments: int) -> Any:
        try:
            return query(handle, *arguments)
        except pynvml.NVMLError:  # some GPUs, and parts of one, lack some readings
            return None

    def all_readings() -> dict[str, Any]:
        milliwatts = read(pynvml.nvmlDeviceGetPowerUsage)
        reasons = read(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return {
            "sm_mhz": read(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            "memory_mhz": read(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
            "watts": None if milliwatts is None else milliwatts / 1000,
            "celsius": read(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            "lowered_by": None
            if reasons is None
            else [name for bit, name in names.items() if reasons & bit],
        }

    return all_readings
