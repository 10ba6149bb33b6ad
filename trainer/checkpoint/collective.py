"""Collective error handling: if one rank fails, all ranks raise, so none waits for it in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from trainer.errors import CheckpointError

T = TypeVar("T")


def gather(item: T, world_size: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns every rank's item, on every rank.

    Args:
        group: all ranks; None: the default group.
    """
    if world_size == 1:
        return [item]
    items = [item] * world_size  # placeholders
    dist.all_gather_object(items, item, group)
    return items


def first_error(error: str | None, world_size: int) -> str | None:
    """Returns the message of the first rank that has one, on all ranks; None if none has."""
    return next((text for text in gather(error, world_size) if text is not None), None)


def raise_error_on_all_ranks(error: Exception | None, world_size: int) -> None:
    """Raises on all ranks if any rank has an error.

    Raises:
        CheckpointError: with the message of the first rank that has an error.
    """
    problem = first_error(None if error is None else str(error), world_size)
    if problem is not None:
        raise CheckpointError(problem) from error


@contextmanager
def raise_on_all_ranks(world_size: int) -> Iterator[None]:
    """Raises on all ranks after the block if it has failed on any. Also acts as a barrier."""
    error = None
    try:
        yield
    except CheckpointError as failure:
        error = failure
    raise_error_on_all_ranks(error, world_size)
