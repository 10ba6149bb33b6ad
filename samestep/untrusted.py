"""Names and files from outside: paths that stay in their folder, and regular files only.

The keys of a bucket, an index, a manifest or a list of checksums may be a stranger's. Such a name
becomes a path here or nowhere. A stranger's folder may hold a FIFO, which blocks its reader for
ever, or a link to a device without an end, in place of any file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path

from samestep.config import Tree
from samestep.errors import ConfigError, CorruptError, StorageError

MOST_STORED_BYTES = 2**20  # of a run's config.yaml
_MOST_PART_BYTES = 255  # of one name, in all file systems in use
_MOST_BYTES = 1024  # of a name with its folders: an object store's longest key
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DRIVE = re.compile("[A-Za-z]:")
_RESERVED = re.compile(r"(?i:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")  # devices of Windows


class NotRegularError(StorageError, OSError):
    """A file is a FIFO, a socket or a device, or larger than any of its kind."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be read: {self.strerror}"


def inside(folder: Path, name: object) -> Path:
    """Returns the path of a file that something from outside names by its path in `folder`.

    Raises:
        CorruptError: the name leads elsewhere, or cannot be a file's.
    """
    if reason := _objection(name):
        raise CorruptError(
            f"{folder} cannot hold a file named {str(name)[:100]!r}: {reason}. Rename it at its "
            "source, or use a source that you trust"
        )
    assert isinstance(name, str)
    return folder / name


def is_plain(name: object) -> bool:
    """Whether a value from outside is the name of a file in a folder, not in a subfolder of it."""
    return isinstance(name, str) and "/" not in name and not _objection(name)


def _objection(name: object) -> str | None:
    """Why a name from outside is refused, or None."""
    if not isinstance(name, str) or not name:
        return "it is empty" if name == "" else "it is not a text"
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return "it is not valid Unicode"
    if len(name.encode()) > _MOST_BYTES or max(map(len, parts)) > _MOST_PART_BYTES:
        return "it is too long"
    if _CONTROL.search(name):
        return "it has control characters"
    if name.startswith("/") or "\\" in name or _DRIVE.match(name):
        return "it is not relative to the folder"
    if not {b"", b".", b".."}.isdisjoint(parts):
        return "it leads out of the folder or has an empty part"
    if any(map(_RESERVED.fullmatch, name.split("/"))):
        return "it is the name of a device"
    return None


def open_regular(path: Path, links: bool = True) -> BufferedReader:
    """Opens a file of a folder that may be a stranger's for reading, without ever blocking.

    Args:
        links: whether it may be a link to a regular file.

    Raises:
        OSError: it does not exist, or is a folder, a FIFO, a socket or a device.
    """
    if not links and path.is_symlink():
        raise NotRegularError(errno.ELOOP, "it is a link to another file", str(path))
    return open(path, "rb", opener=_open)


def regular(path: Path, links: bool = True) -> Path:
    """Returns the path of a file that a library opens by itself, after the check of `open_regular`.

    Args:
        links: whether it may be a link to a regular file.

    Raises:
        OSError: as `open_regular`.
    """
    _check(path, path.stat(follow_symlinks=links).st_mode)
    return path


def read_regular(path: Path, most: int = 2**30) -> bytes:
    """Reads a file of a folder that may be a stranger's.

    Args:
        most: largest number of bytes.

    Raises:
        OSError: it is larger, or as `open_regular`.
    """
    with open_regular(path) as file:
        # Not `most` at once, for which the memory would be reserved.
        content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most:
        raise NotRegularError(errno.EINVAL, f"it has more than {most} bytes", str(path))
    return content


def read_stored(path: Path, overrides: Iterable[str] = ()) -> Tree:
    """Reads a run's config.yaml and merges a user's overrides over it.

    Raises:
        ConfigError: it cannot be read, or is not as a run writes it.
    """
    from samestep.config import renamed
    from samestep.config.tree import merge_overrides

    try:
        # A report shows its content, which must not be of another file.
        if path.is_symlink() and path.resolve().parent != path.parent.resolve():
            raise OSError(errno.ELOOP, "it is a link to a file elsewhere", str(path))
        content = read_regular(path, MOST_STORED_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror or error}. Copy the folder of "
            "the run again"
        ) from error
    return merge_overrides(renamed.stored(content, path), overrides)


def _open(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO waits for its writer.
    for name in ("O_NONBLOCK", "O_NOCTTY"):  # not on Windows
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    try:
        _check(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
