"""A built dataset, and the examples of a split under one packing, from memory-mapped shards."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from data_pipeline.format.manifest import SPLIT_UP, Manifest, ShardInfo
from data_pipeline.format.shards import (
    Shard,
    ShardIndex,
    check_pairs,
    check_tokens,
    open_file,
)
from data_pipeline.order.example_order import Location
from data_pipeline.packing.plan import Int64, PackPlan
from data_pipeline.packing.policy import (
    check_policy,
    check_shard,
    count_digest,
    count_shard,
    layout_of,
    needs_parts,
    plan_shard,
)
from data_pipeline.reading.counts import cached_counts, counts_name, read_counts
from data_pipeline.reading.open_files import MAX_OPEN_SHARDS, max_open_shards
from data_pipeline.reading.packed_shard import PackedShard, gather, gather_labels
from samestep.errors import CorruptError, DataError
from samestep.examples import Examples, PackSpec, Policy, TaskRow
from samestep.hashing import combine, name_key
from samestep.storage import flock, is_url, shown

if TYPE_CHECKING:
    from data_pipeline.reading.cache import ShardCache
    from data_pipeline.reading.remote import RemoteDataset
    from data_pipeline.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_PLAN_BYTES = 2**31  # per split
_INDEX_READERS = 32  # threads that read document lengths of remote shards; mostly they wait
_OPENERS = 16  # threads that open shards; reading and hashing release the interpreter lock

_PACKING = name_key("packing")
_EXAMPLE = name_key("example")


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

    def read_index(self, info: ShardInfo, sentences: bool = False) -> ShardIndex:
        """Reads the document lengths of a shard, without downloading a remote one.

        Raises:
            DataError: it is missing or damaged.
        """
        if self.remote is None:
            return self.open_shard(info, sentences)
        name = self._location(info)
        with self.remote.open_parts(info) as file:
            index = ShardIndex.read(file, name, self.manifest.token_dtype, sentences)
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


class PackedSplit:
    """The examples of a split under one packing, addressed by (shard, index in the shard).

    Open shards and their plans are an LRU cache. Thread-safe.

    Attributes:
        counts: int64 [shards], examples in each shard.
        most_open: maximum number of open shards.

    Args:
        split: "train" or "heldout".
        spec: length of examples, from the objective.
        seed: the run's seed, for the examples' keys and the packing's choices.

    Raises:
        DataError: the split is empty or a shard is damaged.
        ConfigError: examples are too short to hold text.
    """

    def __init__(
        self, dataset: Dataset, split: str, spec: PackSpec, policy: Policy, seed: int
    ) -> None:
        check_policy(dataset.manifest, dataset.name, spec, policy)
        spec = layout_of(dataset.manifest, spec)
        self._dataset = dataset
        self._shards = dataset.shards(split)
        self._spec = spec
        self._policy: Policy = policy
        self._seed = seed
        self._open: OrderedDict[int, PackedShard] = OrderedDict()
        self._plan_bytes = 0  # of the shards in `_open`
        self._lock = threading.Lock()
        self.most_open = MAX_OPEN_SHARDS
        self.counts = self._cached_counts(split)
        alone = [shard.name for shard in self._shards if shard.documents < 2 and policy == "pairs"]
        if not self.counts.any():
            reason = "has no tokens. Check the source"
            if alone:
                reason = "has one document per shard, but pairs need two. Raise shard_bytes"
            raise DataError(
                f"the {split} split of {dataset.name} {reason}, and build the dataset again."
            )
        if alone:
            logger.warning(
                "excluding %d of %d %s shards, the first %s: each has a single document, but pairs "
                "need another one for random segments. A larger shard_bytes avoids that.",
                *(len(alone), len(self._shards), split, alone[0]),
            )
        # Hundreds of plans may be in memory, so they use int32 if shards are small enough.
        self._narrow = np.dtype(
            np.int32 if max(shard.bytes for shard in self._shards) < 2**31 else np.int64
        )
        # The first example and the first document of each shard, counted through the split.
        self._first_id = np.cumsum(self.counts) - self.counts
        self._first_document = [0, *accumulate(shard.documents for shard in self._shards)]

    def ids(self, at: Location) -> Int64:
        """The index of each example in the split, in the manifest's order of shards: int64 [B]."""
        return self._first_id[at.shard] + at.index

    def positions(self, at: Location) -> Int64:
        """Number of filled positions of rows of a task with one sequence each: int64 [B]."""
        opened = self._packed(np.unique(at.shard).tolist())
        ends = [
            opened[shard].rows[index, 5]
            for shard, index in zip(at.shard.tolist(), at.index.tolist(), strict=True)
        ]
        return np.array(ends, dtype=np.int64) + self._spec.suffix

    def read(self, at: Location, weight: npt.NDArray[np.float32]) -> Examples:
        """Gathers examples.

        Args:
            at: locations of B examples.
            weight: float32 [B], copied into the result.

        Raises:
            CorruptShardError: a shard's bytes differ from those that were built.
            DataError: a shard cannot be read.
        """
        is_pairs = self._policy == "pairs"
        # Random segments of pairs change with the epoch, so shard 2 of 10 in epoch 3 has a plan of
        # its own, number 32.
        numbers = at.shard + len(self._shards) * at.epoch if is_pairs else at.shard
        opened = self._packed(np.unique(numbers).tolist())
        shards = [opened[number] for number in numbers.tolist()]
        starts = [shard.start for shard in shards]
        first, end = (
            np.array(list(map(getitem, starts, i.tolist()))) for i in (at.index, at.index + 1)
        )
        # Tokens are copied chunk by chunk. An index of every token would take several times as long
        # to make and to follow.
        # Three numbers per chunk: address, length, column.
        pieces = gather((shard.pieces for shard in shards), 3 * first, 3 * end, self._narrow)
        address, length, column = pieces.reshape(-1, 3).T.astype(np.int64)
        sources = chain.from_iterable(
            map(repeat, (shard.tokens for shard in shards), (end - first).tolist())
        )
        tokens = gather(sources, address, address + length, self._dataset.manifest.token_dtype)
        return Examples(
            tokens=tokens.astype(np.int32),
            row=np.repeat(np.arange(len(shards)), end - first),
            column=column,
            length=length,
            key=combine(self._seed, _EXAMPLE, at.epoch, self.ids(at)),
            weight=weight,
            isolated=self._policy in ("best_fit", "padded") and self._spec.parts is None,
            random=np.array([shard.random[i] for shard, i in zip(shards, at.index, strict=True)])
            if is_pairs
            else None,
            labels=None if self._spec.parts is None else gather_labels(shards, at.index),
            paired=np.full(len(shards), self._spec.text_pairs),
        )

    def documents(self, at: Location) -> list[list[tuple[str, int]]]:
        """Returns the (source file, line) of each chunk of B examples, example by example."""
        files, target_file = self._dataset.manifest.files, self._dataset.manifest.target_file
        found: list[list[tuple[str, int]]] = [[] for _ in at.index]
        for shard, epoch in sorted(set(zip(at.shard.tolist(), at.epoch.tolist(), strict=True))):
            opened, packed = self._plan(shard, epoch)
            for row in np.flatnonzero((at.shard == shard) & (at.epoch == epoch)).tolist():
                pieces = slice(*packed.example_start[at.index[row] : at.index[row] + 2])
                origin = opened.origin[packed.document[pieces]]
                # Chunks of pairs alternate: source, target, source, target.
                if self._spec.text_pairs and target_file is not None:
                    origin[1::2, 0] += target_file
                found[row] = [(files[file], line) for file, line in origin.tolist()]
        return found

    def _packed(self, numbers: list[int]) -> dict[int, PackedShard]:
        """Opens and plans shards, by number."""
        with self._lock:
            # Move used shards to the end, so the front is the least recently used.
            found = {number: self._open[number] for number in numbers if number in self._open}
            for number in found:
                self._open.move_to_end(number)
        # Outside the lock: two threads may open the same shard, which does no harm. A run starts
        # with many shards, whose verification takes a while, so threads share it.
        if missing := [number for number in numbers if number not in found]:
            with ThreadPoolExecutor(_OPENERS) as pool:
                for number, packed in zip(missing, pool.map(self._pack, missing), strict=True):
                    found[number] = self._keep(number, packed)
        return found

    def _keep(self, number: int, packed: PackedShard) -> PackedShard:
        with self._lock:
            if number in self._open:  # another thread has opened it, too
                self._plan_bytes -= self._open.pop(number).bytes
            self._open[number] = packed
            self._plan_bytes += packed.bytes
            # Evict by number and by memory, but never the shard just opened.
            while len(self._open) > 1 and (
                len(self._open) > min(self.most_open, max_open_shards())
                or self._plan_bytes > MAX_PLAN_BYTES
            ):
                self._plan_bytes -= self._open.popitem(last=False)[1].bytes
        return packed

    def _key(self, number: int) -> int:
        return int(combine(self._seed, _PACKING, number)[0])

    def _plan(self, number: int, epoch: int) -> tuple[Shard, PackPlan]:
        texts, labels = needs_parts(self._spec, self._policy), self._spec.parts is not None
        shard = self._dataset.open_shard(self._shards[number], texts, verify=True, labels=labels)
        # Again: the counts may come from a file, which a stranger can have written.
        check_shard(shard, self._spec, self._dataset.manifest.files)
        return shard, plan_shard(shard, self._spec, self._policy, self._key(number), epoch)

    def _pack(self, number: int) -> PackedShard:
        """Opens and plans a shard; under `pairs` the number contains the epoch."""
        epoch, number = divmod(number, len(self._shards))
        try:
            shard, packed = self._plan(number, epoch)
        except CorruptError as error:
            raise CorruptShardError(str(error), number) from error
        if packed.examples != self.counts[number]:
            raise DataError(
                f"{self._shards[number].name} of {self._dataset.name} has {packed.examples} "
                f"examples, but {self.counts[number]} were counted. Remove the counts in "
                f"{self._dataset.path / '.cache'} and start again."
            )
        return PackedShard.of(shard, packed, self._narrow, self._first_document[number])

    def _count(self, number: int) -> int:
        shard = self._dataset.read_index(
            self._shards[number], needs_parts(self._spec, self._policy)
        )
        return count_shard(
            shard, self._spec, self._policy, self._key(number), self._dataset.manifest.files
        )

    def _cached_counts(self, split: str) -> Int64:
        """Number of examples in each shard, counted now or by an earlier run."""
        # Only under `pairs` does the number depend on the seed.
        seed = self._seed if self._policy == "pairs" else None
        packing = count_digest(self._spec, self._policy)
        name = counts_name(self._dataset.manifest.digest, split, packing, seed)
        # All processes of a run start at once: without waiting, those that find counts read them.
        counts = read_counts(self._dataset.path / name, len(self._shards))
        if counts is not None:
            return counts
        with self._dataset.small_file(name) as file:
            return cached_counts(file, len(self._shards), self._count_all)

    def _count_all(self) -> Int64:
        # Threads overlap waiting for the disk or the network. Shards do not stay open.
        with ThreadPoolExecutor(_INDEX_READERS if self._dataset.remote else None) as pool:
            return np.array(list(pool.map(self._count, range(len(self._shards)))), dtype=np.int64)
