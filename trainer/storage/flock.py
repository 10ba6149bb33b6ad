"""Locks of open files, which end with the process; none on systems that are not POSIX."""

from __future__ import annotations

from typing import IO

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


__all__ = ["LOCK_EX", "LOCK_NB", "LOCK_SH", "LOCK_UN", "flock"]
