"""File operations of checkpoints: no other module here opens, renames or deletes checkpoint files.

A checkpoint lies in a folder of a file system (a `Path`) or in an object store (a `Url`). In both,
a write is atomic and durable: the name appears once all bytes are stored, never with some of them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from samestep import storage
from samestep.config import Tree
from samestep.errors import CheckpointError, ObjectNotFoundError, fix_of
from samestep.storage import Digest
from samestep.storage.urls import PARALLEL_REQUESTS
from samestep.stored_json import parse_json
from samestep.untrusted import NotRegularError, inside, open_regular, read_regular, regular

if TYPE_CHECKING:
    from trainer.checkpoint.urls import Url

CLAIMING = ".claim-"
"""Prefix of the temporary name of a folder that is being created."""
_CHECKSUM = "checksum"
_LOCAL_POLL_SECONDS = 0.05
_REMOTE_POLL_SECONDS = 0.5

Location: TypeAlias = "Path | Url"


def location(path: str | Location) -> Location:
    """Converts a path or an address.

    Raises:
        ConfigError: an address of an unknown kind.
    """
    if isinstance(path, str):
        if not storage.is_url(path):
            return Path(path)
        from trainer.checkpoint.urls import Url

        return Url(path.rstrip("/"))
    return path


def write(path: Location, *parts: bytes | memoryview) -> Digest:
    """Writes the parts one after the other as one file, hashing on the way.

    Raises:
        CheckpointError: the disk is full, the folder is not writable, and so on. The file then does
            not exist, or still has its former content.
    """
    if not isinstance(path, Path):
        return path.write(*parts)
    # Writes a temporary file, fsyncs it, renames it, and fsyncs the folder, in this order.
    with storage.atomic_write(path) as file:
        return storage.copy(storage.chunks(parts), file)


def seal(values: Mapping[str, object]) -> bytes:
    """Returns the content of a small JSON file with a checksum of its values."""
    return json.dumps({**values, _CHECKSUM: _checksum(values)}).encode()


def unseal(content: bytes) -> tuple[Tree, bool]:
    """Returns the values of a small JSON file, and whether it has a checksum.

    Files of older versions have none.

    Raises:
        ValueError: the file is damaged.
    """
    values = parse_json(content, dict[str, Any])
    checksum = values.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(values):
        raise ValueError("the checksum differs")
    return values, checksum is not None


def _checksum(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def create(path: Location, content: bytes) -> bool:
    """Writes a small file unless there is one; of several processes that try, one succeeds.

    Another process may see the file before all of its content.

    Args:
        content: differs from what any other process would write.

    Returns:
        Whether this call has written it.

    Raises:
        CheckpointError: it cannot be written.
    """
    # Stores have a conditional write for this.
    if not isinstance(path, Path):
        return path.create(content)
    with _explained("write", path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # The name must survive a power cut, too: another process may have seen it.
        storage.sync_folder(path.parent)
    return True


def claim(folder: Location, name: str, content: bytes) -> bool:
    """Makes a folder with one small file in it, unless there is one; of several, one succeeds.

    Returns:
        Whether this call has made it.

    Raises:
        CheckpointError: it cannot be made.
    """
    if not isinstance(folder, Path):
        # An object store has no folders: its first object makes one.
        return not names(folder) and (folder / name).create(content)
    # The folder appears with the file: a folder without it may be removed as somebody's leftover.
    temporary = folder.with_name(f"{CLAIMING}{folder.name}-{uuid.uuid4().hex}")
    with _explained("write in", folder.parent):
        try:
            write(temporary / name, content)
            temporary.rename(folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        storage.sync_folder(folder.parent)
    return True


def read(path: Location) -> bytes:
    """Returns the content of a small file.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not isinstance(path, Path):
        return path.read()
    with _explained("read", path):
        return read_regular(path)


def read_if_there(path: Location) -> bytes | None:
    """Returns the content of a small file; None if it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return read(path)
    except ObjectNotFoundError:
        return None
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def read_all(paths: Sequence[Location]) -> list[bytes]:
    """Returns the contents of small files of one store, several of which are read at a time.

    Raises:
        CheckpointError: one cannot be read.
    """
    urls = [path.url for path in paths if not isinstance(path, Path) and path.in_keepers]
    if urls:
        from samestep.storage.objects import read_from_keepers

        return read_from_keepers(urls)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        return list(pool.map(read, paths))


def digest(path: Location) -> Digest:
    """Reads a file of any size and hashes it.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not isinstance(path, Path):
        with path.open("rb") as file:
            return Digest.of(file)
    with _explained("read", path), open_regular(path) as file:
        return Digest.of(file)


def size(path: Location) -> int:
    """Returns the number of bytes in a file.

    Raises:
        CheckpointError: it does not exist.
    """
    if not isinstance(path, Path):
        return path.size()
    with _explained("read", path):
        return regular(path).stat().st_size


def sizes(folder: Location) -> dict[str, int]:
    """Returns the bytes of each file in a folder, by name; a missing folder has none."""
    if not isinstance(folder, Path):
        return folder.sizes()
    with _explained("read", folder):
        if not folder.exists():
            return {}
        # One listing: a network file system answers it with sizes, and single files one by one.
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def open_bytes(path: Location) -> Callable[[int, int], Tensor]:
    """Returns a function from (start, stop) to these bytes of the file, uint8.

    A local file is memory-mapped. Of an object, little more than the range is requested.
    """
    if not isinstance(path, Path):
        return path.open_bytes()
    with _explained("read", path):
        # A link could lead to the tensors of another run.
        length = regular(path, links=False).stat().st_size
        content = torch.from_file(str(path), shared=False, size=length, dtype=torch.uint8)
    return lambda start, stop: content[start:stop]


def names(folder: Location) -> list[str]:
    """Lists a folder, sorted; a missing folder is empty."""
    if not isinstance(folder, Path):
        return folder.names()
    with _explained("read", folder):
        return sorted(os.listdir(folder)) if folder.exists() else []


def appears(path: Location, seconds: float) -> bool:
    """Waits for a file that another node has made. Returns False if it does not appear in time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        pause(path)
    return True


def pause(path: Location) -> None:
    """Sleeps between two looks for something in a folder; longer if a store charges for each."""
    remote = not isinstance(path, Path) and not path.in_keepers
    time.sleep(_REMOTE_POLL_SECONDS if remote else _LOCAL_POLL_SECONDS)


def make_folder(folder: Location) -> None:
    """Creates a folder and its parents, and checks that this process can write in it.

    Raises:
        CheckpointError: with the folder and the reason.
    """
    if not isinstance(folder, Path):
        return
    with _explained("write in", folder):
        storage.make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")


def remove(path: Location) -> None:
    """Removes a file, if it exists."""
    if not isinstance(path, Path):
        path.remove()
    else:
        with _explained("remove", path):
            path.unlink(missing_ok=True)


def remove_files(folder: Location, names: Iterable[str]) -> None:
    """Removes files of a folder, if they exist; few requests of an object store for any number."""
    if not isinstance(folder, Path):
        folder.remove_files(names)
    else:
        for name in names:
            remove(folder / name)


def remove_folder(folder: Location, first: str) -> None:
    """Removes a folder with its files; the file named `first` is durably gone before any other."""
    # Without `first`, the rest is a leftover for every reader.
    remove(folder / first)
    if not isinstance(folder, Path):
        folder.remove_folder()
    else:
        with _explained("remove", folder):
            # Without this fsync a power cut could bring `first` back after other files are gone.
            storage.sync_folder(folder)
            shutil.rmtree(folder)
            storage.sync_folder(folder.parent)


def copy_folder(source: Location, target: Location) -> None:
    """Copies the files of a small folder, without its subfolders."""
    for name in names(source):
        copy = inside(target, name) if isinstance(target, Path) else target / name
        write(copy, read(source / name))


@contextmanager
def on_disk(folder: Location) -> Iterator[Path]:
    """Provides a small folder on this machine: the folder itself, or a temporary copy.

    Raises:
        CheckpointError: it cannot be read.
    """
    if isinstance(folder, Path):
        yield folder
        return
    if not names(folder):
        raise CheckpointError(f"{folder} is empty. Copy the run's folder of that name there")
    with TemporaryDirectory(prefix="samestep-") as copy:
        copy_folder(folder, Path(copy))
        yield Path(copy)


@contextmanager
def _explained(action: str, path: Location) -> Iterator[None]:
    """Turns an OSError into a CheckpointError with a fix."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            fix = "something has removed it: check what else uses this folder"
        elif isinstance(error, NotRegularError):
            fix = "copy the file itself there"
        else:
            fix = "check that the folder exists, is writable and its disk works, or use another one"
            fix = fix_of(error, fix)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix += ", or keep fewer checkpoints (keep_last, keep_every)"
        reason = error.strerror or error
        raise CheckpointError(f"cannot {action} {path}: {reason}; {fix}") from error
