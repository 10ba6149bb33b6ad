"""Who may write a dataset's folder.

One whole build, or the slices of one, at the same time and on several machines.

A slice is one of N shares of a build's units. Locks on files in `DIR/.build` keep builds apart:

- `door` is held for a moment by whoever begins or ends, whole build or slice, so that this happens
    one at a time;
- `lock` is held while units are made, by a whole build for itself and by slices in common. Its
  content is the digest of the build that they make, so that slices of another build stay out;
- `slice-3-of-8` is held by this slice, so that it does not run twice at once.

Exactly one slice merges. One that ends gives up its part of `lock` behind the door and then asks
for the whole of it. If that is refused, somebody is at work, who comes to the door later and sees
all that this one sees. If it is granted, nobody is at work or begins before the door opens, so it
can look at the outcomes in peace. Of slices that are done at the same moment, the last one through
the door therefore finds the outcomes of all. One that is killed before it gets there has failed,
and merges when it is run again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from data_pipeline.format.manifest import MANIFEST
from trainer.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_FORM = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Slice:
    """One of `count` equal shares of the units of a build.

    `index` counts from 1, as job arrays do.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Reads "3/8".

        Raises:
            ConfigError: it says something else.
        """
        match = _FORM.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                "--slice takes I/N, the I-th of N slices with I from 1 to N, such as 3/8; not "
                f"{text!r}"
            )
        return cls(int(match[1]), int(match[2]))

    def has(self, unit: int) -> bool:
        """Whether the slice makes the unit of this index.

        By turns: units are alike, and so slices are equal.
        """
        return unit % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class Claim:
    """The right to write a dataset's folder; a context manager that gives up what is still held."""

    def __init__(self, folder: Path, part: Slice | None) -> None:
        """`part` is the slice to be made; None means a whole build."""
        self._folder, self._part = folder, part
        self._mark = folder / ".build"
        self._held = ExitStack()
        self._stays = False
        self._is_lockable = True

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.close()
        # NFS keeps a removed file in its folder under another name for as long as it is open.
        with suppress(OSError):  # it is gone already, or not empty
            self._mark.rmdir()

    @contextmanager
    def door(self) -> Iterator[None]:
        """Waits until nobody else begins or ends, and sees to it that nobody does.

        Raises:
            DataError: the folder holds something else, or it cannot be written or, for a slice,
                locked.
        """
        while True:
            with self._open_door() as file:
                self._lock(file, fcntl.LOCK_EX)
                if not self._is_there(file):
                    continue  # a build has ended meanwhile and removed it: it keeps nobody out
                self._stays = False
                try:
                    yield
                finally:
                    # given up before the door opens: the next one shall not see somebody at work
                    if not self._stays:
                        self._held.close()
                return

    def enter(self) -> bool:
        """Comes in, behind the door; returns whether nobody else is at work.

        Raises:
            DataError: a process is at work on the same slice, or the folder cannot be written or
                locked.
        """
        try:
            if self._part is not None:
                own = self._held.enter_context(
                    self._open(f"slice-{self._part.index}-of-{self._part.count}")
                )
                if not self._lock(own, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    raise DataError(
                        f"slice {self._part} of {self._folder} is being built by another process; "
                        "wait for that one, "
                        f"or end it"
                    )
            self._file = self._held.enter_context(self._open("lock"))
        except OSError as error:
            raise self._unwritable(error) from error
        return self._lock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def stay(self, build: str, alone: bool) -> None:
        """Keeps the folder when the door opens, to make units.

        A slice together with others of the same build.

        Args:
            build: digest of the build.
            alone: what `enter` returned. If so, the folder has this build's tokenizer by now.

        Raises:
            DataError: those who are at work do not go with it, or the disk is full.
        """
        if alone:
            try:
                self._file.truncate(0)
                self._file.write(build.encode())
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._unwritable(error) from error
        # Nobody can come between the whole lock and the shared one, since all wait at the door.
        fits = (
            alone if self._part is None else self._lock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        )
        if not fits:
            raise DataError(
                f"another build is writing {self._folder}; wait for it, or choose another "
                "output=DIR"
            )
        self._file.seek(0)
        if self._file.read() != build.encode():
            raise DataError(
                "slices of another source, tokenizer or settings are being built in "
                f"{self._folder}; wait for them, or "
                f"choose another output=DIR"
            )
        self._stays = True

    def end(self) -> bool:
        """Says, behind the door, that the slice is made; returns whether nobody else is at work."""
        fcntl.flock(
            self._file, fcntl.LOCK_UN
        )  # on NFS, asking for more in vain would keep what there is
        return self._lock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _open_door(self) -> BinaryIO:
        for _ in range(10):
            try:
                self._check_free()
                return self._open("door")
            except (
                OSError
            ) as error:  # perhaps only since a build that ends has removed .build at this moment
                problem = error
        raise self._unwritable(problem) from problem

    def _check_free(self) -> None:
        # In this order: others make .build first, and remove it when the manifest is there.
        if (
            self._folder.exists()
            and any(self._folder.iterdir())
            and not self._mark.exists()
            and not (self._folder / MANIFEST).exists()
        ):
            raise DataError(
                f"{self._folder} is neither empty nor a dataset; choose another folder with "
                "output=DIR"
            )

    def _open(self, name: str) -> BinaryIO:
        self._mark.mkdir(parents=True, exist_ok=True)
        # NFS shares a lock among readers only, and gives the whole of it to writers only.
        return (self._mark / name).open("a+b", buffering=0)

    def _lock(self, file: BinaryIO, how: int) -> bool:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems have no locks
            if self._part is not None:
                raise DataError(
                    f"{self._folder} cannot be locked ({error.strerror}), which slices need; "
                    "choose an output=DIR "
                    f"where files can be locked, or build it in one process, without --slice"
                ) from error
            if self._is_lockable:
                logger.warning(
                    "%s cannot be locked (%s): let no other build write in it", self._folder, error
                )
            self._is_lockable = False
        return True

    def _is_there(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
        except OSError:
            return False

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"cannot write the dataset {self._folder}: {error.strerror}; choose another output=DIR"
        )
