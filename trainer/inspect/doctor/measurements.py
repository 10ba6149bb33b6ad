"""Matrix products and sums on devices: checked for exact results, and compared in speed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from samestep.findings import Finding
from trainer.accelerators import DTYPES, Accelerator, Precision

REDUCE_BYTES = 64 * 2**20
"""The size of the tensor that devices sum."""


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
