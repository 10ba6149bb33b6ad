"""Atomic writes to the local disk: a file is either whole under its own name or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainer.errors import DataError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` and renames it to `path` when the block ends without an error.

    The temporary name holds the process id, so that two processes that write the same file cannot mix their bytes.

    Raises:
        DataError: the folder or the disk does not take the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; free some space or check the permissions of the folder, "
            f"or write to another one, then run the same command again"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())
