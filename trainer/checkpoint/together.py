"""What ranks do together: a failure on one is everybody's, so that nobody waits for who has given
up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from trainer.errors import CheckpointError

T = TypeVar("T")


def gather(item: T, world_size: int) -> list[T]:
    """Every rank's item, on every rank."""
    if world_size == 1:
        return [item]
    items = [item] * world_size  # to be replaced
    dist.all_gather_object(items, item)
    return items


def raise_together(error: Exception | None, world_size: int) -> None:
    """Returns on all ranks, or raises on all if any has an error.

    Raises:
        CheckpointError: with the words of the first rank that has one.
    """
    problem = next(
        (text for text in gather(error and str(error), world_size) if text is not None), None
    )
    if problem is not None:
        raise CheckpointError(problem) from error


@contextmanager
def together(world_size: int) -> Iterator[None]:
    """A block after which all ranks raise if it has failed on any."""
    error = None
    try:
        yield
    except CheckpointError as failure:
        error = failure
    raise_together(error, world_size)
