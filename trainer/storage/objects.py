"""Objects behind URLs, through fsspec. Functions may be called from any thread, and after a fork."""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from trainer.errors import CorruptError, ObjectNotFoundError, StorageError
from trainer.storage.attempts import File, FileSystem, Info, attempt, shown
from trainer.storage.local import CHUNK_BYTES, Digest, chunks, copy

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

_PART_BYTES = 64 * 2**20  # of a multipart upload: S3 takes 10,000 parts, so objects of up to 640 GB
_TRIES_OF_CONTENT = 3  # of a download whose SHA-256 is wrong


def exists(url: str) -> bool:
    """Whether there is such an object, or a folder with any."""
    try:
        _info(url)
    except ObjectNotFoundError:
        return False
    return True


def size(url: str) -> int:
    """The number of bytes of an object."""
    return int(_info(url)["size"])


def names(url: str) -> list[str]:
    """What a folder of objects holds, sorted: the last part of each address. Nothing if there is no such folder."""

    def list_once(fs: FileSystem, path: str) -> list[str]:
        found = (name.rstrip("/") for name in fs.ls(path, detail=False))
        return sorted({name.rpartition("/")[2] for name in found if name != path})

    try:
        return attempt("list", url, list_once)
    except ObjectNotFoundError:
        return []


def glob(pattern: str) -> list[str]:
    """The addresses of the objects that match a pattern with `*`, `**` or `?`, sorted."""
    fs, found = attempt("list", pattern, lambda fs, path: (fs, fs.glob(path, detail=True)))
    return sorted(
        fs.unstrip_protocol(name) for name, info in found.items() if info["type"] == "file"
    )


def open(url: str) -> io.BufferedReader:
    """Opens an object for reading; seekable. What is cut off in the middle is asked for again from there.

    Raises:
        ObjectNotFoundError: there is none.
        StorageError: it cannot be read.
    """
    return io.BufferedReader(_Object(url), CHUNK_BYTES)


def read(url: str) -> bytes:
    """The whole content of a small object."""
    return attempt("read", url, lambda fs, path: fs.cat_file(path))


def read_range(url: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an object, in one request."""

    def read_once(fs: FileSystem, path: str) -> bytes:
        content = fs.cat_file(path, start=start, end=stop)
        if len(content) > stop - start:  # an HTTP server that knows no ranges sends everything
            content = content[start:stop]
        return _complete(content, stop - start)

    return attempt("read", url, read_once)


def download(
    url: str, file: BinaryIO, size: int | None = None, sha256: str | None = None
) -> Digest:
    """Copies an object into a file that is open for writing, from its start, hashing on the way.

    Args:
        url: of the object.
        file: gets the content; not flushed.
        size: that the object must have, in bytes; None takes any.
        sha256: that its content must have; None takes any. Bytes that are wrong are fetched again.

    Raises:
        CorruptError: it is not what is expected.
        StorageError: it cannot be read.
        OSError: the file cannot be written.
    """
    for _ in range(_TRIES_OF_CONTENT):
        file.seek(0)
        with open(url) as content:
            length = content.seek(0, io.SEEK_END)
            if size not in (None, length):
                raise CorruptError(
                    f"{shown(url)} has {length} bytes, not {size}: it was cut short or replaced; upload it again"
                )
            content.seek(0)
            digest = copy(iter(lambda: content.read(CHUNK_BYTES), b""), file)
        if sha256 in (None, digest.sha256):
            return digest
        logger.warning(
            "%s arrived with the SHA-256 %.12s..., not %.12s...", shown(url), digest.sha256, sha256
        )
    raise CorruptError(
        f"{shown(url)} has the SHA-256 {digest.sha256}, not {sha256}: it was damaged or replaced; upload it again"
    )


def write(url: str, *parts: bytes | memoryview) -> Digest:
    """Writes the parts one after the other as one object, hashing on the way; it appears once it is whole.

    Raises:
        StorageError: it cannot be written; there is no such object then, or still the former one.
    """
    return _write(url, lambda: chunks(parts))


def upload(path: Path, url: str) -> Digest:
    """Copies a local file; the object appears once it is whole.

    Raises:
        StorageError: it cannot be written.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:

        def content() -> Iterator[bytes]:
            file.seek(0)
            return iter(lambda: file.read(CHUNK_BYTES), b"")

        return _write(url, content)


def remove(url: str) -> None:
    """Removes an object, if it exists."""
    with suppress(ObjectNotFoundError):
        attempt("remove", url, lambda fs, path: fs.rm_file(path))


def remove_folder(url: str) -> None:
    """Removes all objects of a folder, if there are any."""
    with suppress(ObjectNotFoundError):
        attempt("remove", url, lambda fs, path: fs.rm(path, recursive=True))


class _Object(io.RawIOBase):
    """An object, read range by range."""

    def __init__(self, url: str) -> None:
        self._url = url
        file = attempt("read", url, lambda fs, path: fs.open(path, "rb", cache_type="none"))
        self._file: File | BinaryIO = file
        if file.size is None:  # the server streams, and does not know how much
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

    def readall(self) -> bytes:  # the inherited one asks for 8 KiB at a time
        return self.read(max(0, self._size - self._position))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _read(self, count: int) -> bytes:
        def read_once(_fs: FileSystem, _path: str) -> bytes:
            self._file.seek(self._position)
            return _complete(self._file.read(count), count)

        try:
            return attempt("read", self._url, read_once)
        except StorageError as error:
            if "range requests" not in str(error.__cause__):
                raise
        self._fetch_whole()
        return self._read(count)

    def _fetch_whole(self) -> None:
        """Takes a temporary copy, where an HTTP server does not know ranges."""
        self._file.close()
        self._file = whole = tempfile.TemporaryFile()  # noqa: SIM115

        def fetch(fs: FileSystem, path: str) -> None:
            whole.seek(0)
            fs.get_file(path, whole)
            whole.truncate()

        attempt("read", self._url, fetch)


def _info(url: str) -> Info:
    return attempt("find", url, lambda fs, path: fs.info(path))


def _write(url: str, content: Callable[[], Iterable[bytes | memoryview]]) -> Digest:
    def write_once(fs: FileSystem, path: str) -> Digest:
        file = fs.open(path, "wb", block_size=_PART_BYTES)
        try:
            digest = copy(content(), file)
            file.close()
        except BaseException:
            with suppress(Exception):
                file.discard()
            file.closed = True  # its finalizer would commit what has been written so far
            raise
        return digest

    return attempt("write", url, write_once)


def _complete(content: bytes, length: int) -> bytes:
    if len(content) != length:
        raise ConnectionError(f"{len(content)} bytes came where {length} were asked for")
    return content
