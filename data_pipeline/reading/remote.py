"""A dataset on an object store or a web server.

Shards are downloaded to the local cache when they are needed. Small files are mirrored there too,
where the rest of the program finds them as in a local dataset. Document lengths are read by range
requests, without the shards.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from data_pipeline.format.manifest import MANIFEST, Manifest, ShardInfo
from data_pipeline.reading.cache import ShardCache, locked
from data_pipeline.tokenizers.settings import SAVED_FILES
from samestep import storage
from samestep.errors import ConfigError, DataError, ObjectNotFoundError, StorageError
from samestep.storage import objects

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Bytes per range request: enough for the arrays of a chunk of 2,000 documents and the next headers.
_READ_BYTES = 2**16


@dataclass(frozen=True)
class RemoteDataset:
    """The location of a remote dataset.

    Attributes:
        url: its URL, without a slash at the end.
        cache: for its shards.
    """

    url: str
    cache: ShardCache

    def mirror(self, manifest: Manifest) -> Path:
        """Downloads the tokenizer to the cache's folder for the dataset's small files.

        Raises:
            DataError: the tokenizer cannot be read, or the folder cannot be written.
        """
        self.cache.prepare()
        folder = self.cache.folder.parent / "datasets" / manifest.digest
        # Named by the manifest's digest, so another dataset at this URL gets another folder.
        with self._claimed(folder / "tokenizer"):
            fetch_tokenizer(self.url, folder)
        return folder

    def repair_tokenizer(self, folder: Path, is_intact: Callable[[], bool]) -> None:
        """Replaces a mirrored tokenizer by a new download, unless another process has done so.

        The old one stays until the new one is complete.

        Args:
            folder: the mirror.
            is_intact: whether its tokenizer is the dataset's.

        Raises:
            DataError: it cannot be read or written.
        """
        with self._claimed(folder / "tokenizer"):
            if is_intact():
                return
            with self.cache.failure_explained():
                # The name is fixed: what a killed process has left there is removed.
                download = folder / "download"
                shutil.rmtree(download, ignore_errors=True)
                try:
                    fetch_tokenizer(self.url, download)
                    for name in SAVED_FILES:
                        old, new = folder / "tokenizer" / name, download / "tokenizer" / name
                        if new.exists():
                            new.replace(old)
                        else:
                            old.unlink(missing_ok=True)
                finally:
                    shutil.rmtree(download, ignore_errors=True)

    @contextmanager
    def small_file(self, folder: Path, name: str) -> Iterator[Path]:
        """Yields the local copy of a small file, if the dataset has it; other processes wait."""
        file = folder / name
        with self._claimed(file.parent):
            if not file.exists():
                with suppress(StorageError):
                    _fetch(f"{self.url}/{name}", file)
            yield file

    @contextmanager
    def _claimed(self, folder: Path) -> Iterator[None]:
        """Locks a folder against other processes."""
        with ExitStack() as claim:
            with self.cache.failure_explained():
                folder.mkdir(parents=True, exist_ok=True)
                claim.enter_context(locked(folder / ".lock"))
            yield

    def address(self, shard: ShardInfo) -> str:
        """The URL of a shard."""
        return f"{self.url}/{shard.name}"

    def open(self, shard: ShardInfo) -> BinaryIO:
        """Opens a whole shard from the cache.

        Raises:
            DataError: it cannot be downloaded or stored.
        """
        return self.cache.open(self.address(shard), shard.sha256, shard.bytes)

    def fetch(self, shard: ShardInfo) -> None:
        """Downloads a shard to the cache in advance.

        Raises:
            DataError: it cannot be downloaded, or there is no room for it.
        """
        self.cache.fetch(self.address(shard), shard.sha256, shard.bytes)

    def touch(self, shard: ShardInfo) -> None:
        """Marks a cached shard as used."""
        self.cache.touch(shard.sha256)

    def open_parts(self, shard: ShardInfo) -> BinaryIO:
        """Opens a shard for reading parts of it by range requests, unverified."""
        return cast(
            BinaryIO, io.BufferedReader(_Ranges(self.address(shard), shard.bytes), _READ_BYTES)
        )


def read_manifest(url: str) -> Manifest:
    """Reads the manifest of a dataset, given its URL without a slash at the end.

    Raises:
        ConfigError: the URL has a query.
        DataError: there is no manifest, or it cannot be read.
    """
    if "?" in url:
        raise ConfigError(
            f"the dataset's URL {storage.shown(url)} has a query (?...), so names of files "
            "cannot be appended. Leave it out, and use the store's own credentials."
        )
    path = f"{url}/{MANIFEST}"
    try:
        return Manifest.parse(objects.read(path), storage.shown(path))
    except ObjectNotFoundError as error:
        raise DataError(
            f"{error}. There is no finished dataset at that URL. Put one there with: samestep data "
            "push DIR URL"
        ) from error


def fetch_tokenizer(url: str, folder: Path) -> None:
    """Downloads the missing files of a remote dataset's tokenizer to `folder`/tokenizer.

    Raises:
        DataError: they cannot be read or written.
    """
    url, folder = f"{url}/tokenizer", folder / "tokenizer"
    model, *settings, spiece = SAVED_FILES
    for name in settings:
        if not (folder / name).exists():
            _fetch(f"{url}/{name}", folder / name)
    if (folder / model).exists() or (folder / spiece).exists():
        return
    try:
        _fetch(f"{url}/{model}", folder / model)
    except StorageError as error:
        # Any error may mean that the file is missing: without the right to list a bucket, a store
        # answers "forbidden".
        try:
            _fetch(f"{url}/{spiece}", folder / spiece)
        except StorageError:
            raise error from None


def _fetch(url: str, file: Path) -> None:
    content = objects.read(url)
    with storage.atomic_write(file) as out:
        out.write(content)


class _Ranges(io.RawIOBase):
    """A remote file of known size; each read is a request for a range of its bytes."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        )
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._size)
        if end <= self._position:
            return 0
        # At least one byte, or BufferedReader would take it for the end of the file.
        content = objects.read_range(self._url, self._position, end)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)
