"""NVIDIA GPUs, one per process; collectives by NCCL."""

from __future__ import annotations

import multiprocessing
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer import accelerators
from trainer.accelerators import Accelerator, Precision, local_device

# Dense TFLOP/s in bf16 and fp16 from NVIDIA's data sheets, by a part of the device's name. The
# first match counts, so "H200 NVL" comes before "H200".
_TFLOPS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10": 125,
}
_FP16_TFLOPS = {"V100-PCIE": 112, "V100": 125, "T4": 65}  # of GPUs without bf16

_BACKEND: Any = torch.backends.cuda
_RECORDED_COLLECTIVES = 2000
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class Config(accelerators.Config):
    """Runs on the GPU of this process's local rank.

    Attributes:
        fused_attention: computes attention by one kernel with masks, biases and dropout (extra
            `gpu`), which is compared with unfused attention at the start. Off, or without the
            extra, PyTorch's kernels compute what they can.
        tf32: lets fp32 matrix products use TensorFloat-32: faster, with 10 bits of mantissa. Off,
            because runs on different hardware would no longer agree within the tolerance.
        deterministic: repeats a run bit by bit on the same devices, if it is started the same way:
            torch uses slower kernels where fast ones add in any order, and refuses operations that
            have no others.
    """

    measures_memory = True

    fused_attention: bool = True
    tf32: bool = False
    deterministic: bool = False

    def repeatable(self) -> Config:
        return replace(self, deterministic=True)

    def build(self) -> CudaAccelerator:
        if not torch.cuda.is_available():
            reason = (
                unusable() or "nvidia-smi lists none. Install a driver, or use accelerator=cpu."
            )
            raise ConfigError(f"accelerator: cuda was asked for, and torch finds no GPU: {reason}")
        index = local_device(torch.cuda.device_count(), "GPU")
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        _avoid_cudnn_attention()
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product
            torch.use_deterministic_algorithms(True)
        return CudaAccelerator(index, self.fused_attention)

    def planned_attention(self, width: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
        from trainer.accelerators.flash import attention, fits

        return attention if self.fused_attention and fits(width, dtype) else None

    def processes(self) -> list[dict[str, str]]:
        """One process for each GPU; a single one without GPUs."""
        count = gpu_count()
        if count < 2:
            return [{}]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if len(visible) == count else [str(number) for number in range(count)]
        return [{"CUDA_VISIBLE_DEVICES": name} for name in names]


def _avoid_cudnn_attention() -> None:
    """Keeps `scaled_dot_product_attention` from using cuDNN, torch's first choice on H100 and H200.

    With cuDNN 9.20, gradients of queries are NaN for some masks if the length is 64 more than a
    multiple of 128 (pytorch#196678), and each new shape takes tens of milliseconds to plan.
    """
    _BACKEND.enable_cudnn_sdp(False)


def _cache_kernels_here() -> None:
    """Keeps Triton's compiled kernels on this machine, not in a home folder on a network.

    All ranks of a cluster would read and write the same small files there. On one machine they may:
    Triton replaces files atomically.
    """
    if "TRITON_CACHE_DIR" in os.environ or "TRITON_HOME" in os.environ:
        return
    folder = Path(tempfile.gettempdir(), f"triton-{os.getuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Other users can create the folder first, or a link, and put their code there.
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
            os.environ["TRITON_CACHE_DIR"] = str(folder)


def _keep_alive_after_errors() -> None:
    """Keeps NCCL's watchdog from aborting this process when a collective fails or times out.

    It aborts the collective instead, and `World` ends the process with the reason. An abort would
    look like a crash of this rank, while another one is to blame. torchrun sets 1, the abort, for
    its workers.
    """
    if os.environ.get(_ERROR_HANDLING, "1") == "1":
        os.environ[_ERROR_HANDLING] = "2"


def _attention_kernels() -> str:
    """The kernels that `scaled_dot_product_attention` may choose from: "flash, efficient, math"."""
    names = {"cudnn": "cudnn", "flash": "flash", "mem_efficient": "efficient", "math": "math"}
    enabled = (shown for name, shown in names.items() if getattr(_BACKEND, f"{name}_sdp_enabled")())
    return ", ".join(enabled)


def gpu_count() -> int:
    """Number of GPUs, counted in a forked process.

    Without NVML, counting initializes CUDA, which later forks of this process could not use then.
    """
    # The exit status carries the count: no pipe is needed.
    counter = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(torch.cuda.device_count())
    )
    counter.start()
    counter.join()
    return counter.exitcode or 0


def unusable() -> str | None:
    """The reason why torch cannot use the GPUs that nvidia-smi lists, with the fix.

    None if it lists none.
    """
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
    if not gpus:
        return None
    found = f"nvidia-smi lists {len(gpus)} ({gpus[0].partition(' (UUID')[0]})"
    if torch.version.cuda is None:
        return (
            f"{found}, and torch {torch.__version__} is a build for CPUs. Install one for CUDA "
            "(see pytorch.org)."
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"{found}, and CUDA_VISIBLE_DEVICES hides them. Unset it."
    return (
        f"{found}, and torch's CUDA {torch.version.cuda} cannot use them. nvidia-smi shows the "
        "newest CUDA that the driver supports: update the driver, or install a torch for that CUDA."
    )


def nvml_handle(device: torch.device) -> Any | None:
    """The GPU for calls of NVML; None without nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By UUID: NVML numbers all GPUs, not only those in CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def _energy_counter(device: torch.device) -> Callable[[], int] | None:
    """A function that reads the GPU's energy counter, in millijoules.

    None without nvidia-ml-py, and for GPUs without a counter (before Volta).
    """
    if (handle := nvml_handle(device)) is None:
        return None
    import pynvml

    try:
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)


class CudaAccelerator(Accelerator):
    collective_backend = "nccl"
    runs_behind = True

    def __init__(self, index: int, fuses_attention: bool = True) -> None:
        _keep_alive_after_errors()
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        # NCCL connects at once, where a failure is explained, not in the first collective.
        self.collective_device = self.device
        # NCCL's last collectives, for `Heartbeat`; the name that all releases of torch know.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
        _cache_kernels_here()
        self.attention_kernels = _attention_kernels()
        self._fuses_attention = fuses_attention
        # AMD's GPUs have capabilities of their own, which say nothing of fp8.
        is_nvidia = torch.version.hip is None
        self.has_fp8 = is_nvidia and torch.cuda.get_device_capability(self.device) >= (8, 9)
        self._millijoules = _energy_counter(self.device)

    @property
    def description(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def peak_flops(self, precision: Precision) -> float | None:
        name = torch.cuda.get_device_name(self.device)
        figures = {"fp32": {}, "bf16": _TFLOPS, "fp16": _TFLOPS | _FP16_TFLOPS}[precision]
        for part, tflops in figures.items():
            if re.search(rf"\b{part}\b", name):  # whole words: an "A10" is in no "A100"
                return tflops * 1e12
        return None

    def memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        # What torch has reserved is free to CUDA no more, but this process can use it.
        return free + torch.cuda.memory_reserved(self.device)

    def reset_peak_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def fused_attention(self, width: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
        from trainer.accelerators.flash import attention, supports

        example = torch.empty(1, 1, 1, width, dtype=dtype, device=self.device)
        return attention if self._fuses_attention and supports(*[example] * 3) else None

    def energy(self) -> float | None:
        return None if self._millijoules is None else self._millijoules() / 1000

    def read_later(self, value: Tensor) -> Callable[[], float]:
        # `float` would wait for everything that has been enqueued since.
        on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
        on_host.copy_(value, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def read() -> float:
            copied.synchronize()
            return float(on_host)

        return read

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies from page-locked memory, so the host does not wait for the copy."""
        return super().to_device({name: tensor.pin_memory() for name, tensor in batch.items()})
