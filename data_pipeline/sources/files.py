"""Files of documents, here or on an object store, plain or compressed.

Finding, opening, cutting into records.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

import zstandard

from data_pipeline.sources import BadRecord, Record
from trainer import storage
from trainer.errors import ConfigError, DataError

# zstd's own limit of 128 MiB refuses what `zstd --long=31` writes.
_ZSTD_WINDOW = 2**31
_BUFFER = 2**16


def find(patterns: tuple[str, ...], name: str = "source.paths") -> tuple[str, ...]:
    """The files and URLs that match the patterns (`*`, `?`, `**`, `~`), each once, sorted by name.

    Raises:
        ConfigError: there is no pattern, or one matches no file.
        StorageError: a store cannot be listed.
    """
    if not patterns:
        raise ConfigError(f"{name} is empty; name at least one file or pattern")
    found: set[str] = set()
    for pattern in patterns:
        if storage.is_url(pattern):
            matches, hint = storage.glob(pattern), ""
        else:
            matches = [
                path
                for path in glob.glob(os.path.expanduser(pattern), recursive=True)
                if os.path.isfile(path)
            ]
            hint = f", or run in the folder it is relative to, which is not {os.getcwd()}"
        if not matches:
            raise ConfigError(
                f"{name}: no file matches {storage.shown(pattern)!r}; correct the pattern{hint}"
            )
        found.update(matches)
    return tuple(sorted(found))


def read_records(
    files: tuple[str, ...], split: Callable[[BinaryIO], Iterator[tuple[int, bytes]]]
) -> Iterator[Record]:
    """Yields the records of each file, which `split` cuts into (line, bytes) pairs.

    An empty file, and the part of a file behind damage, come as one record with a `problem` each;
    `split` may raise BadRecord to name it.

    Raises:
        DataError: a file cannot be opened or read.
    """
    weights = _weights(files)
    total = max(1, sum(weights))
    before = 0
    for index, path in enumerate(files):
        line = 0
        try:
            with _open(path) as disk:
                weight = weights[index] / max(1, disk.seek(0, io.SEEK_END))
                disk.seek(0)
                with decompressed(disk, storage.shown(path)) as file:
                    for line, data in split(file):
                        yield Record(index, line, data, (before + weight * disk.tell()) / total)
            problem = "empty file" if line == 0 else None
        except EOFError:
            problem = "truncated file"
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError):
            problem = "corrupt file"
        except BadRecord as error:
            problem = str(error)
        except OSError as error:
            raise DataError(
                f"cannot read {storage.shown(path)}: {error.strerror or error}; check that it is "
                "readable"
            ) from error
        before += weights[index]
        if problem:
            yield Record(index, line + 1, b"", before / total, problem)


def _open(path: str) -> BinaryIO:
    return storage.open(path) if storage.is_url(path) else open(path, "rb")


def _weights(files: tuple[str, ...]) -> list[int]:
    """How much of the source each file is, for progress reports.

    Stores are not asked about each of many objects.
    """
    if any(storage.is_url(path) for path in files):
        return [1] * len(files)
    return [os.path.getsize(path) if os.path.exists(path) else 0 for path in files]


def decompressed(disk: BinaryIO, name: str) -> BinaryIO:
    """The bytes of a file by its suffix, `.gz`, `.zst` or plain.

    Reading past where they stop raises EOFError.
    """
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=disk))
    if name.endswith(".zst"):
        return io.BufferedReader(_ZstdFile(disk), _BUFFER)
    return disk


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of a Zstandard file of one or more frames.

    zstandard's own `stream_reader` takes the end of a truncated file for the end of the data.
    """

    def __init__(self, disk: BinaryIO) -> None:
        self._disk = disk
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._output:
            self._input = self._input or self._disk.read(_BUFFER)
            if not self._input:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(
                    max_window_size=_ZSTD_WINDOW
                ).decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count
