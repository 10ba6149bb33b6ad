"""Local files: one is either complete under its own name, or it is not there."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape, has_magic
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Protocol

from samestep.errors import StorageError, fix_of
from samestep.stored_json import Count, Sha256

CHUNK_BYTES = 16 * 2**20


class Writable(Protocol):
    """A file that takes bytes."""

    def write(self, content: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True)
class Digest:
    """The SHA-256 and the size of a file's content, to check that the content is unchanged."""

    sha256: Sha256
    bytes: Count

    @classmethod
    def of(cls, file: BufferedReader) -> Digest:
        """Reads an open file of any size to its end."""
        return cls(hashlib.file_digest(file, "sha256").hexdigest(), file.tell())


def with_literal_names(pattern: str, exists: Callable[[str], bool]) -> str:
    """Escapes the leading part of a glob pattern that exists under the very name as written.

    If there is a folder `a[1]`, the pattern "a[1]/*.txt" names its files, and none in `a1`.
    """
    literal = pattern
    while has_magic(literal) and not exists(literal):
        literal = os.path.dirname(literal)
    return escape(literal) + pattern[len(literal) :]


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file and renames it to `path` when the block ends without an error.

    Raises:
        StorageError: the folder or the disk rejects the file.
    """
    temporary = temporary_name(path)
    try:
        make_folder(path.parent)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Sync before the rename, or a power cut may leave the name with half of the bytes.
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        fix = fix_of(error, "check the permissions of the folder")
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; {fix}, or write to another folder"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def temporary_name(path: Path) -> Path:
    """Returns a new name beside `path`, such as .config.yaml.0f1e2d3c4b5a6978.tmp.

    Random, since the containers of a job may share a disk and have one host name and one process
    number.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents durably: they survive a power cut.

    Raises:
        OSError: it cannot be created.
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
    """Splits the parts into views of at most CHUNK_BYTES, without copying them."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def copy(content: Iterable[bytes | memoryview], file: Writable) -> Digest:
    """Writes the content to a file and hashes it on the way."""
    sha256, size = hashlib.sha256(), 0
    for chunk in content:
        file.write(chunk)
        sha256.update(chunk)
        size += len(chunk)
    return Digest(sha256.hexdigest(), size)
