"""Downloaded shards on the local disk: a folder of bounded size that the processes of a node share.

A file is named by the SHA-256 of its content, so a shard of another dataset, or of an earlier build
at the same address, is never taken for the right one. Locks are `flock`s on the files themselves:
the system drops them with the process that holds them, however it ends, so a killed one leaves
nothing that others wait for.

    HASH.tar      A complete shard. It is verified when it arrives and whenever it is opened.
                  Readers hold a shared lock (a memory map keeps the lock of its file); removing it
                  takes an exclusive lock, unless it is damaged.
    HASH.partial  A shard that is being downloaded, under an exclusive lock. It has its final size
                  from the start, which reserves the space. Without a lock, it was left by a process
                  that died, and is removed.
    room.lock     Held while shards are evicted, and while a file gets its final name.
"""

from __future__ import annotations

import errno
import fcntl
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

from trainer import storage
from trainer.config.sizes import parse_size
from trainer.errors import DataError

logger = logging.getLogger(__name__)

DEFAULT_SIZE = "100GB"

_ROOM = "room.lock"
_ASK_AGAIN = 0.02  # seconds
_TRIES = 2  # of a shard that the disk damages


def default_folder() -> Path:
    """Where downloads are kept unless a setting says otherwise.

    SAMESTEP_CACHE, or ~/.cache/samestep.
    """
    return Path(os.environ.get("SAMESTEP_CACHE") or "~/.cache/samestep").expanduser()


class _File(NamedTuple):
    used: int  # when, in ns
    bytes: int
    path: Path


@dataclass(frozen=True)
class ShardCache:
    """Downloaded shards.

    Attributes:
        folder: where they are kept.
        limit: bytes they may take together. Only shards that are all in use at a time may exceed
            it.
    """

    folder: Path
    limit: int

    @classmethod
    def open_folder(cls, folder: str | None = None, size: str = DEFAULT_SIZE) -> ShardCache:
        """The cache in `folder`, by default `default_folder()`, of a size such as "100GB".

        Raises:
            ConfigError: the size is none.
        """
        root = Path(folder).expanduser() if folder else default_folder()
        return cls(root / "shards", parse_size(size, "data.cache_size"))

    @property
    def capacity(self) -> int:
        """Bytes that shards can take: the limit, or what the disk has for them if that is less.

        Raises:
            DataError: the folder cannot be read.
        """
        with self.failure_explained():
            return min(
                self.limit,
                sum(file.bytes for file in self._files()) + shutil.disk_usage(self.folder).free,
            )

    def prepare(self) -> None:
        """Makes the folder.

        Raises:
            DataError: that, or writing or locking files in it, is impossible.
        """
        with self.failure_explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / _ROOM):
                pass

    def open(self, url: str, sha256: str, size: int) -> BinaryIO:
        """Opens a shard, downloaded first if it is not here, or if the disk has damaged it since.

        It stays here until the file and its maps are closed.

        Args:
            url: where it comes from.
            sha256: of its bytes.
            size: in bytes.

        Raises:
            DataError: it cannot be downloaded, or not kept.
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
                fcntl.flock(file, fcntl.LOCK_SH)
                if os.fstat(file.fileno()).st_nlink:  # or it was removed before it was locked
                    if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                        os.utime(path)
                        file.seek(0)
                        return file
                    damaged += 1
                    logger.warning("%s was damaged on this disk; it is downloaded again", path)
                    if _is_at(file, path):
                        path.unlink(
                            missing_ok=True
                        )  # whoever maps it keeps what was whole when it was opened
                file.close()
        raise DataError(
            f"{path} was damaged on this disk {damaged} times in a row; set data.cache to a folder "
            "of another"
        )

    def fetch(self, url: str, sha256: str, size: int) -> None:
        """Downloads a shard before it is needed, or if it is here, marks it as used.

        Raises:
            DataError: it cannot be downloaded, or only by exceeding the limit.
        """
        if not self.touch(sha256):
            with self.failure_explained():
                self._download(url, self.folder / f"{sha256}.tar", sha256, size, needed=False)

    def touch(self, sha256: str) -> bool:
        """Marks a shard as used, so that it is kept for longer; whether it is here.

        Raises:
            DataError: the disk refuses.
        """
        with self.failure_explained():
            try:
                os.utime(self.folder / f"{sha256}.tar")
            except FileNotFoundError:
                return False
        return True

    def _download(self, url: str, path: Path, sha256: str, size: int, needed: bool) -> None:
        """Moves a shard into the cache, unless another thread or process has done so meanwhile."""
        partial = path.with_suffix(".partial")
        with locked(partial) as file:
            try:
                if path.exists():
                    partial.unlink()
                    return
                file.truncate(0)  # what a process that died has left
                self._reserve(file, size, needed)
                storage.download(url, file, size, sha256)
                file.flush()
                os.fsync(
                    file.fileno()
                )  # a power cut must not leave a hole under the name of a verified shard
                with locked(
                    self.folder / _ROOM
                ):  # who counts the files must find it under one name or the other
                    partial.rename(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def _reserve(self, file: BinaryIO, size: int, needed: bool) -> None:
        """Gives a partial file its final size, once shards that nobody has used for longest have
        made room for it.

        Where all others are in use, one that is `needed` exceeds the limit and one that is not is
        refused.
        """
        with locked(self.folder / _ROOM):
            files = [f for f in self._files() if f.path.suffix != ".partial" or not _remove(f.path)]
            taken = sum(f.bytes for f in files)
            for candidate in sorted(f for f in files if f.path.suffix == ".tar"):
                if taken + size <= self.limit and size <= shutil.disk_usage(self.folder).free:
                    break
                if _remove(candidate.path):
                    taken -= candidate.bytes
            if taken + size > self.limit and not needed:
                raise DataError(f"{self.folder} has no room for shards that are not needed yet")
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)

    def _files(self) -> Iterator[_File]:
        for path in self.folder.iterdir():
            try:
                stat = path.stat()
            except FileNotFoundError:  # a download ended meanwhile
                continue
            yield _File(stat.st_mtime_ns, stat.st_size, path)

    @contextmanager
    def failure_explained(self) -> Iterator[None]:
        """Turns an error of the local disk into a DataError that names the folder and the fix."""
        try:
            yield
        except OSError as error:
            fix = "set data.cache (or SAMESTEP_CACHE) to a local folder that this user may write to"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                fix = "all its shards are in use: free space, or set data.cache to a larger disk"
            elif error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                fix = (
                    "its file system has no file locks: set data.cache to a folder of a local disk"
                )
            elif error.errno in (errno.EMFILE, errno.ENFILE):
                fix = "raise the limit of open files with ulimit -n"
            raise DataError(
                f"cannot keep shards in {self.folder}: {error.strerror or error}; {fix}"
            ) from error


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Opens a file, new if there is none, under an exclusive lock.

    It asks again and again: who waits in the system for a partial file would still wait for it when
    it has become a whole one, which is locked for as long as it is in use.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        with file:
            if _try_lock(file) and _is_at(
                file, path
            ):  # not renamed or removed by who held the lock before
                try:
                    yield file
                finally:
                    fcntl.flock(
                        file, fcntl.LOCK_UN
                    )  # closing would leave it to a process forked in the meantime
                return
        time.sleep(_ASK_AGAIN)


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> bool:
    """Removes a file unless it is in use; whether it is gone."""
    try:
        with path.open("rb") as file:
            if not _try_lock(file) or not _is_at(
                file, path
            ):  # a download that has ended has another name
                return False
            path.unlink()
    except FileNotFoundError:
        pass
    return True
