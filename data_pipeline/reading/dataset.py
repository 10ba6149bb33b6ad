"""A built dataset, and the examples of a split under one packing, from memory-mapped shards."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.format.manifest import PASSAGES, SPLIT_UP, Manifest, ShardInfo
from data_pipeline.format.shards import (
    Shard,
    ShardIndex,
    check_pairs,
    check_tokens,
    open_file,
)
from samestep.errors import DataError
from samestep.examples import TaskRow
from samestep.storage import flock, is_url, shown

if TYPE_CHECKING:
    from data_pipeline.reading.cache import ShardCache
    from data_pipeline.reading.passages import Passages
    from data_pipeline.reading.remote import RemoteDataset
    from data_pipeline.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_OPENERS = 16  # threads that open shards of passages; mostly they read and hash


class CorruptShardError(DataError):
    """A shard's bytes differ from those that were built; `shard` is its index in the split."""

    def __init__(self, message: str, shard: int) -> None:
        super().__init__(message)
        self.shard = shard


def load_manifest(location: str) -> Manifest:
    """Reads the manifest of a dataset, given its folder or its URL without a slash at the end.

    Raises:
        ConfigError: the URL has a query.
        DataError: there is no manifest, or it cannot be read.
    """
    if not is_url(location):
        return Manifest.load(Path(location))
    from data_pipeline.reading.remote import read_manifest

    return read_manifest(location)


@dataclass(frozen=True)
class Dataset:
    """A dataset written by `samestep data build`.

    Attributes:
        path: its folder; for a remote dataset, a local folder with its small files.
        remote: location of a remote dataset's shards; None for a local one.
    """

    path: Path
    manifest: Manifest
    remote: RemoteDataset | None = None
    _rows: dict[str, list[TaskRow]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def open(
        cls, path: str | Path, cache: ShardCache | None = None, *, whole: bool = True
    ) -> Dataset:
        """Opens a dataset.

        Args:
            path: its folder, or its URL on an object store or web server.
            cache: for shards of a remote dataset; None is the default cache.
            whole: whether to reject truncated shards of a local dataset.

        Raises:
            DataError: the dataset is unfinished, or a shard is missing or truncated.
        """
        if is_url(str(path)):
            from data_pipeline.reading.cache import ShardCache
            from data_pipeline.reading.remote import RemoteDataset, read_manifest

            # Its shards are checked when they are downloaded, not here by a request for each.
            remote = RemoteDataset(str(path).rstrip("/"), cache or ShardCache.open_folder())
            manifest = read_manifest(remote.url)
            return cls(remote.mirror(manifest), manifest, remote)
        # Only sizes are compared here. Content is verified when a shard is opened.
        folder = Path(path)
        manifest = Manifest.load(folder)
        sizes = _sizes(folder, {shard.name for shard in manifest.shards})
        for shard in manifest.shards:
            size = sizes.get(shard.name)
            if size is None or (whole and size != shard.bytes):
                found = "is missing" if size is None else f"has {size} of {shard.bytes} bytes"
                raise DataError(
                    f"the shard {folder / shard.name} {found}. Copy the dataset again, or rebuild "
                    f"it with samestep data build; check it with: samestep data verify {folder}"
                )
        return cls(folder, manifest)

    @property
    def name(self) -> str:
        """Its location, for messages."""
        return shown(self.remote.url) if self.remote else str(self.path)

    @property
    def sources(self) -> dict[str, Dataset]:
        """Itself, as the only source of a mixture."""
        return {self.name: self}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            DataError: the folder has another one.
        """
        try:
            return self._load_tokenizer()
        except DataError as error:
            if self.remote is None:
                raise
            # The mirror may have been made while another dataset's files were at the address.
            try:
                self.remote.repair_tokenizer(self.path, self._has_tokenizer)
            except DataError as failure:
                logger.warning("cannot download the tokenizer of %s again: %s", self.name, failure)
                raise error from failure
        return self._load_tokenizer()

    @functools.cached_property
    def passages(self) -> Passages:
        """The passages that rows of retrieval name, all of them on this machine.

        Raises:
            DataError: a shard is missing or damaged, or cannot be downloaded.
        """
        from data_pipeline.reading.passages import Passages

        infos = self.manifest.splits.get(PASSAGES, ())
        if not infos:
            raise DataError(f"{self.name} has no passages. Build the dataset again.")
        with ThreadPoolExecutor(_OPENERS) as threads:
            # Remote ones are downloaded, and a map keeps them in the cache.
            shards = list(threads.map(partial(self.open_shard, verify=True), infos))
        return Passages.of(shards, self.manifest.token_dtype)

    def _load_tokenizer(self) -> Tokenizer:
        from data_pipeline.tokenizers.tokenizer import Tokenizer

        self.manifest.check_tokenizer(self.path)
        tokenizer = Tokenizer.load(self.path / "tokenizer", saved=True)
        if tokenizer.fingerprint != self.manifest.tokenizer_fingerprint:
            raise DataError(
                f"{self.path / 'tokenizer'} has fingerprint {tokenizer.fingerprint[:12]}, but the "
                f"dataset was built with {self.manifest.tokenizer_fingerprint[:12]}. Restore that "
                "tokenizer, or build the dataset again."
            )
        if tokenizer.vocabulary.size < self.manifest.vocab_size:  # a forged manifest
            raise DataError(
                f"{self.path / 'tokenizer'} has {tokenizer.vocabulary.size} tokens, and the "
                f"manifest says {self.manifest.vocab_size}. Build the dataset again."
            )
        return tokenizer

    def _has_tokenizer(self) -> bool:
        try:
            self._load_tokenizer()
        except DataError:
            return False
        return True

    def shards(self, split: str) -> tuple[ShardInfo, ...]:
        """The shards of a split.

        Raises:
            DataError: the split holds no documents.
        """
        shards = self.manifest.splits.get(split, ())
        if not shards:
            has_rows = self.manifest.task is not None and any(self.manifest.splits.values())
            if split == "train" and has_rows:
                raise DataError(f"{self.name} has held-out rows only. Train on another dataset.")
            fix = "Raise heldout_fraction" if split == "heldout" else "Check the source"
            if split == "heldout" and sum(s.documents for s in self.manifest.shards) == 1:
                fix = "The dataset has one document. Set training.evaluate_every to null, or "
                fix += SPLIT_UP
            raise DataError(
                f"the {split} split of {self.name} is empty. {fix}, and build the dataset again."
            )
        return shards

    def open_shard(
        self, info: ShardInfo, sentences: bool = False, verify: bool = False, labels: bool = False
    ) -> Shard:
        """Memory-maps a shard, with its `sentences` and `labels` if asked for.

        A remote shard is downloaded first, and its SHA-256 always compared; `verify` also compares
        a local one's, and looks for tokens beyond the vocabulary, by reading all of it.

        Raises:
            DataError: it is missing or damaged, or cannot be downloaded or cached.
        """
        dtype, name = self.manifest.token_dtype, self._location(info)
        if self.remote is None:
            sha256 = info.sha256 if verify else None
            shard = Shard.open(self.path / info.name, dtype, sentences, sha256, labels)
        else:
            with self.remote.open(info) as file:
                shard = Shard.map(file, name, dtype, sentences, labels)
        if sentences and self.manifest.target_file is not None:
            check_pairs(shard, name)
        if verify:
            check_tokens(shard, name, self.manifest.vocab_size)
        return shard

    def _location(self, info: ShardInfo) -> str:
        """Path or address of a shard, for messages."""
        return shown(self.remote.address(info)) if self.remote else str(self.path / info.name)

    def read_index(
        self, info: ShardInfo, sentences: bool = False, labels: bool = False
    ) -> ShardIndex:
        """Reads the document lengths of a shard, without downloading a remote one.

        Raises:
            DataError: it is missing or damaged.
        """
        if self.remote is None:
            return self.open_shard(info, sentences, labels=labels)
        name, dtype = self._location(info), self.manifest.token_dtype
        with self.remote.open_parts(info) as file:
            index = ShardIndex.read(file, name, dtype, sentences, labels)
        # The index came without the shard's hash, so its totals are compared instead.
        if (len(index.length), index.length.sum()) != (info.documents, info.tokens):
            raise DataError(
                f"{name} differs from the shard in the manifest. Push the dataset again."
            )
        if sentences and self.manifest.target_file is not None:
            check_pairs(index, name)
        return index

    def rows(self, split: str, without: Collection[str] = ()) -> list[TaskRow]:
        """The original rows of a task in a split, for metrics; empty ones for shards in `without`.

        Raises:
            DataError: there are none, a shard is missing or damaged, or cannot be downloaded.
        """
        if self.manifest.task is None:
            raise DataError(
                f"{self.name} has documents, not rows of a task. Evaluate on a task's dataset."
            )
        rows: list[TaskRow] = []
        for info in self.shards(split):
            if info.name in without:
                # Numbers of rows count through all shards, skipped ones included.
                rows += [TaskRow(())] * info.documents
                continue
            if info.name not in self._rows:  # an evaluation reads them again and again
                self._rows[info.name] = self._read_rows(info)
            rows += self._rows[info.name]
        return rows

    def _read_rows(self, info: ShardInfo) -> list[TaskRow]:
        from data_pipeline.format.row_lines import read_rows

        name = self._location(info)
        if self.remote is None:
            with open_file(self.path / info.name, info.sha256) as file:
                return read_rows(file, name, info.documents)
        with self.remote.open(info) as file:
            return read_rows(file, name, info.documents)

    @contextmanager
    def small_file(self, name: str) -> Iterator[Path]:
        """Yields the path of a file beside the dataset, which may be missing.

        Other processes that share the folder wait meanwhile, so the file is downloaded or made only
        once; those of a remote dataset share one for each node.
        """
        if self.remote is None:
            file = self.path / name
            with _alone(file.parent):
                yield file
        else:
            with self.remote.small_file(self.path, name) as file:
                yield file


def _sizes(folder: Path, names: Collection[str]) -> dict[str, int]:
    """The bytes of the named files, as far as they are in a folder."""
    # One listing: a network file system answers it with sizes, and single files one by one.
    with os.scandir(folder) as entries:
        found = (entry for entry in entries if entry.name in names and entry.is_file())
        return {entry.name: entry.stat().st_size for entry in found}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process is in here, if the folder can be written and locked."""
    with ExitStack() as held:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            lock = held.enter_context(flock.open_lock(folder / ".lock"))
            # Hundreds of processes that poll would load the server of a network file system.
            flock.flock(lock, flock.LOCK_EX)
        yield
