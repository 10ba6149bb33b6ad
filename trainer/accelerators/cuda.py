"""NVIDIA GPUs, one a process; collectives by NCCL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.accelerators import Accelerator, Precision, local_rank
from trainer.errors import ConfigError

# Dense bf16 TFLOP/s from NVIDIA's data sheets, by a part of the device's name; the first match counts.
_BF16_TFLOPS = {
    "B200": 2250,
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
_EXPECTED_SHARE = 0.4


@dataclass(frozen=True)
class Config:
    """Runs on the GPU with this process's local rank.

    Attributes:
        tf32: lets fp32 matrix products use TensorFloat-32: faster, with 10 bits of mantissa. Off, because it
            leaves the tolerance within which runs on different hardware agree.
    """

    tf32: bool = False

    def build(self) -> CudaAccelerator:
        if not torch.cuda.is_available():
            raise ConfigError(
                "accelerator: cuda was asked for and torch finds no GPU; use accelerator=cpu, or install "
                "a driver and a CUDA build of torch (python -m torch.utils.collect_env tells more)"
            )
        if local_rank() >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank()} of this machine has no GPU: there are "
                f"{torch.cuda.device_count()}; start at most that many processes"
            )
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        return CudaAccelerator(local_rank())


class CudaAccelerator(Accelerator):
    collective_backend = "nccl"

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)

    @property
    def description(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def peak_flops(self, precision: Precision) -> float | None:
        if precision != "bf16":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((tflops * 1e12 for part, tflops in _BF16_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)

    def expected_flops(self, precision: Precision) -> float | None:
        peak = self.peak_flops(precision)
        return _EXPECTED_SHARE * peak if peak else None

    def memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)

    def reset_peak_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies from pinned memory, so that the host does not wait for the copy."""
        return super().to_device({name: tensor.pin_memory() for name, tensor in batch.items()})
