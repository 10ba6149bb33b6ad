"""The cache of downloaded shards: a local folder of bounded size, shared by a node's processes.

Files are named by the SHA-256 of their content, so a shard of another dataset, or of an earlier
build at the same URL, is never used by mistake. Locks are `flock`s on the files themselves: the
system releases them however a process ends, so nobody waits for a killed one.

    HASH.tar      A complete shard, verified when it arrives and whenever it is opened. Readers
                  hold a shared lock (a memory map keeps its file's lock); removing it takes an
                  exclusive lock, unless it is damaged.
    HASH.partial  A shard being downloaded, under an exclusive lock. It has its final size from the
                  start, which reserves the space. Without a lock, its process has died, and it is
                  removed.
    room.lock     Held while shards are evicted, and while a file gets its final name.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data_pipeline.reading import DEFAULT_CACHE
from samestep.config import parse_size
from samestep.environment import expand_home
from samestep.errors import DataError, fix_of
from samestep.storage import flock, objects

logger = logging.getLogger(__name__)

_ROOM = "room.lock"
_POLL_SECONDS = 0.02
_TRIES = 2  # downloads of a shard that the disk damages

_FULL = "All its shards are in use: free space, or set data.cache to a larger disk"
_NO_LOCKS = "Its file system has no file locks: set data.cache to a folder on a local disk"
_FIXES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENOLCK: _NO_LOCKS,
    errno.EOPNOTSUPP: _NO_LOCKS,
}


def default_folder() -> Path:
    """The default folder for downloads: SAMESTEP_CACHE, or ~/.cache/samestep.

    Raises:
        ConfigError: there is no home folder.
    """
    return expand_home(os.environ.get("SAMESTEP_CACHE") or "~/.cache/samestep", "SAMESTEP_CACHE")


class _File(NamedTuple):
    used: int  # modification time, in ns
    bytes: int
    path: Path


@dataclass(frozen=True)
class ShardCache:
    """Downloaded shards.

    Attributes:
        limit: maximum bytes; only shards that are in use at the same time may exceed it.
    """

    folder: Path
    limit: int

    @classmethod
    def open_folder(cls, folder: str | None = None, size: str = DEFAULT_CACHE) -> ShardCache:
        """The cache in `folder`, by default `default_folder()`, of a size such as "100GB".

        Raises:
            ConfigError: the size cannot be parsed, or there is no home folder.
        """
        root = expand_home(folder, "data.cache") if folder else default_folder()
        return cls(root / "shards", parse_size(size, "data.cache_size"))

    @property
    def capacity(self) -> int:
        """Bytes available for shards: the limit, or less if the disk is smaller.

        Raises:
            DataError: the folder cannot be read.
        """
        with self.failure_explained():
            return min(
                self.limit,
                sum(file.bytes for file in self._files()) + shutil.disk_usage(self.folder).free,
            )

    def prepare(self) -> None:
        """Creates the folder.

        Raises:
            DataError: files in it cannot be created, written or locked.
        """
        with self.failure_explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / _ROOM):
                pass

    def open(self, url: str, sha256: str, size: int) -> BinaryIO:
        """Opens a shard, after downloading it if it is missing or damaged.

        It cannot be evicted until the file and its maps are closed.

        Raises:
            DataError: it cannot be downloaded or stored.
        """
        path = self.folder / f"{sha256}.tar"
        damaged = 0
        with self.failure_explained():
            while damaged < _TRIES:
                try:
                    file = path.open("rb")
                except FileNotFoundError:
                    self._download(url, path, sha256, size, needed=True)
                    continue
                flock.flock(file, flock.LOCK_SH)
                # Without links it was removed before it was locked: start over.
                if os.fstat(file.fileno()).st_nlink:
                    if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                        os.utime(path)
                        file.seek(0)
                        return file
                    damaged += 1
                    logger.warning("%s was damaged on this disk; downloading it again", path)
                    # Processes that map the file keep it; it was whole when they opened it.
                    if _is_at(file, path):
                        path.unlink(missing_ok=True)
                file.close()
        raise DataError(
            f"{path} was damaged on this disk {damaged} times in a row. Set data.cache to a folder "
            "on another disk."
        )

    def fetch(self, url: str, sha256: str, size: int) -> None:
        """Downloads a shard in advance, or marks it as used.

        Raises:
            DataError: it cannot be downloaded, or there is no room.
        """
        if not self.touch(sha256):
            with self.failure_explained():
                self._download(url, self.folder / f"{sha256}.tar", sha256, size, needed=False)

    def touch(self, sha256: str) -> bool:
        """Marks a shard as used; returns whether it is cached.

        Raises:
            DataError: the disk fails.
        """
        with self.failure_explained():
            try:
                os.utime(self.folder / f"{sha256}.tar")
            except FileNotFoundError:
                return False
        return True

    def _download(self, url: str, path: Path, sha256: str, size: int, needed: bool) -> None:
        """Downloads a shard, unless another thread or process has done so meanwhile."""
        partial = path.with_suffix(".partial")
        with locked(partial) as file:
            try:
                if path.exists():
                    partial.unlink()
                    return
                file.truncate(0)  # a process that died may have left something
                self._reserve(file, size, needed)
                objects.download(url, file, size, sha256)
                file.flush()
                # A power cut must not leave a hole under the name of a verified shard.
                os.fsync(file.fileno())
                # Whoever counts the files must see it under exactly one name.
                with locked(self.folder / _ROOM):
                    partial.rename(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def _reserve(self, file: BinaryIO, size: int, needed: bool) -> None:
        """Evicts the least recently used shards, and gives a partial file its final size.

        If all other shards are in use, a `needed` one may exceed the limit; others are rejected.
        """
        with locked(self.folder / _ROOM):
            files = [f for f in self._files() if f.path.suffix != ".partial" or not _remove(f.path)]
            taken = sum(f.bytes for f in files)
            # The least recently used first: a file's modification time is set on every use.
            for candidate in sorted(f for f in files if f.path.suffix == ".tar"):
                if taken + size <= self.limit and size <= shutil.disk_usage(self.folder).free:
                    break
                if _remove(candidate.path):
                    taken -= candidate.bytes
            if taken + size > self.limit and not needed:
                raise DataError(f"{self.folder} has no room to download shards in advance")
            # Allocating now turns a full disk into an error here, not in a write later.
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)

    def _files(self) -> Iterator[_File]:
        for path in self.folder.iterdir():
            try:
                stat = path.stat()
            except FileNotFoundError:  # a download has ended meanwhile
                continue
            yield _File(stat.st_mtime_ns, stat.st_size, path)

    @contextmanager
    def failure_explained(self) -> Iterator[None]:
        """Converts errors of the local disk to a DataError with the folder and the fix."""
        try:
            yield
        except OSError as error:
            otherwise = "set data.cache (or SAMESTEP_CACHE) to a local folder that you can write to"
            fix = fix_of(error, otherwise)
            fix = _FIXES.get(error.errno or 0, f"{fix[0].upper()}{fix[1:]}")
            raise DataError(
                f"cannot store shards in {self.folder}: {error.strerror or error}. {fix}."
            ) from error


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Opens or creates a file under an exclusive lock.

    It polls instead of blocking: a process that blocks on a partial file would keep waiting after
    the rename, when readers lock it for as long as they use it.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        with file:
            # The previous holder may have renamed or removed the file.
            if _try_lock(file) and _is_at(file, path):
                try:
                    yield file
                finally:
                    # Closing alone would leave the lock to a process forked in the meantime.
                    flock.flock(file, flock.LOCK_UN)
                return
        time.sleep(_POLL_SECONDS)


def _try_lock(file: BinaryIO) -> bool:
    try:
        flock.flock(file, flock.LOCK_EX | flock.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> bool:
    """Removes a file unless it is in use; returns whether it is gone."""
    try:
        with path.open("rb") as file:
            # After a download has ended, its file has another name.
            if not _try_lock(file) or not _is_at(file, path):
                return False
            path.unlink()
    except FileNotFoundError:
        pass
    return True
