"""Every operation of checkpoints on a file system: nothing else in this package opens, renames or deletes.

A write is durable and atomic: the name appears once all bytes are on the disk, and never with some of them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.errors import CheckpointError

_CHUNK_BYTES = 16 * 2**20
_TEMPORARY = ".tmp"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Digest:
    """The content of a file, for telling whether it is still the one that was written."""

    sha256: str
    bytes: int


def write(path: Path, *parts: bytes | memoryview) -> Digest:
    """Writes the parts one after the other as one file, hashing on the way.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written, ...; the name does not exist then, or still
            has its former content.
    """
    temporary = path.with_name(path.name + _TEMPORARY)
    with _explained("write", path):
        try:
            with temporary.open("wb") as file:
                sha256, size = hashlib.sha256(), 0
                for chunk in _chunks(parts):
                    file.write(chunk)
                    sha256.update(chunk)
                    size += len(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)  # frees the space it took on a full disk
            raise
        _sync_folder(path.parent)
    return Digest(sha256.hexdigest(), size)


def read(path: Path) -> bytes:
    """The whole content of a small file.

    Raises:
        CheckpointError: it cannot be read.
    """
    with _explained("read", path):
        return path.read_bytes()


def digest(path: Path) -> Digest:
    """Reads a file through, whatever its size.

    Raises:
        CheckpointError: it cannot be read.
    """
    with _explained("read", path), path.open("rb") as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)


def size(path: Path) -> int:
    """The number of bytes in a file.

    Raises:
        CheckpointError: it does not exist.
    """
    with _explained("read", path):
        return path.stat().st_size


def map_bytes(path: Path) -> torch.Tensor:
    """A file as uint8 [bytes], mapped into memory: only what is used gets read. Changes to it stay private."""
    with _explained("read", path):
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def names(folder: Path) -> list[str]:
    """What a folder holds, sorted; nothing if there is no such folder."""
    with _explained("read", folder):
        return sorted(os.listdir(folder)) if folder.exists() else []


def appears(path: Path, seconds: float) -> bool:
    """Whether a file or folder that another node has made is there, within so many seconds."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def make_folder(folder: Path) -> None:
    """Makes a folder that this process can write in, with its parents.

    Raises:
        CheckpointError: naming the folder and the reason.
    """
    with _explained("write in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")
        _sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Removes a file, if it exists."""
    with _explained("remove", path):
        path.unlink(missing_ok=True)


def remove_folder(folder: Path, first: str) -> None:
    """Removes a folder and all that it holds; nothing else is gone before the file named `first` is, for good."""
    with _explained("remove", folder):
        (folder / first).unlink(missing_ok=True)
        _sync_folder(folder)
        shutil.rmtree(folder)
        _sync_folder(folder.parent)


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable; fsync of a file covers its content only."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = {
            errno.ENOSPC: "free some space, or keep fewer checkpoints (keep_last, keep_every)",
            errno.EDQUOT: "raise the quota, or keep fewer checkpoints (keep_last, keep_every)",
            errno.ENOENT: "something has removed it: see what else uses this folder",
        }.get(error.errno or 0, "check that the folder exists, is writable and its disk works, or name another one")
        raise CheckpointError(f"cannot {action} {path}: {error.strerror or error}; {fix}") from error
