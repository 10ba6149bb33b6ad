"""Time of a kernel: the larger of its arithmetic and its memory traffic, plus its launch.

The roofline of Williams et al. 2009, with rates that kernels reach instead of peaks. The shares are
fixed here, from sources that have nothing to do with the runs that predictions are compared with
(docs/gpu.md); no share was fitted to a predicted run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from trainer.accelerators import Precision
from trainer.inspect.plan.datasheets import DataSheet
from trainer.inspect.plan.fusion import Implementation, Kernel
from trainer.inspect.plan.operators import Kind

# Shares of the peaks. Large bf16 products on an H100 take 60 to 64 % of 989 TFLOP/s under its power
# limit. Streaming kernels reach 3.0 of 3.35 TB/s.
PRODUCTS, MEMORY = 0.62, 3.0 / 3.35
# The fused kernel at 512 positions with heads of 64, measured on an H100: 264 and 184 of 989
# TFLOP/s forward and backward. Dropout adds 1.35 ps to a score in all three kernels, which would be
# 0.81 ps at the full integer rate.
ATTENTION_FORWARD, ATTENTION_BACKWARD, INTEGER = 264 / 989, 184 / 989, 0.81 / 1.35
# Assumptions: the time between two kernels of a stream, and what the host needs to enqueue one from
# Python. The host runs ahead, so only the larger of both queues counts.
GAP, ENQUEUE = 1.5e-6, 6e-6


class Rates(Protocol):
    """Rates that a device reaches."""

    @property
    def name(self) -> str:
        """The device."""

    def seconds(self, kernel: Kernel, precision: Precision, how: Implementation) -> float:
        """Time on the device, launch included."""

    @property
    def enqueue(self) -> float:
        """Seconds of the host for a launch."""

    def peak(self, precision: Precision) -> float:
        """Peak of matrix products in FLOP/s, for utilization."""


@dataclass(frozen=True)
class SheetRates:
    """A device by its data sheet and the shares above."""

    sheet: DataSheet

    @property
    def name(self) -> str:
        return self.sheet.name

    @property
    def enqueue(self) -> float:
        return 0.0 if self.sheet.compiles else ENQUEUE

    def peak(self, precision: Precision) -> float:
        return 1e12 * (self.sheet.fp32 if precision == "fp32" else self.sheet.tflops)

    def seconds(self, kernel: Kernel, precision: Precision, how: Implementation) -> float:
        # Of layers: attention, head and loss keep their 16 bits.
        in_fp8 = how.speedup > 1 and kernel.kind == "products"
        share = PRODUCTS * (how.speedup if in_fp8 else 1)
        if kernel.attends:
            share = ATTENTION_BACKWARD if kernel.backward else ATTENTION_FORWARD
        arithmetic = kernel.flops / (self.peak(precision) * share)
        # Masks are hashed on other units, but softmax and products wait for them.
        arithmetic += kernel.hashes / (self.sheet.integer * 1e12 * INTEGER)
        traffic = kernel.nbytes / (self.sheet.terabytes * 1e12 * MEMORY)
        gap = 0.0 if self.sheet.compiles else GAP
        seconds = max(arithmetic, traffic) + gap * kernel.launches
        if in_fp8:
            # A kernel before it reads the factors in 16 bits and writes them in 8.
            seconds += 1.5 * kernel.reads / (self.sheet.terabytes * 1e12 * MEMORY) + gap
        return seconds


@dataclass(frozen=True)
class Estimate:
    """Predicted time of some kernels on one device.

    Attributes:
        seconds: by class of operators.
        backward: seconds of the backward pass, of these.
        launches: number of kernels.
        waiting: seconds in which the device waits for the host's launches.
    """

    seconds: dict[Kind, float]
    backward: float
    launches: int
    waiting: float

    @property
    def total(self) -> float:
        """Seconds of all kernels."""
        return sum(self.seconds.values()) + self.waiting

    def __add__(self, other: Estimate) -> Estimate:
        kinds = self.seconds.keys() | other.seconds.keys()
        return Estimate(
            {kind: self.seconds.get(kind, 0.0) + other.seconds.get(kind, 0.0) for kind in kinds},
            self.backward + other.backward,
            self.launches + other.launches,
            self.waiting + other.waiting,
        )

    def __mul__(self, times: int) -> Estimate:
        return Estimate(
            {kind: times * each for kind, each in self.seconds.items()},
            times * self.backward,
            times * self.launches,
            times * self.waiting,
        )


def estimate(
    kernels: Iterable[Kernel], rates: Rates, precision: Precision, how: Implementation
) -> Estimate:
    """Predicts the time of kernels that run one after the other."""
    seconds: dict[Kind, float] = defaultdict(float)
    backward, launches = 0.0, 0
    for kernel in kernels:
        each = rates.seconds(kernel, precision, how)
        seconds[kernel.kind] += each
        backward += each * kernel.backward
        launches += kernel.launches
    waiting = max(0.0, launches * rates.enqueue - sum(seconds.values()))
    return Estimate(dict(seconds), backward, launches, waiting)
