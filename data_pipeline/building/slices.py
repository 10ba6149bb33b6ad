"""Locks on a dataset's folder: one whole build writes it, or several slices of one build.

A slice is one of N shares of a build's units. Slices may run at the same time on several machines
that share the folder. Locks on files in `DIR/.build` keep builds apart:

- `door` is held for a moment by a whole build or slice that begins or ends, so only one does so at
    a time;
- `lock` is held while units are built: exclusively by a whole build, shared by slices. Its content
    is the digest of their build, so slices of another build stay out;
- `slice-3-of-8` is held by this slice, so it does not run twice at once.

Exactly one slice merges. A slice that ends releases its share of `lock` behind the door and then
asks for the exclusive lock. If that is refused, somebody is at work, who comes to the door later
and sees all outcomes that this slice sees. If it is granted, nobody is at work, and nobody can
begin before the door opens, so the outcomes do not change while it reads them. When slices finish
at the same moment, the last one through the door therefore finds the outcomes of all. A slice that
is killed before it gets there has failed, and merges when it is run again.

For example, slice 1 of 2 ends while slice 2 is at work: slice 1 gets no exclusive lock and leaves.
Slice 2 ends, gets it, finds all units, and merges.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_pipeline.format.manifest import MANIFEST
from samestep.errors import ConfigError, DataError, fix_of
from samestep.storage import flock

logger = logging.getLogger(__name__)

_FORM = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)
_ATTEMPTS = 10  # to open the door


@dataclass(frozen=True)
class Slice:
    """One of `count` equal shares of the units of a build; `index` counts from 1, as job arrays."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Reads "3/8".

        Raises:
            ConfigError: it is something else.
        """
        match = _FORM.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"--slice is {text!r}. It takes I/N, the I-th of N slices with I from 1 to N, such "
                "as 3/8."
            )
        return cls(int(match[1]), int(match[2]))

    def has(self, unit: int) -> bool:
        """Whether the slice builds the unit of this index.

        Units are dealt out in turn. They are about equal in size, and so are slices.
        """
        return unit % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class Claim:
    """The right to write a dataset's folder; a context manager that releases it."""

    def __init__(self, folder: Path, part: Slice | None) -> None:
        """`part` is the slice to build; None means a whole build."""
        self._folder, self._part = folder, part
        self._locks = folder / ".build"
        self._held = ExitStack()
        self._stays = False
        self._is_lockable = True

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        # NFS keeps a removed file in its folder, under another name, for as long as it is open. So
        # the folder can be removed only now.
        with suppress(OSError):  # it is gone already, or not empty
            self._locks.rmdir()

    @contextmanager
    def door(self) -> Iterator[None]:
        """Waits until nobody else begins or ends, and keeps it that way.

        Raises:
            DataError: the folder holds something else, or it cannot be written or, for a slice,
                locked.
        """
        while True:
            with self._open_door() as file:
                self._lock(file, flock.LOCK_EX)
                # A build that ended meanwhile has removed this file. The next one to come makes
                # another, so a lock on this one keeps nobody out.
                if not _is_current(file):
                    continue
                self._stays = False
                try:
                    yield
                finally:
                    # Released before the door opens, or the next one would see somebody at work.
                    if not self._stays:
                        self._held.close()
                return

    def enter(self) -> bool:
        """Comes in, behind the door; returns whether nobody else is at work.

        Raises:
            DataError: another process builds the same slice, or the folder cannot be written or
                locked.
        """
        with self._explained():
            if self._part is not None:
                name = f"slice-{self._part.index}-of-{self._part.count}"
                own = self._held.enter_context(self._open(name))
                if not self._lock(own, flock.LOCK_EX | flock.LOCK_NB):
                    raise DataError(
                        f"slice {self._part} of {self._folder} is being built by another process. "
                        "Wait for it, or end it."
                    )
            self._file = self._held.enter_context(self._open("lock"))
        return self._lock(self._file, flock.LOCK_EX | flock.LOCK_NB)

    def stay(self, build: str, alone: bool) -> None:
        """Keeps the folder when the door opens, to build units.

        A slice shares it with other slices of the same build.

        Args:
            build: digest of the build.
            alone: result of `enter`. If true, the folder has this build's tokenizer by now.

        Raises:
            DataError: another build is at work, or the disk is full.
        """
        if alone:
            with self._explained():
                self._file.truncate(0)
                self._file.write(build.encode())
                os.fsync(self._file.fileno())
        # Between the exclusive lock and the shared one nobody can come: all wait at the door.
        is_free = alone
        if self._part is not None:
            is_free = self._lock(self._file, flock.LOCK_SH | flock.LOCK_NB)
        if not is_free:
            raise DataError(
                f"another build is writing {self._folder}. Wait for it, or choose another "
                "output=DIR."
            )
        self._file.seek(0)
        if self._file.read() != build.encode():
            raise DataError(
                "slices of another source, tokenizer or settings are being built in "
                f"{self._folder}. Wait for them, or choose another output=DIR."
            )
        self._stays = True

    def end(self) -> bool:
        """Ends the work, behind the door; returns whether nobody else is at work."""
        # Released first: on NFS, a refused request for more would leave the shared lock in place.
        flock.flock(self._file, flock.LOCK_UN)
        return self._lock(self._file, flock.LOCK_EX | flock.LOCK_NB)

    def _open_door(self) -> BinaryIO:
        for _ in range(_ATTEMPTS):
            with suppress(OSError):  # a build that ends may remove .build at this moment
                return self._open("door")
        with self._explained():
            return self._open("door")

    def _open(self, name: str) -> BinaryIO:
        self._check_free()
        self._locks.mkdir(parents=True, exist_ok=True)
        # For writing: NFS gives an exclusive lock to writers only.
        return (self._locks / name).open("a+b", buffering=0)

    def _check_free(self) -> None:
        # In this order: others make .build first, and remove it when the manifest is there.
        if (
            self._folder.exists()
            and any(self._folder.iterdir())
            and not self._locks.exists()
            and not (self._folder / MANIFEST).exists()
        ):
            raise DataError(
                f"{self._folder} is neither empty nor a dataset. Choose another folder with "
                "output=DIR."
            )

    def _lock(self, file: BinaryIO, how: int) -> bool:
        try:
            flock.flock(file, how)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems have no locks
            if self._part is not None:
                raise DataError(
                    f"{self._folder} cannot be locked ({error.strerror}), which slices need. "
                    "Choose an output=DIR where files can be locked, or build without --slice."
                ) from error
            if self._is_lockable:
                logger.warning(
                    "%s cannot be locked (%s). Let no other build write it.", self._folder, error
                )
            self._is_lockable = False
        return True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot write the dataset {self._folder}: {error.strerror}; "
                f"{fix_of(error, 'make its folder writable')}, or choose another output=DIR"
            ) from error


def _is_current(file: BinaryIO) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except OSError:
        return False
