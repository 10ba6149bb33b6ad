"""Host memory for copies of device tensors, page-locked if that makes copies asynchronous."""

from __future__ import annotations

from collections.abc import Iterable

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
    # A new thread's current device is GPU 0, and page-locking would allocate memory on it. Device
    # -1 changes nothing.
    with torch.cuda.device(-1 if device is None else device):
        # Zeroed, so that the system provides the pages now: it may overcommit memory.
        return torch.empty(size, dtype=torch.uint8, pin_memory=device is not None).zero_()


def copy(tensors: Iterable[Tensor], memory: Tensor) -> None:
    """Copies tensors into `memory`, one after the other; returns when all are copied."""
    locked, start = memory.is_pinned(), 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        view = memory[start:stop].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor, non_blocking=locked)
        start = stop
    if locked:
        torch.cuda.current_stream().synchronize()
