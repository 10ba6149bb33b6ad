"""Host memory for copies of device tensors, page-locked if that makes copies asynchronous."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def locked_by(tensors: Iterable[Tensor]) -> torch.device | None:
    """The device that page-locks memory for copies of these tensors; None for CPU tensors."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def reserve(size: int, device: torch.device | None) -> Tensor:
    """Allocates memory and touches its pages: bytes, uint8 [size].

    Args:
        size: number of bytes.
        device: the device that page-locks them, from `locked_by`.
    """
    # Zeroed, so that the system provides the pages now: it may overcommit memory.
    memory = torch.empty(size, dtype=torch.uint8).zero_()
    if device is not None and size:
        _lock(memory, device)
    return memory


def _lock(memory: Tensor, device: torch.device) -> None:
    """Page-locks memory until it is freed; if the system refuses, copies just are not asynchronous.

    torch's own page-locked memory (`pin_memory`) takes the next power of two: 16 GB for 9.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # A new thread's current device is GPU 0, and page-locking would allocate memory on it.
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            weakref.finalize(
                memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr()
            )
        else:
            # The error would be taken for one of this thread's next kernel. torch has no call that
            # forgets it, but the check after each launch does.
            with suppress(RuntimeError):
                torch.ones(1, device=device)


def computed(tensors: Iterable[Tensor]) -> torch.cuda.Event | None:
    """The point in the device's queue of work after which these have their values; None: now."""
    device = locked_by(tensors)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def copy(tensors: Iterable[Tensor], memory: Tensor, after: torch.cuda.Event | None = None) -> None:
    """Copies tensors into `memory`, one after the other; returns when all are copied.

    Args:
        after: from `computed`. Copies wait for it, and not for work that is queued later.
    """
    if after is None:
        _copy(tensors, memory, locked=False)
        return
    stream = torch.cuda.Stream(after.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        _copy(tensors, memory, locked=memory.is_pinned())
    stream.synchronize()


def _copy(tensors: Iterable[Tensor], memory: Tensor, locked: bool) -> None:
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        view = memory[start:stop].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor, non_blocking=locked)
        start = stop
