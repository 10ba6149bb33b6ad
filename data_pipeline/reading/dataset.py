"""A built dataset, opened for training.

Its examples under one packing, gathered from memory-mapped shards.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import resource
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from operator import getitem
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.format.manifest import Manifest, ShardInfo
from data_pipeline.format.shards import Shard, ShardIndex, open_file, read_rows
from data_pipeline.order.example_order import Location
from data_pipeline.packing.plan import Int64, PackPlan
from data_pipeline.packing.policy import (
    check_policy,
    count_shard,
    needs_parts,
    packing_digest,
    plan_shard,
)
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.corruption import CorruptShardError
from data_pipeline.reading.counts import cached_counts
from data_pipeline.reading.packed_shard import PackedShard, gather, gather_labels
from data_pipeline.reading.remote import INDEX_READERS, RemoteDataset, load_manifest
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.errors import CorruptError, DataError
from trainer.examples import Examples, PackSpec, Policy, TaskRow
from trainer.hashing import combine, name_key
from trainer.storage import is_url, shown

logger = logging.getLogger(__name__)

MAX_OPEN_SHARDS = 2048  # of a split; 64 lanes in windows of 4 shards use about 320
MAX_PLAN_BYTES = 2**31
_OPENERS = 16  # threads that open shards; reading and hashing release the interpreter lock

_PACKING = name_key("packing")
_EXAMPLE = name_key("example")


@functools.cache
def max_open_shards() -> int:
    """How many shards of a split this process keeps open.

    `MAX_OPEN_SHARDS`, or what the system allows.

    Each holds a file descriptor, of which processes begin with as few as 256; the first call asks
    for as many as it takes to train and to evaluate, with as many again for all else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        3 * MAX_OPEN_SHARDS if hard == resource.RLIM_INFINITY else min(3 * MAX_OPEN_SHARDS, hard)
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS grants less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return (
        MAX_OPEN_SHARDS
        if soft == resource.RLIM_INFINITY
        else max(1, min(MAX_OPEN_SHARDS, soft // 3))
    )


@dataclass(frozen=True)
class Dataset:
    """A dataset written by `samestep data build`.

    Attributes:
        path: its folder; for a remote dataset, a folder with its small files.
        manifest: what it holds.
        remote: where the shards of a remote dataset are; None for a local one.
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
            path: its folder, of which every shard is looked at, or its address on an object store
                or web server.
            cache: where shards of a remote dataset are kept; None is the default one.
            whole: refuses a local dataset of which a shard is cut short.

        Raises:
            DataError: the dataset is unfinished, or a shard is missing or cut short.
        """
        if is_url(str(path)):
            remote = RemoteDataset(str(path).rstrip("/"), cache or ShardCache.open_folder())
            manifest = load_manifest(remote.url)
            return cls(remote.mirror(manifest), manifest, remote)
        folder = Path(path)
        manifest = Manifest.load(folder)
        for shard in manifest.shards:
            file = folder / shard.name
            size = file.stat().st_size if file.is_file() else None
            if size is None or (whole and size != shard.bytes):
                found = (
                    "is missing" if size is None else f"has {size} bytes instead of {shard.bytes}"
                )
                raise DataError(
                    f"the shard {file} {found}; copy the dataset again, or build it again with "
                    "samestep data build, "
                    f"and check it with: samestep data verify {folder}"
                )
        return cls(folder, manifest)

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return shown(self.remote.url) if self.remote else str(self.path)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            DataError: the one in the folder is not it.
        """
        tokenizer = Tokenizer.load(self.path / "tokenizer")
        if tokenizer.fingerprint != self.manifest.tokenizer_fingerprint:
            raise DataError(
                f"{self.path / 'tokenizer'} is not the tokenizer that made the shards beside it "
                "(fingerprint "
                f"{tokenizer.fingerprint[:12]}, the manifest says "
                f"{self.manifest.tokenizer_fingerprint[:12]}); "
                f"put the right one back or build the dataset again"
            )
        return tokenizer

    def shards(self, split: str) -> tuple[ShardInfo, ...]:
        """The shards of a split.

        Raises:
            DataError: the split holds no documents.
        """
        shards = self.manifest.splits.get(split, ())
        if not shards:
            if (
                split == "train"
                and self.manifest.task is not None
                and any(self.manifest.splits.values())
            ):
                raise DataError(
                    f"{self.name} has held-out rows only, to evaluate on; train on another dataset"
                )
            fix = "raise heldout_fraction" if split == "heldout" else "check the source"
            raise DataError(
                f"the {split} split of {self.name} is empty; {fix} and build the dataset again"
            )
        return shards

    def open_shard(
        self, info: ShardInfo, sentences: bool = False, verify: bool = False, labels: bool = False
    ) -> Shard:
        """Maps one of the shards, with or without its `sentences` and `labels`.

        A remote one is downloaded first.

        To `verify` a local one is to read it through; a remote one is verified in any case.

        Raises:
            DataError: it is missing or damaged, or a remote one cannot be downloaded or kept.
        """
        if self.remote is None:
            sha256 = info.sha256 if verify else None
            return Shard.open(
                self.path / info.name, self.manifest.token_dtype, sentences, sha256, labels
            )
        with self.remote.open(info) as file:
            return Shard.map(
                file, shown(self.remote.address(info)), self.manifest.token_dtype, sentences, labels
            )

    def read_index(self, info: ShardInfo, sentences: bool = False) -> ShardIndex:
        """What one of the shards holds; a remote one is not downloaded for that.

        Raises:
            DataError: it is missing or damaged.
        """
        if self.remote is None:
            return self.open_shard(info, sentences)
        address = shown(self.remote.address(info))
        with self.remote.open_parts(info) as file:
            index = ShardIndex.read(file, address, self.manifest.token_dtype, sentences)
        if (len(index.length), index.length.sum()) != (info.documents, info.tokens):
            raise DataError(
                f"{address} is not the shard that the manifest describes; push the dataset again"
            )
        return index

    def rows(self, split: str, without: Collection[str] = ()) -> list[TaskRow]:
        """The rows of a task that a split keeps for scores, which the held-out one does, by their
        document numbers.

        Those of the shards `without` are empty. They are read once: a run scores them again and
            again.

        Raises:
            DataError: it has none, a shard is missing or damaged, or a remote one cannot be
                downloaded.
        """
        if self.manifest.task is None:
            raise DataError(
                f"{self.name} holds documents, not rows of a task, and cannot be scored as those"
            )
        rows: list[TaskRow] = []
        for info in self.shards(split):
            if info.name in without:
                rows += [TaskRow(())] * info.documents
                continue
            if info.name not in self._rows:
                self._rows[info.name] = self._read_rows(info)
            rows += self._rows[info.name]
        return rows

    def _read_rows(self, info: ShardInfo) -> list[TaskRow]:
        if self.remote is None:
            path = self.path / info.name
            with open_file(path, info.sha256) as file:
                return read_rows(file, str(path), info.documents)
        with self.remote.open(info) as file:
            return read_rows(file, shown(self.remote.address(info)), info.documents)

    @contextmanager
    def small_file(self, name: str) -> Iterator[Path]:
        """Where a file that goes with the dataset is, or is to be made; it may be missing.

        Other processes of this node that use the same remote dataset wait, for it to be fetched or
        made once.
        """
        if self.remote is None:
            yield self.path / name
        else:
            with self.remote.small_file(self.path, name) as file:
                yield file


class PackedSplit:
    """The examples of one split under one packing, addressed by (shard, index in the shard).

    Opened shards and their plans are kept, the least recently used dropped first. Threads may share
    an object.

    Attributes:
        counts: int64 [shards], examples in each shard.
        most_open: shards that are kept open, if the system allows as many.

    Args:
        dataset: the dataset.
        split: "train" or "heldout".
        spec: length of examples, from the objective.
        policy: how documents become examples.
        seed: the run's seed; keys of examples and choices of the packing come from it.

    Raises:
        DataError: the split is empty or a shard is damaged.
        ConfigError: examples are too short to hold text.
    """

    def __init__(
        self, dataset: Dataset, split: str, spec: PackSpec, policy: Policy, seed: int
    ) -> None:
        check_policy(dataset.manifest, dataset.name, spec, policy)
        self._dataset = dataset
        self._shards = dataset.shards(split)
        self._spec = spec
        self._policy: Policy = policy
        self._seed = seed
        self._open: OrderedDict[int, PackedShard] = OrderedDict()
        self._lock = threading.Lock()
        self.most_open = MAX_OPEN_SHARDS
        self.counts = self._cached_counts(split)
        alone = [shard.name for shard in self._shards if shard.documents < 2 and policy == "pairs"]
        if not self.counts.any():
            fix = (
                "raise shard_bytes or heldout_fraction, so that shards hold several,"
                if alone
                else "check the source"
            )
            lacks = (
                "has a single document in each shard, and pairs need a second one"
                if alone
                else "holds no tokens"
            )
            raise DataError(
                f"the {split} split of {dataset.name} {lacks}; {fix} and build it again"
            )
        if alone:
            logger.warning(
                "%d of %d %s shards hold a single document and give no pairs, which need another "
                "one for random "
                "segments: they are left out, %s first; a larger shard_bytes avoids it",
                *(len(alone), len(self._shards), split, alone[0]),
            )
        # Plans are as narrow as they go: of a large dataset hundreds are in memory.
        self._narrow = np.dtype(
            np.int32 if max(shard.bytes for shard in self._shards) < 2**31 else np.int64
        )
        self._first_id = np.cumsum(self.counts) - self.counts
        self._first_document = [0, *accumulate(shard.documents for shard in self._shards)]

    def ids(self, at: Location) -> Int64:
        """The number of each example in the split, counted through the shards in the manifest's
        order: int64 [B].
        """
        return self._first_id[at.shard] + at.index

    def positions(self, at: Location) -> Int64:
        """The filled positions of examples that are rows of a task, of one sequence each.

        Int64 [B].
        """
        opened = self._packed(np.unique(at.shard).tolist())
        ends = [
            opened[shard].rows[index, 5]
            for shard, index in zip(at.shard.tolist(), at.index.tolist(), strict=True)
        ]
        return np.array(ends, dtype=np.int64) + self._spec.suffix

    def read(self, at: Location, weight: npt.NDArray[np.float32]) -> Examples:
        """Gathers examples.

        Tokens are copied piece by piece: slices need no index of every token, which would take
        several times as long to make and to follow.

        Args:
            at: places of B examples.
            weight: float32 [B], copied into the result.

        Raises:
            CorruptShardError: the bytes of a shard are not those that were built.
            DataError: a shard cannot be read.
        """
        is_pairs = self._policy == "pairs"
        numbers = at.shard + len(self._shards) * at.epoch if is_pairs else at.shard
        opened = self._packed(np.unique(numbers).tolist())
        shards = [opened[number] for number in numbers.tolist()]
        starts = [shard.start for shard in shards]
        first, end = (
            np.array(list(map(getitem, starts, i.tolist()))) for i in (at.index, at.index + 1)
        )
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
            isolated=self._policy not in ("concat", "pairs") and self._spec.parts is None,
            random=np.array([shard.random[i] for shard, i in zip(shards, at.index, strict=True)])
            if is_pairs
            else None,
            labels=None if self._spec.parts is None else gather_labels(shards, at.index),
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
                if self._spec.text_pairs and target_file is not None:
                    origin[1::2, 0] += target_file
                found[row] = [(files[file], line) for file, line in origin.tolist()]
        return found

    def _packed(self, numbers: list[int]) -> dict[int, PackedShard]:
        """The shards of these numbers, opened and planned."""
        with self._lock:
            found = {number: self._open[number] for number in numbers if number in self._open}
            for number in found:
                self._open.move_to_end(number)
        # Outside the lock; two threads may make the same one, which does no harm.
        if missing := [number for number in numbers if number not in found]:
            with ThreadPoolExecutor(
                _OPENERS
            ) as pool:  # verifying the many of the beginning takes a while
                packed = pool.map(self._pack, missing)
                found |= {
                    number: self._keep(number, shard)
                    for number, shard in zip(missing, packed, strict=True)
                }
        return found

    def _keep(self, number: int, packed: PackedShard) -> PackedShard:
        with self._lock:
            self._open[number] = packed
            while len(self._open) > 1 and (
                len(self._open) > min(self.most_open, max_open_shards())
                or sum(p.bytes for p in self._open.values()) > MAX_PLAN_BYTES
            ):
                self._open.popitem(last=False)
        return packed

    def _key(self, number: int) -> int:
        return int(combine(self._seed, _PACKING, number)[0])

    def _plan(self, number: int, epoch: int) -> tuple[Shard, PackPlan]:
        texts, labels = needs_parts(self._spec, self._policy), self._spec.parts is not None
        shard = self._dataset.open_shard(self._shards[number], texts, verify=True, labels=labels)
        return shard, plan_shard(shard, self._spec, self._policy, self._key(number), epoch)

    def _pack(self, number: int) -> PackedShard:
        """Plans shard `number`, or under `pairs` shard and epoch in one number."""
        epoch, number = divmod(number, len(self._shards))
        try:
            shard, packed = self._plan(number, epoch)
        except CorruptError as error:
            raise CorruptShardError(str(error), number) from error
        if len(packed.example_start) - 1 != self.counts[number]:
            raise DataError(
                f"{self._shards[number].name} of {self._dataset.name} was damaged when its "
                "examples were counted; "
                f"remove the counts in {self._dataset.path / '.cache'} and start again"
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
        """The examples in each shard, as counted now or by an earlier run with the same packing."""
        parts = [self._dataset.manifest.digest, split, packing_digest(self._spec, self._policy)]
        if self._policy == "pairs":  # the others make as many examples whatever the seed
            parts.append(str(self._seed))
        name = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
        with self._dataset.small_file(f".cache/{name}.counts") as file:
            return cached_counts(file, len(self._shards), self._count_all)

    def _count_all(self) -> Int64:
        # Threads wait for the disk or the network together; shards are not kept open.
        with ThreadPoolExecutor(INDEX_READERS if self._dataset.remote else None) as pool:
            return np.array(list(pool.map(self._count, range(len(self._shards)))), dtype=np.int64)
