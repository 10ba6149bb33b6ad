"""The local disk: a file is either whole under its own name or not there."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from trainer.errors import StorageError

CHUNK_BYTES = 16 * 2**20


class Writable(Protocol):
    """A file that takes bytes."""

    def write(self, content: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True)
class Digest:
    """The content of a file, for telling whether it is still the one that was written."""

    sha256: str
    bytes: int


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` and renames it to `path` when the block ends without an error.

    The name appears once all bytes are on the disk, and never with some of them. The temporary name holds the host
    and the process id, so that two processes that write the same file, perhaps on a shared disk, cannot mix their
    bytes.

    Raises:
        StorageError: the folder or the disk does not take the file.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        make_folder(path.parent)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; free some space or check the permissions of the folder, "
            "or write to another one"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def make_folder(folder: Path) -> None:
    """Makes a folder, with its parents, that is still there after a power cut.

    Raises:
        OSError: it cannot be made.
    """
    if folder.is_dir():
        return
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable; fsync of a file covers its content only."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The parts in pieces of at most CHUNK_BYTES, without copying them."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def copy(content: Iterable[bytes | memoryview], file: Writable) -> Digest:
    """Writes the content into a file, hashing on the way."""
    sha256, size = hashlib.sha256(), 0
    for chunk in content:
        file.write(chunk)
        sha256.update(chunk)
        size += len(chunk)
    return Digest(sha256.hexdigest(), size)
