"""A dataset on an object store or a web server.

Shards come into the local cache when they are needed.

Its small files are kept in the cache too, so that the rest of the program finds them in a folder,
like a local dataset's. The index of a shard is read without the shard itself, by ranges.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from data_pipeline.format.manifest import MANIFEST, Manifest, ShardInfo
from data_pipeline.reading.cache import ShardCache, locked
from trainer import storage
from trainer.errors import ConfigError, DataError, ObjectNotFoundError, StorageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

INDEX_READERS = 32  # shards whose index is read at a time: most of that is waiting
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SENTENCEPIECE_MODEL = (
    "spiece.model"  # what a tokenizer of SentencePiece has instead of tokenizer.json
)

_READ_BYTES = (
    2**16
)  # at a time; the arrays of a chunk of 2,000 documents, and the headers of the next, lie in it


@dataclass(frozen=True)
class RemoteDataset:
    """Where a remote dataset is.

    Attributes:
        url: its address, without a slash at the end.
        cache: where its shards go.
    """

    url: str
    cache: ShardCache

    def mirror(self, manifest: Manifest) -> Path:
        """The folder of the cache for the dataset's small files, with its tokenizer.

        Raises:
            DataError: the tokenizer cannot be read, or the folder not written.
        """
        self.cache.prepare()
        folder = self.cache.folder.parent / "datasets" / manifest.digest
        with self._claimed(folder / "tokenizer"):
            fetch_tokenizer(self.url, folder)
        return folder

    @contextmanager
    def small_file(self, folder: Path, name: str) -> Iterator[Path]:
        """The copy in `folder` of a small file of the dataset, if it has it.

        Meanwhile others here wait for it.
        """
        file = folder / name
        with self._claimed(file.parent):
            if not file.exists():
                with suppress(StorageError):
                    _fetch(f"{self.url}/{name}", file)
            yield file

    @contextmanager
    def _claimed(self, folder: Path) -> Iterator[None]:
        """Keeps other processes that ask for the same folder waiting."""
        with ExitStack() as claim:
            with self.cache.failure_explained():
                folder.mkdir(parents=True, exist_ok=True)
                claim.enter_context(locked(folder / ".lock"))
            yield

    def address(self, shard: ShardInfo) -> str:
        """Where a shard is."""
        return f"{self.url}/{shard.name}"

    def open(self, shard: ShardInfo) -> BinaryIO:
        """Opens a whole shard, from the cache.

        Raises:
            DataError: it cannot be downloaded or kept.
        """
        return self.cache.open(self.address(shard), shard.sha256, shard.bytes)

    def fetch(self, shard: ShardInfo) -> None:
        """Brings a shard into the cache before it is needed.

        Raises:
            DataError: it cannot be downloaded, or there is no room for it.
        """
        self.cache.fetch(self.address(shard), shard.sha256, shard.bytes)

    def touch(self, shard: ShardInfo) -> None:
        """Marks a shard as used, if the cache has it."""
        self.cache.touch(shard.sha256)

    def open_parts(self, shard: ShardInfo) -> BinaryIO:
        """Opens a shard where it is, to read parts of it, which come unverified."""
        return cast(
            BinaryIO, io.BufferedReader(_Ranges(self.address(shard), shard.bytes), _READ_BYTES)
        )


def load_manifest(location: str) -> Manifest:
    """Reads the manifest of a dataset, given its folder or its address without a slash at the end.

    Raises:
        ConfigError: the address has a query.
        DataError: there is none, or it cannot be read.
    """
    if not storage.is_url(location):
        return Manifest.load(Path(location))
    if "?" in location:
        raise ConfigError(
            f"the address {storage.shown(location)} of a dataset has a query (?...), and the names "
            "of its files cannot "
            "be appended to that; leave it out, and give access by the store's own credentials"
        )
    path = f"{location}/{MANIFEST}"
    try:
        return Manifest.parse(storage.read(path), storage.shown(path))
    except ObjectNotFoundError as error:
        raise DataError(
            f"{error}. There is no finished dataset at that address; put one there with: samestep "
            "data push DIR URL"
        ) from error


def fetch_tokenizer(url: str, folder: Path) -> None:
    """Copies the tokenizer of a remote dataset to `folder`/tokenizer, where it is missing.

    Raises:
        DataError: it cannot be read, or not be written.
    """
    url, folder = f"{url}/tokenizer", folder / "tokenizer"
    model, *settings = TOKENIZER_FILES
    for name in settings:
        if not (folder / name).exists():
            _fetch(f"{url}/{name}", folder / name)
    if (folder / model).exists() or (folder / SENTENCEPIECE_MODEL).exists():
        return
    try:
        _fetch(f"{url}/{model}", folder / model)
    except (
        StorageError
    ) as error:  # a store that may not be listed forbids, as it says, to read what is not there
        try:
            _fetch(f"{url}/{SENTENCEPIECE_MODEL}", folder / SENTENCEPIECE_MODEL)
        except StorageError:
            raise error from None


def _fetch(url: str, file: Path) -> None:
    content = storage.read(url)
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
        content = storage.read_range(self._url, self._position, end)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)
