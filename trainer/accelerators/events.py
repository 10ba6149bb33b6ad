"""Events of the PyTorch profiler: which of them are collectives, and which are computations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def on_device(event: Mapping[str, Any]) -> bool:
    """Whether the event is a kernel of a device, rather than something that the host does."""
    return event.get("cat") == "kernel"


def is_collective(event: Mapping[str, Any]) -> bool:
    """NCCL's kernels, and the annotations of gloo's threads."""
    name, kind = event["name"], event.get("cat")
    return (kind == "kernel" and name.startswith("nccl")) or (
        kind == "user_annotation" and name.startswith("gloo:")
    )


def is_compute(event: Mapping[str, Any], devices: bool) -> bool:
    """Whether a device computes or copies.

    Args:
        event: of the trace.
        devices: whether the trace has kernels of devices; if not, the host's operations count.
    """
    if devices:
        return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and not is_collective(
            event
        )
    return event.get("cat") == "cpu_op" and event["name"].startswith("aten::")
