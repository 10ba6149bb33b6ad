"""Assumptions of `samestep plan` about the devices of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Assumptions about each device.

    Attributes:
        tflops: peak, in 1e12 FLOP/s.
        utilization: share of the peak that training reaches.
        watts: power under load.
    """

    tflops: float
    utilization: float
    watts: float


H100 = Device(tflops=989.0, utilization=0.4, watts=700.0)
"""NVIDIA's data sheet of the H100 SXM, in bf16; 40 % is what large models reach with care."""

ALL = "all"
"""For `--throughput`: every device that has a data sheet."""
