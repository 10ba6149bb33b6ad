"""The processes of one command, which share a folder that no other command may write."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import ConfigError
from samestep.storage import flock
from trainer.strategies.world import World

_JOIN_SECONDS = 300.0  # for all processes to start
_POLL_SECONDS = 0.05


@contextmanager
def processes() -> Iterator[World]:
    """Joins the processes that a launcher has started. If one fails, the others end."""
    world = World.start(_JOIN_SECONDS)
    try:
        if world.store is not None:
            world.connect("gloo")
        yield world
        meet(world, "end")  # `close` alone would only wait as long as for the start
        if world.store is not None:
            world.close()
    except BaseException as error:
        world.failed(error)
        raise


def meet(world: World, place: str) -> None:
    """Waits for all processes, however long their work takes.

    Args:
        place: a name that is used once.
    """
    if world.store is None:
        return
    world.store.add(place, 1)
    # A collective would have a time-out. If a process fails, `World` ends this one.
    while world.store.add(place, 0) < world.size:
        time.sleep(_POLL_SECONDS)


@contextmanager
def alone(folder: Path, world: World) -> Iterator[None]:
    """Keeps other jobs from writing a folder, until all processes of this one are done with it.

    The lock ends with the process, so a job that was killed does not block the next one.

    Raises:
        ConfigError: another job writes it, or its lock is no file.
    """
    if world.rank == 0:
        with _locked(folder):
            meet(world, "locked")
            yield
            meet(world, "written")
    else:
        meet(world, "locked")
        yield
        meet(world, "written")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / ".lock"
    try:
        opened = flock.open_lock(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}. Remove it.") from error
    busy = f"another job writes {folder}. Wait for it, or choose another --output."
    with opened as file:
        flock.lock_or_reject(file, busy)
        # The other job may have ended, and removed the file, after it was opened here.
        if os.fstat(file.fileno()).st_nlink == 0:
            raise ConfigError(busy)
        yield
        path.unlink(missing_ok=True)
