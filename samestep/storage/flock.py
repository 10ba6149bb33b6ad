"""Locks of open files, which end with the process; none on systems that are not POSIX."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, BinaryIO

from samestep.errors import ConfigError

try:
    import fcntl
except ImportError:  # nothing keeps two processes of such a system from one folder
    LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN = 1, 2, 4, 8

    def flock(file: IO[bytes] | IO[str] | int, how: int) -> None:
        """Does nothing."""
else:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN

    def flock(file: IO[bytes] | IO[str] | int, how: int) -> None:
        """`fcntl.flock`.

        Raises:
            BlockingIOError: another process holds the lock, and `how` has LOCK_NB.
            OSError: the file system has no locks.
        """
        fcntl.flock(file, how)


def open_lock(path: Path) -> BinaryIO:
    """Opens the file of a lock in a folder that may be a stranger's; creates it if missing.

    Raises:
        OSError: it cannot be opened, or is a link, by which another file would be changed, or a
            FIFO, which would block.
    """
    return open(path, "ab", opener=_open)


def _open(path: str, flags: int) -> int:
    for name in ("O_NOFOLLOW", "O_NONBLOCK"):  # not on Windows
        flags |= getattr(os, name, 0)
    return os.open(path, flags, 0o666)


def lock_or_reject(file: IO[bytes], message: str) -> None:
    """Locks a file for this process until it ends or the file is closed.

    Raises:
        ConfigError: with the message, if another process holds the lock; or the file system has
            no locks.
    """
    # The lock ends with the process, so one that was killed does not block the next.
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(message) from error
    except OSError as error:
        raise ConfigError(
            f"{file.name} cannot be locked ({error.strerror}). Choose a folder on a file system "
            "with file locks."
        ) from error


__all__ = ["LOCK_EX", "LOCK_NB", "LOCK_SH", "LOCK_UN", "flock", "lock_or_reject", "open_lock"]
