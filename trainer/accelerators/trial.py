"""What `samestep doctor` checks on one device: that it is available, and matrix products."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import install_command
from samestep.findings import Finding
from trainer import accelerators
from trainer.accelerators import DTYPES, Accelerator, Precision, chips, detect, version_of
from trainer.accelerators.kinds import cpu, cuda

OWN_ENVIRONMENT = ("tpu",)
"""Extras of samestep that need another torch, and so an environment of their own."""

REDUCE_BYTES = 64 * 2**20
"""The size of the tensor that devices sum."""


def software() -> str:
    """The versions of PyTorch and of the packages that drive devices."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        build += f", NCCL {'.'.join(map(str, nccl))}"
    versions = f"torch {torch.__version__} ({build})"
    for package in ("torch-xla", "torch_tpu", "libtpu", "jax"):
        if version := version_of(package):
            versions += f", {package} {version}"
    return versions


def devices(wanted: accelerators.Config | None) -> Iterator[Finding]:
    """Reports the devices that a training run would use.

    Args:
        wanted: the experiment's accelerator; None: the best device.
    """
    if isinstance(wanted, cpu.Config):
        yield Finding("devices", "ok", "the CPU, as the experiment asks for it")
    elif torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = cuda.CudaAccelerator(index)
            major, minor = torch.cuda.get_device_capability(index)
            found = f"{gpu.description}, {gpu.memory() / 2**30:.0f} free, sm_{major}{minor}"
            yield Finding(f"device {index}", "ok", found)
    elif not isinstance(config := wanted or detect.best(), cpu.Config):
        # `build` raises the reason if the device is not available.
        yield Finding("devices", "ok", config.build().description)
    elif reason := cuda.unusable():
        yield Finding("devices", "failed", f"training would run on the CPU: {reason}")
    elif chips.count():
        found = "training would run on the CPU, although this machine has TPUs"
        fix = f"{install_command('tpu')}, in an environment of its own"
        yield Finding("devices", "failed", found, fix)
    else:
        yield Finding("devices", "ok", "no GPU: training would run on the CPU")


def exact() -> Tensor:
    """A matrix of -1, 0 and 1, [512, 128] in fp64, whose products are exact in every precision.

    Each element of a product is a sum of 128 such numbers, so no order of summation rounds it.
    """
    return ((7 * torch.arange(512).unsqueeze(1) + torch.arange(128) ** 2) % 3 - 1).double()


def product(accelerator: Accelerator, subject: str, precision: Precision) -> Iterator[Finding]:
    """Checks the result of a matrix product, and measures the FLOP/s of large ones."""
    dtype, factor = DTYPES[precision], exact()
    left = factor.to(accelerator.device, dtype)
    if not torch.equal((left @ left.T).double().cpu(), factor @ factor.T):
        found = "a matrix product has a wrong result"
        yield Finding(subject, "failed", found, "take this device out of use")
        return
    peak = accelerator.peak_flops(precision)
    size, seconds = (8192, 1.0) if peak else (1024, 0.2)
    # Random numbers: products of constants take less power, so that the clock stays higher.
    matrix = torch.randn(size, size, device=accelerator.device).mul_(size**-0.5).to(dtype)
    matrix @ matrix  # the first product is slower
    repeats, begin, started = 0, accelerator.mark(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        repeats += 1
    speed = repeats * 2 * size**3 / accelerator.seconds(begin, accelerator.mark())
    found = f"right result, {speed / 1e12:.3g} TFLOP/s in {precision}"
    fix = "see nvidia-smi -q for other processes, heat and power limits"
    yield compared(subject, found, speed, peak, fix)


def compared(subject: str, found: str, speed: float, peak: float | None, fix: str) -> Finding:
    """A finding about FLOP/s, compared with the peak of the data sheet if there is one."""
    if not peak:
        return Finding(subject, "ok", found)
    share = f"{speed / peak:.0%} of the data sheet's"
    if speed < 0.4 * peak:
        return Finding(subject, "warning", f"{found}: {share}", fix)
    return Finding(subject, "ok", f"{found}, {share}")


def reduced(who: str, right: bool, speed: float) -> Finding:
    """A finding about an all-reduce, with its bus bandwidth in bytes/s."""
    found = f"{who}: {speed / 1e9:.3g} GB/s"
    if right:
        return Finding("all-reduce", "ok", found)
    return Finding("all-reduce", "failed", f"{found}, and a wrong result")
