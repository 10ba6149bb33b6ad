"""Every operation of checkpoints on files: nothing else in this package opens, renames or deletes.

A checkpoint lies in a folder of a file system (a `Path`) or in an object store (a `Url`). A write
is atomic in both, and durable: the name appears once all bytes are there, and never with some of
them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from trainer import storage
from trainer.errors import CheckpointError
from trainer.storage import Digest, keeper

THREADS = 8  # an object store answers each of many requests as fast as one
_LOCAL_POLL_SECONDS = 0.05
_REMOTE_POLL_SECONDS = 0.5
_BLOCK_BYTES = 2**18  # takes an object store about as long as a byte
_BLOCKS_KEPT = 8  # of a file
_PART_BYTES = (
    2**25
)  # of a large range; several parts at a time are faster than one, and cheaper to ask for again


@dataclass(frozen=True)
class Url:
    """The address of an object or of a folder of objects, with what is used here of the methods of
    a `Path`.
    """

    url: str

    def __str__(self) -> str:
        return storage.shown(self.url)

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> Url:
        return self.parent / name

    def exists(self) -> bool:
        return storage.exists(self.url)

    def open(self, _mode: str) -> BufferedReader:
        return storage.open(self.url)


Location: TypeAlias = Path | Url


def location(path: str | Location) -> Location:
    """Where a path or an address points to.

    Raises:
        ConfigError: an address of an unknown kind.
    """
    if isinstance(path, str) and storage.is_url(path):
        return Url(path.rstrip("/"))
    return Path(path) if isinstance(path, str) else path


def write(path: Location, *parts: bytes | memoryview) -> Digest:
    """Writes the parts one after the other as one file, hashing on the way.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written, ...; the name does not
            exist then, or still has its former content.
    """
    if isinstance(path, Url):
        return storage.write(path.url, *parts)
    with storage.atomic_write(path) as file:
        return storage.copy(storage.chunks(parts), file)


def read(path: Location) -> bytes:
    """The whole content of a small file.

    Raises:
        CheckpointError: it cannot be read.
    """
    if isinstance(path, Url):
        return storage.read(path.url)
    with _explained("read", path), path.open("rb") as file:
        return file.read()


def digest(path: Location) -> Digest:
    """Reads a file through, whatever its size.

    Raises:
        CheckpointError: it cannot be read.
    """
    with _explained("read", path), path.open("rb") as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest(), file.tell())


def size(path: Location) -> int:
    """The number of bytes in a file.

    Raises:
        CheckpointError: it does not exist.
    """
    if isinstance(path, Url):
        return storage.size(path.url)
    with _explained("read", path):
        return path.stat().st_size


def open_bytes(path: Location) -> Callable[[int, int], Tensor]:
    """A file as a function from (start, stop) to its bytes, uint8, which reads little more than is
    asked for.
    """
    if isinstance(path, Url):
        return _Ranges(path.url)
    with _explained("read", path):
        content = torch.from_file(
            str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
        )
    return lambda start, stop: content[start:stop]


class _Ranges:
    """Ranges of an object.

    Small ones, such as biases that lie side by side, come out of blocks that are kept.
    """

    def __init__(self, url: str) -> None:
        size = storage.size(url)
        self._url = url
        self._lock = Lock()
        self._block = lru_cache(_BLOCKS_KEPT)(
            lambda start: storage.read_range(url, start, min(start + _BLOCK_BYTES, size))
        )

    def __call__(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        if stop - start >= _BLOCK_BYTES:
            content = self._read_parts(start, stop)
        else:
            first = start - start % _BLOCK_BYTES
            with (
                self._lock
            ):  # threads that want the same block wait for it, rather than all read it
                blocks = b"".join(self._block(begin) for begin in range(first, stop, _BLOCK_BYTES))
            content = bytearray(blocks[start - first : stop - first])
        return torch.frombuffer(content, dtype=torch.uint8)

    def _read_parts(self, start: int, stop: int) -> bytearray:
        content = bytearray(stop - start)

        def read_part(begin: int) -> None:
            end = min(begin + _PART_BYTES, stop)
            content[begin - start : end - start] = storage.read_range(self._url, begin, end)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read_part, range(start, stop, _PART_BYTES)))
        return content


def names(folder: Location) -> list[str]:
    """What a folder holds, sorted; nothing if there is no such folder."""
    if isinstance(folder, Url):
        return storage.names(folder.url)
    with _explained("read", folder):
        return sorted(os.listdir(folder)) if folder.exists() else []


def appears(path: Location, seconds: float) -> bool:
    """Whether a file that another node has made is there, within so many seconds."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        wait_a_little(path)
    return True


def folder_appears(folder: Location, seconds: float) -> bool:
    """Whether a folder that another node has made is there, within so many seconds.

    Stores need no folders.
    """
    return isinstance(folder, Url) or appears(folder, seconds)


def wait_a_little(path: Location) -> None:
    """Sleeps until it is worth while to look again whether something has appeared."""
    far = isinstance(path, Url) and not keeper.is_keeper_url(path.url)
    time.sleep(_REMOTE_POLL_SECONDS if far else _LOCAL_POLL_SECONDS)


def make_folder(folder: Location) -> None:
    """Makes a folder that this process can write in, with its parents.

    Raises:
        CheckpointError: naming the folder and the reason.
    """
    if isinstance(folder, Url):
        return
    with _explained("write in", folder):
        storage.make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")


def remove(path: Location) -> None:
    """Removes a file, if it exists."""
    if isinstance(path, Url):
        storage.remove(path.url)
    else:
        with _explained("remove", path):
            path.unlink(missing_ok=True)


def remove_folder(folder: Location, first: str) -> None:
    """Removes a folder and all that it holds.

    Nothing else is gone before the file named `first` is, for good.
    """
    remove(folder / first)
    if isinstance(folder, Url):
        storage.remove_folder(folder.url)
    else:
        with _explained("remove", folder):
            storage.sync_folder(folder)
            shutil.rmtree(folder)
            storage.sync_folder(folder.parent)


def copy_folder(source: Location, target: Location) -> None:
    """Copies the files of a small folder, but not folders in it."""
    for name in names(source):
        write(target / name, read(source / name))


@contextmanager
def on_disk(folder: Location) -> Iterator[Path]:
    """A small folder as one of this machine: itself, or a temporary copy.

    Raises:
        CheckpointError: it cannot be read.
    """
    if isinstance(folder, Path):
        yield folder
    else:
        with TemporaryDirectory(prefix="samestep-") as copy:
            if not names(folder):
                raise CheckpointError(
                    f"there is nothing in {folder}; copy the folder of that name of the run there"
                )
            copy_folder(folder, Path(copy))
            yield Path(copy)


@contextmanager
def _explained(action: str, path: Location) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = {
            errno.ENOSPC: "free some space, or keep fewer checkpoints (keep_last, keep_every)",
            errno.EDQUOT: "raise the quota, or keep fewer checkpoints (keep_last, keep_every)",
            errno.ENOENT: "something has removed it: see what else uses this folder",
        }.get(
            error.errno or 0,
            "check that the folder exists, is writable and its disk works, or name another one",
        )
        raise CheckpointError(
            f"cannot {action} {path}: {error.strerror or error}; {fix}"
        ) from error
