"""Collective error handling: if one rank fails, all ranks raise, so none waits for it in vain."""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from samestep.errors import CheckpointError
from trainer.checkpoint import files
from trainer.checkpoint.files import Location

APPEAR_SECONDS = 60.0  # network file systems cache for so long that a name does not exist

_TOKEN = ".shared-"

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


def on_all_ranks(call: Callable[[], T], world_size: int) -> T:
    """Returns the result of a call; raises on all ranks if it has failed on any."""
    # A list, as a result may be None.
    results: list[T] = []
    with raise_on_all_ranks(world_size):
        results.append(call())
    return results[0]


def on_first_rank(call: Callable[[], T], rank: int, world_size: int) -> T:
    """Returns rank 0's result of a call on all ranks; raises on all if it has failed."""
    results: list[T] = []
    with raise_on_all_ranks(world_size):
        if rank == 0:
            results.append(call())
    return gather(results, world_size)[0][0]


def await_everywhere(path: Location, seconds: float, world_size: int) -> None:
    """Waits until all ranks see a file or folder that rank 0 has made.

    Raises:
        CheckpointError: with the nodes that do not see it.
    """
    seen = files.appears(path, min(seconds, APPEAR_SECONDS))
    nodes = set(gather(None if seen else platform.node(), world_size)) - {None}
    if nodes:
        raise CheckpointError(
            f"{', '.join(sorted(map(str, nodes)))} cannot see {path}, which rank 0 has made. "
            "Use an output folder on a file system that all nodes share, under the same path"
        )


def check_shared(folder: Location, rank: int, world_size: int, seconds: float) -> None:
    """Checks that rank 0 can write in a folder, and that all ranks see the file.

    Raises:
        CheckpointError: with the nodes that do not see it, or the reason of rank 0.
    """
    # A new name each time: network file systems cache that a name does not exist.
    token = folder / gather(f"{_TOKEN}{uuid.uuid4().hex}", world_size)[0]
    with raise_on_all_ranks(world_size):
        if rank == 0:
            files.make_folder(folder)
            for name in files.names(folder):
                if name.startswith(_TOKEN):  # of a process that was killed in here
                    files.remove(folder / name)
            files.write(token, b"")
    with raise_on_all_ranks(world_size):  # no rank continues before the file is gone
        try:
            await_everywhere(token, seconds, world_size)
        finally:
            if rank == 0:
                files.remove(token)


def await_names(folder: Location, seconds: float, world_size: int) -> bool:
    """Waits until all ranks see the files of a folder that rank 0 sees; whether any rank had to.

    A rank that waits in vain does not raise: it will find the file missing again.
    """
    if world_size == 1 or not isinstance(folder, Path):  # object stores show all that is there
        return False
    names: list[str] = []
    with raise_on_all_ranks(world_size):
        names = files.names(folder)
    late = [name for name in gather(names, world_size)[0] if not (folder / name).exists()]
    deadline = time.monotonic() + min(seconds, APPEAR_SECONDS)
    for name in late:
        files.appears(folder / name, deadline - time.monotonic())
    return any(gather(bool(late), world_size))
