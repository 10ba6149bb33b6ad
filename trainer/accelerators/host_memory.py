"""Host memory for copies of tensors on a device, page-locked where that makes them asynchronous."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def locked_by(tensors: Iterable[Tensor]) -> torch.device | None:
    """The device that page-locks memory for copies of these tensors.

    None if none of them has to.
    """
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def reserve(size: int, device: torch.device | None) -> Tensor:
    """Allocates bytes, uint8 [size], whose pages are there, not just promised.

    Args:
        size: their number.
        device: what page-locks them, as of `locked_by`.
    """
    with torch.cuda.device(
        -1 if device is None else device
    ):  # -1 changes nothing; threads start on the first GPU
        return torch.empty(size, dtype=torch.uint8, pin_memory=device is not None).zero_()


def copy(tensors: Iterable[Tensor], memory: Tensor) -> None:
    """Copies tensors into the bytes of `reserve`, one after the other; waits for the last."""
    locked, start = memory.is_pinned(), 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        view = memory[start:stop].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor, non_blocking=locked)
        start = stop
    if locked:
        torch.cuda.current_stream().synchronize()
