"""Traces of PyTorch's profiler: the time in which devices communicate and compute."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TypedDict

import numpy as np


class Event(TypedDict, total=False):
    """An event of a Chrome trace with a duration; times in microseconds."""

    name: str
    cat: str
    ts: float
    dur: float


def communication(trace: Path) -> dict[str, float]:
    """Returns the metrics of `Profiler.end_step` for a trace; empty without a collective."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    # Events without a duration ("ph" other than X), such as counters, take no time.
    collectives = [event for event in events if _is_collective(event)]
    if not collectives:
        return {}
    devices = any(map(_on_device, events))
    computing = [event for event in events if _is_compute(event, devices)]
    # Sweep over the begins and ends of all events. Between two of them, the running sums count the
    # open collectives and computations: begins at 0 and 2 and ends at 3 and 5 give 1, 2, 1, 0.
    # Columns: the time, and the changes of the number of open collectives and computations.
    edges = [(event["ts"], 1, 0) for event in collectives]
    edges += [(event["ts"] + event["dur"], -1, 0) for event in collectives]
    edges += [(event["ts"], 0, 1) for event in computing]
    edges += [(event["ts"] + event["dur"], 0, -1) for event in computing]
    at, *changes = np.array(sorted(edges)).T
    lasts = np.diff(at)
    communicates, computes = np.cumsum(changes, axis=1)[:, :-1] > 0
    total = at[-1] - at[0]
    return {
        "time/communication": float(lasts[communicates].sum() / total),
        "time/communication_exposed": float(lasts[communicates & ~computes].sum() / total),
    }


def _on_device(event: Event) -> bool:
    """Whether the event is a kernel of a device, not an operation of the host."""
    return event.get("cat") == "kernel"


def _is_collective(event: Event) -> bool:
    """Whether the event is a kernel of NCCL, or an annotation by one of gloo's threads."""
    # NCCL runs as kernels of the device, and gloo in threads of the host.
    prefix = {"kernel": "nccl", "user_annotation": "gloo:"}.get(event.get("cat", ""))
    return prefix is not None and event["name"].startswith(prefix)


def _is_compute(event: Event, devices: bool) -> bool:
    """Whether a device computes or copies during the event.

    Args:
        event: of the trace.
        devices: whether the trace has kernels of devices. If not, the host's operations count.
    """
    if devices:
        work = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        return work and not _is_collective(event)
    return event.get("cat") == "cpu_op" and event["name"].startswith("aten::")
