"""Files of documents, local or on an object store, plain or compressed: finds, opens, splits."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import logging
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import zstandard

from data_pipeline.sources import UTF8, BadRecord, Record
from data_pipeline.sources.encodings import named, recoded
from samestep import storage
from samestep.errors import ConfigError, DataError
from samestep.storage import objects
from samestep.storage.urls import PARALLEL_REQUESTS
from samestep.untrusted import open_regular

logger = logging.getLogger(__name__)

Split: TypeAlias = Callable[[BinaryIO], Iterator[tuple[int, bytes]]]
"""Splits an open file into records, as (line, bytes)."""
OpenFile: TypeAlias = Callable[[str], tuple[BinaryIO, str]]
"""Opens a file of a source: the seekable file, and a name that ends as its compression."""

# zstd's default limit of 128 MiB rejects files of `zstd --long=31`.
_WINDOW = 2**31
_BUFFER = 2**16
# 4 bytes of Zstandard may stand for 128 KiB, so this many may become 64 MiB in one call.
_FRAME_INPUT = 2**11
# Text shrinks to a third or a tenth, and a bomb to a thousandth or less.
MOST_EXPANSION = 300
_FREE_BYTES = 2**28  # that any file may expand to
_COMPRESSIONS = {
    ".gz": ".gz",
    ".gzip": ".gz",
    ".tgz": ".gz",
    ".bz2": ".bz2",
    ".xz": ".xz",
    ".zst": ".zst",
    ".zstd": ".zst",
}
"""Suffixes, in lower case, and the usual one for the same compression."""
_SUFFIXES = tuple(_COMPRESSIONS)
_FIRST_BYTES = {
    ".gz": re.compile(rb"\x1f\x8b\x08"),
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    ".xz": re.compile(rb"\xfd7zXZ\0"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
"""How compressed files begin. No text in UTF-8 begins so, but for one with bzip2's ten signs."""


def find(patterns: tuple[str, ...], name: str = "source.paths") -> tuple[str, ...]:
    """Returns the files and URLs that match patterns (`*`, `?`, `[`, `**`, `~`), each once, sorted.

    The name of an existing file or folder is no pattern: "a[1].txt" is that file, if there is one.

    Args:
        name: the setting with the patterns, for messages.

    Raises:
        ConfigError: there is no pattern, or one matches no file.
        StorageError: a store cannot be listed.
    """
    if not patterns:
        raise ConfigError(f"{name} is empty. Name at least one file or pattern.")
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as threads:  # of a store, each may be a request
        paths = {
            path for each in threads.map(partial(matches, name=name), patterns) for path in each
        }
    # Patterns overlap, and "a.txt", "./a.txt" and a link to it are one file. The first name in
    # sorted order stands for it. A link "a.txt.gz" to the file "blob" is read differently, so it
    # stays.
    first_names: dict[tuple[str, str], str] = {}
    for path in sorted(paths):
        first_names.setdefault((identity(path), _compression(path)), path)
    if dropped := len(paths) - len(first_names):
        logger.info("%s: left out %d further names of the same files", name, dropped)
    return tuple(first_names.values())


def matches(pattern: str, name: str = "source.paths") -> list[str]:
    """Returns the files or URLs that match one pattern, sorted; a file may have several names.

    Raises:
        ConfigError: it matches no file.
        StorageError: a store cannot be listed.
    """
    if storage.is_url(pattern):
        found, hint = objects.glob(pattern), ""
        only_folders = not found and objects.exists(pattern)
    else:
        escaped = storage.with_literal_names(os.path.expanduser(pattern), os.path.exists)
        # `**` matches folders, too.
        paths = glob.glob(escaped, recursive=True)
        found = list(filter(os.path.isfile, paths))
        only_folders = any(map(os.path.isdir, paths))
        hint = f", or run in the folder it is relative to, which is not {os.getcwd()}"
    if not found and only_folders:
        shown = storage.shown(pattern).rstrip("/")
        raise ConfigError(
            f"{name}: {shown!r} matches a folder, and no file. Name the files in it, such as "
            f"{shown}/*.jsonl."
        )
    if not found:
        raise ConfigError(
            f"{name}: no file matches {storage.shown(pattern)!r}. Correct the pattern{hint}."
        )
    # The order of a folder is arbitrary, and the order of documents is part of a dataset.
    return sorted(set(found))


def identity(path: str) -> str:
    """The same for all names of a local file: relative, absolute or through a link."""
    return path if storage.is_url(path) else os.path.realpath(path)


def open_file(path: str) -> tuple[BinaryIO, str]:
    """Opens a local file or an object; see `OpenFile`.

    Raises:
        OSError, DataError: it cannot be opened.
    """
    file = objects.open(path) if storage.is_url(path) else open_regular(Path(path))
    return file, storage.shown(path)


def read_records(
    files: tuple[str, ...],
    split: Split,
    encoding: str = UTF8,
    open_file: OpenFile = open_file,
) -> Iterator[Record]:
    """Yields the records of each file.

    An empty file is one record with a `problem`, and so is all that follows the first damage of a
    file; `split` may raise BadRecord to name the damage.

    Args:
        encoding: of the text in the files; `split` gets UTF-8.

    Raises:
        DataError: a file cannot be opened or read.
    """
    weights = _weights(files)
    total = max(1, sum(weights))
    before = 0
    for index, path in enumerate(files):
        line = 0
        try:
            disk, name = open_file(path)
            with disk:
                # Progress is counted in compressed bytes: only their number is known in advance.
                weight = weights[index] / max(1, disk.seek(0, io.SEEK_END))
                disk.seek(0)
                # `line` survives the loop: what follows the last record that was read is bad.
                text = recoded(_decompressed(disk, name), encoding)
                for line, data in split(text):
                    read = (before + weight * disk.tell()) / total
                    yield Record.of(index, line, named(data, encoding), read)
            problem = "empty file" if line == 0 else None
        except DAMAGE as error:
            problem = damage(error)
        except OSError as error:
            raise DataError(
                f"cannot read {storage.shown(path)}: {error.strerror or error}. Check that it "
                "exists, is a file and is readable."
            ) from error
        before += weights[index]
        # Damage costs the rest of one file: reading continues with the next one.
        if problem:
            yield Record(index, line + 1, b"", before / total, problem)


DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, BadRecord)
"""What reading a truncated or corrupt file raises."""


def damage(error: Exception) -> str:
    """The reason that an error of `DAMAGE` gives."""
    if isinstance(error, BadRecord):
        return str(error)
    return "truncated file" if isinstance(error, EOFError) else "corrupt file"


def _weights(files: tuple[str, ...]) -> list[int]:
    """Weights of the files in progress reports: bytes, or 1 each if any is not on this machine.

    Asking a store for the size of every object would take a request each.
    """
    if not all(map(os.path.exists, files)):
        return [1] * len(files)
    return list(map(os.path.getsize, files))


def uncompressed(name: str) -> str:
    """The name of a file without the suffix of its compression: "a.csv" for "a.csv.GZ"."""
    return name[: len(name) - len(_suffix(name))]


def compression_of(first_bytes: bytes) -> str:
    """How a file is compressed by its first ten bytes, as `_compression` names it."""
    kinds = (kind for kind, pattern in _FIRST_BYTES.items() if pattern.match(first_bytes))
    return next(kinds, "")


def decompressed(data: bytes, name: str) -> bytes:
    """Decompresses the content of a file by its suffix, as `read_records` does.

    Raises:
        One of `DAMAGE`: it is truncated or corrupt, or expands like a decompression bomb.
    """
    return _decompressed(io.BytesIO(data), name).read()


def suffix(file: str) -> str:
    """The format in the name of a file, such as ".csv" for "a.csv.gz"."""
    return os.path.splitext(uncompressed(storage.shown(file)))[1].lower()


def _suffix(name: str) -> str:
    lower = name.lower()
    if not lower.endswith(_SUFFIXES):  # as most members of a tar
        return ""
    return next(filter(lower.endswith, _SUFFIXES))


def _compression(name: str) -> str:
    """How a file is compressed by its name: ".gz", ".bz2", ".xz", ".zst", or "" if it is plain."""
    return _COMPRESSIONS.get(_suffix(name), "")


def _decompressed(disk: BinaryIO, name: str) -> BinaryIO:
    """Decompresses a file by its suffix.

    Reading a truncated file raises EOFError where its data end, and reading one that expands like a
    decompression bomb raises BadRecord.

    Raises:
        BadRecord: the file is compressed in another way than its name says.
    """
    compression = _compression(name)
    if not compression and name.endswith(".parquet"):
        return disk  # its index is at its end, and on a store a read at the start takes 16 MiB
    first_bytes = disk.read(10)
    disk.seek(0)
    kind = compression_of(first_bytes)
    if kind not in ("", compression):
        raise BadRecord(f"compressed, but not as its name says: rename it to end in {kind}")
    if compression == ".gz":
        # `read` and `readinto` would lose what they have got when they reach the damage of a file.
        return io.BufferedReader(_Bounded(gzip.GzipFile(fileobj=disk).read1, disk), _BUFFER)
    if compression:
        return io.BufferedReader(_Bounded(_Frames(disk, compression).read1, disk), _BUFFER)
    return disk


def check_expansion(content: int, compressed: int) -> None:
    """Checks that some bytes of text may come of some compressed bytes.

    Raises:
        BadRecord: they are too many.
    """
    if content > _FREE_BYTES + MOST_EXPANSION * compressed:
        raise BadRecord("decompression bomb")


class _Bounded(io.RawIOBase):
    """The decompressed bytes of a file, up to the size that is plausible for text.

    Args:
        read1: returns the next bytes, at most as many as asked for; none at the end.
        disk: the compressed file.
    """

    def __init__(self, read1: Callable[[int], bytes], disk: BinaryIO) -> None:
        self._read1, self._disk, self._bytes = read1, disk, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self._read1(len(buffer))
        self._bytes += len(content)
        check_expansion(self._bytes, self._disk.tell())
        buffer[: len(content)] = content
        return len(content)


class _Frames:
    """The decompressed bytes of a Zstandard, bzip2 or xz file of one or more frames.

    The libraries' own readers mistake damage for the end of the data: zstandard's the end of a
    truncated file, and Python's a damaged frame behind another one.
    """

    def __init__(self, disk: BinaryIO, compression: str) -> None:
        self._disk, self._compression = disk, compression
        self._frame: Any = None
        self._input = b""
        # A view, of which the rest is no copy: a call may return a hundred megabytes.
        self._output = memoryview(b"")
        # The most output of one call; zstandard has no such argument, and needs none.
        self._limit = () if compression == ".zst" else (_BUFFER,)

    def read1(self, size: int) -> bytes:
        """Returns the next bytes, at most `size`; none at the end."""
        while not self._output:
            # With a limit, a frame may still hold output of its earlier input.
            if self._frame is None or getattr(self._frame, "needs_input", True):
                self._input = self._input or self._disk.read(_FRAME_INPUT)
                if not self._input:
                    # A frame that is still open at the end of the file was cut off.
                    if self._frame is not None:
                        raise EOFError
                    return b""
            if self._frame is None:
                if self._compression == ".xz":  # may be padded
                    self._input = self._input.lstrip(b"\0")
                    if not self._input:
                        continue
                self._frame = _new_frame(self._compression)
            try:
                self._output = memoryview(self._frame.decompress(self._input, *self._limit))
            except (zstandard.ZstdError, lzma.LZMAError, OSError):
                raise BadRecord("corrupt file") from None
            # Bytes behind the end of a frame begin the next one.
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        content, self._output = self._output[:size], self._output[size:]
        return bytes(content)


def _new_frame(compression: str) -> Any:
    """A decompressor of one frame, with `decompress`, `eof` and `unused_data`."""
    if compression == ".bz2":
        return bz2.BZ2Decompressor()
    if compression == ".xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, _WINDOW)
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
