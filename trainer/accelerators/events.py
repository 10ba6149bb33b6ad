"""Events of PyTorch profiler traces: which are collectives, and which are computations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def on_device(event: Mapping[str, Any]) -> bool:
    """Whether the event is a kernel of a device, not an operation of the host."""
    return event.get("cat") == "kernel"


def is_collective(event: Mapping[str, Any]) -> bool:
    """Whether the event is a kernel of NCCL, or an annotation by one of gloo's threads."""
    prefix = {"kernel": "nccl", "user_annotation": "gloo:"}.get(event.get("cat", ""))
    return prefix is not None and event["name"].startswith(prefix)


def is_compute(event: Mapping[str, Any], devices: bool) -> bool:
    """Whether a device computes or copies during the event.

    Args:
        event: of the trace.
        devices: whether the trace has kernels of devices. If not, the host's operations count.
    """
    if devices:
        work = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        return work and not is_collective(event)
    return event.get("cat") == "cpu_op" and event["name"].startswith("aten::")
