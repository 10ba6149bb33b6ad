"""Atomic writes to the local disk: a file is either whole under its own name or not there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainer.errors import DataError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` and renames it to `path` when the block ends without an error.

    The temporary name holds the host and the process id, so that two processes that write the same file, perhaps on a
    shared disk, cannot mix their bytes.

    Raises:
        DataError: the folder or the disk does not take the file.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; free some space or check the permissions of the folder, "
            f"or write to another one, then run the same command again"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable; fsync of a file covers its content only."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())
