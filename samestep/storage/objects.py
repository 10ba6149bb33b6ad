"""Objects behind URLs, through fsspec. Functions are safe in any thread and after a fork.

Every operation is retried after transient failures (lost connections, time-outs, throttling, server
errors). A failure that remains is raised as a `StorageError` in one paragraph. `StorageError` is
both a `DataError` and a `CheckpointError`, so callers need not translate it. Credentials, endpoints
and proxies come from where the stores' own tools look for them.
"""

from __future__ import annotations

import io
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from samestep.addresses import shown
from samestep.errors import CorruptError, ObjectNotFoundError, StorageError
from samestep.storage.attempts import attempt, credentials_renewed, status_of
from samestep.storage.local import CHUNK_BYTES, Digest, chunks, copy, with_literal_names
from samestep.untrusted import open_regular

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

# Of a multipart upload. S3 takes at most 10,000 parts, so objects of up to 640 GB.
_PART_BYTES = 64 * 2**20
_DOWNLOAD_TRIES = 3  # while the SHA-256 of the content is wrong
_CONFLICT, _PRECONDITION_FAILED = 409, 412


def exists(url: str) -> bool:
    """Whether there is such an object, or a folder with at least one object."""
    try:
        attempt("find", url, lambda fs, path: fs.info(path))
    except ObjectNotFoundError:
        return False
    return True


def size(url: str) -> int:
    """Size of an object in bytes."""
    return attempt("find", url, lambda fs, path: int(fs.info(path)["size"]))


def names(url: str) -> list[str]:
    """Sorted names in a folder of objects, without the path; empty if there is no such folder."""

    def list_once(fs: AbstractFileSystem, path: str) -> list[str]:
        found = [name.rstrip("/") for name in fs.ls(path, detail=False)]
        return sorted({name.rpartition("/")[2] for name in found if name != path})

    try:
        return attempt("list", url, list_once)
    except ObjectNotFoundError:
        return []


def sizes(url: str) -> dict[str, int]:
    """Bytes of the objects in a folder by name, without its subfolders."""

    def list_once(fs: AbstractFileSystem, path: str) -> dict[str, int]:
        found = [entry for entry in fs.ls(path, detail=True) if entry["type"] == "file"]
        return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in found}

    try:
        return attempt("list", url, list_once)
    except ObjectNotFoundError:
        return {}


def glob(pattern: str) -> list[str]:
    """Sorted URLs of the objects that match a pattern with `*`, `**`, `?` or `[`.

    A name that exists comes before a pattern: see `with_literal_names`.
    """
    if pattern.startswith(("http://", "https://")):
        # A web server lists no folders, and in its URLs `?` begins a query.
        if ("*" in pattern or "[" in pattern) and exists(pattern):
            return [pattern]
    else:
        pattern = with_literal_names(pattern, exists)

    def glob_once(fs: AbstractFileSystem, path: str) -> list[str]:
        found = fs.glob(path, detail=True).items()
        return sorted(fs.unstrip_protocol(name) for name, info in found if info["type"] == "file")

    return attempt("list", pattern, glob_once)


def open(url: str) -> io.BufferedReader:
    """Opens an object for reading; seekable. A read that breaks off continues where it stopped.

    Raises:
        ObjectNotFoundError: there is no such object.
        StorageError: it cannot be read.
    """
    return io.BufferedReader(_Object(url), CHUNK_BYTES)


def read(url: str) -> bytes:
    """Reads the whole content of a small object."""
    content: bytes = attempt("read", url, lambda fs, path: fs.cat_file(path))
    return content


def read_from_keepers(urls: Sequence[str]) -> list[bytes]:
    """Reads the whole contents of small keeper:// objects, with one request of each keeper."""

    def read_once(fs: AbstractFileSystem, _path: str) -> list[bytes]:
        contents: list[bytes] = fs.cat_files([fs._strip_protocol(url) for url in urls])
        return contents

    return attempt("read", urls[0], read_once) if urls else []


def read_range(url: str, start: int, stop: int) -> bytes:
    """Reads the bytes [start, stop) of an object in one request."""

    def read_once(fs: AbstractFileSystem, path: str) -> bytes:
        content = fs.cat_file(path, start=start, end=stop)
        if len(content) > stop - start:  # an HTTP server without range requests sends everything
            content = content[start:stop]
        return _check_length(content, stop - start)

    return attempt("read", url, read_once)


def download(
    url: str, file: BinaryIO, size: int | None = None, sha256: str | None = None
) -> Digest:
    """Copies an object to a writable file, in place of its content, and hashes it on the way.

    Args:
        file: not flushed.
        size: expected number of bytes, or None to accept any.
        sha256: expected hash of the content, or None to accept any. Content with another hash is
            fetched again.

    Raises:
        CorruptError: the size or the hash is not the expected one.
        StorageError: the object cannot be read.
        OSError: the file cannot be written.
    """
    for _ in range(_DOWNLOAD_TRIES):
        file.seek(0)
        with open(url) as content:
            length = content.seek(0, io.SEEK_END)
            if size not in (None, length):
                raise CorruptError(
                    f"{shown(url)} has {length} bytes, not {size}: it was truncated or replaced; "
                    "upload it again"
                )
            content.seek(0)
            digest = copy(iter(lambda: content.read(CHUNK_BYTES), b""), file)
        file.truncate()  # an earlier try may have written more
        if sha256 in (None, digest.sha256):
            return digest
        logger.warning(
            "%s arrived with the SHA-256 %.12s..., not %.12s...", shown(url), digest.sha256, sha256
        )
    raise CorruptError(
        f"{shown(url)} has the SHA-256 {digest.sha256}, not {sha256}: it was damaged or replaced; "
        "upload it again"
    )


def write(url: str, *parts: bytes | memoryview) -> Digest:
    """Writes the parts as one object and hashes them; the object appears once it is complete.

    Raises:
        StorageError: it cannot be written. The former object, if any, is still there.
    """
    return _write(url, lambda: chunks(parts))


def create(url: str, content: bytes) -> bool:
    """Writes a small object unless there is one; of several processes that try, one succeeds.

    Args:
        content: differs from what any other process would write.

    Returns:
        Whether this call has written it.
    """

    def create_once(fs: AbstractFileSystem, path: str) -> bool:
        try:
            fs.pipe_file(path, content, mode="create")
        except Exception as error:  # every store's package has its own exceptions
            if isinstance(error, FileExistsError) or status_of(error) == _PRECONDITION_FAILED:
                return False
            if status_of(error) == _CONFLICT:  # another process creates it right now
                raise ConnectionError("two processes create it at once") from None
            raise
        return True

    # If the answer to a request was lost, a retry finds the object that it has written.
    return attempt("write", url, create_once) or read(url) == content


def upload(path: Path, url: str) -> Digest:
    """Copies a local file to an object, which appears once it is complete.

    Raises:
        StorageError: the object cannot be written.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:

        def content() -> Iterator[bytes]:
            file.seek(0)  # a retry starts over
            return iter(lambda: file.read(CHUNK_BYTES), b"")

        return _write(url, content)


def remove(url: str) -> None:
    """Removes an object, if it exists."""
    with suppress(ObjectNotFoundError):
        attempt("remove", url, lambda fs, path: fs.rm_file(path))


def remove_files(urls: Sequence[str]) -> None:
    """Removes objects of one store, if they exist; S3 takes up to 1,000 in a request."""

    def remove_once(fs: AbstractFileSystem, _path: str) -> None:
        paths = [fs._strip_protocol(url) for url in urls]
        if any(map(has_magic, paths)):
            _remove_each(fs, paths)
        else:
            fs.rm(paths)

    if urls:
        with suppress(ObjectNotFoundError):
            attempt("remove", urls[0], remove_once)


def remove_folder(url: str) -> None:
    """Removes all objects of a folder, if there are any."""

    def remove_once(fs: AbstractFileSystem, path: str) -> None:
        if has_magic(path):
            _remove_each(fs, fs.find(path))
        else:
            fs.rm(path, recursive=True)

    with suppress(ObjectNotFoundError):
        attempt("remove", url, remove_once)


def _remove_each(fs: AbstractFileSystem, paths: Iterable[str]) -> None:
    """Removes objects one by one, as `rm` takes a path with `*`, `?` or `[` for a pattern.

    Escaping these characters does not help: `rm` would list the folders beside each object.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            fs.rm_file(path)


class _Object(io.RawIOBase):
    """An object that is read range by range."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened_at = math.inf  # inf: a temporary copy
        attempt("read", url, self._open)
        if self._file.size is None:  # an HTTP server that streams does not know the size
            self._fetch_whole()
        self._size: int = self._file.seek(0, io.SEEK_END)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._position))
        view[:count] = self._read(count)
        self._position += count
        return count

    def readall(self) -> bytes:  # the inherited method requests 8 KiB at a time
        return self.read(max(0, self._size - self._position))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _open(self, fs: AbstractFileSystem, path: str) -> None:
        began = time.monotonic()
        self._file = fs.open(path, "rb", cache_type="none")
        self._opened_at = began

    def _read(self, count: int) -> bytes:
        def read_once(fs: AbstractFileSystem, path: str) -> bytes:
            if self._opened_at < credentials_renewed():  # those of `_file` have expired
                former = self._file
                self._open(fs, path)
                former.close()
            self._file.seek(self._position)
            return _check_length(self._file.read(count), count)

        try:
            return attempt("read", self._url, read_once)
        except StorageError as error:
            if "range requests" not in str(error.__cause__):
                raise
        self._fetch_whole()
        return self._read(count)

    def _fetch_whole(self) -> None:
        """Replaces the remote file by a temporary copy, for HTTP servers without range requests."""
        self._file.close()
        self._file = whole = tempfile.TemporaryFile()  # noqa: SIM115
        self._opened_at = math.inf

        def fetch(fs: AbstractFileSystem, path: str) -> None:
            whole.seek(0)
            fs.get_file(path, whole)
            whole.truncate()

        attempt("read", self._url, fetch)


def _write(url: str, content: Callable[[], Iterable[bytes | memoryview]]) -> Digest:
    """Writes an object; `content` is called again for each retry."""

    def write_once(fs: AbstractFileSystem, path: str) -> Digest:
        file = fs.open(path, "wb", block_size=_PART_BYTES)
        try:
            digest = copy(content(), file)
            file.close()  # commits: the object appears
        except BaseException:
            with suppress(Exception):
                file.discard()
            # Else the file's finalizer would commit what has been written so far.
            file.closed = True
            raise
        return digest

    return attempt("write", url, write_once)


def _check_length(content: bytes, length: int) -> bytes:
    """Turns a truncated answer into an error that `attempt` retries."""
    if len(content) != length:
        raise ConnectionError(f"{len(content)} bytes came where {length} were asked for")
    return content
