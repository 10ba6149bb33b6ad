"""A built dataset, opened for training: its examples under one packing, gathered from memory-mapped shards."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import resource
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.manifest import Manifest, ShardInfo
from data_pipeline.order import Location
from data_pipeline.packing import PACKING_VERSION, Int64, PackPlan, count_examples, plan, ranges
from data_pipeline.shards import Shard, Tokens
from data_pipeline.storage import atomic_write
from data_pipeline.tokenization import Tokenizer
from trainer.errors import DataError
from trainer.examples import Examples, PackSpec, Policy
from trainer.hashing import combine, name_key

logger = logging.getLogger(__name__)

MAX_OPEN_SHARDS = 2048  # of a split; 64 lanes in windows of 4 shards use about 320
MAX_PLAN_BYTES = 2**31

_PACKING = name_key("packing")
_EXAMPLE = name_key("example")


@functools.cache
def max_open_shards() -> int:
    """How many shards of a split this process keeps open: `MAX_OPEN_SHARDS`, or what the system allows.

    Each holds a file descriptor, of which processes begin with as few as 256; the first call asks for as many as it
    takes to train and to evaluate, with as many again for all else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * MAX_OPEN_SHARDS if hard == resource.RLIM_INFINITY else min(3 * MAX_OPEN_SHARDS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS grants less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_OPEN_SHARDS if soft == resource.RLIM_INFINITY else max(1, min(MAX_OPEN_SHARDS, soft // 3))


@dataclass(frozen=True)
class Dataset:
    """A folder written by `samestep data build`.

    Attributes:
        path: the folder.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Opens a dataset and checks that every shard is there with its size.

        Raises:
            DataError: the dataset is unfinished, or a shard is missing or cut short.
        """
        folder = Path(path)
        manifest = Manifest.load(folder)
        for shard in manifest.shards:
            file = folder / shard.name
            size = file.stat().st_size if file.is_file() else None
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size} bytes instead of {shard.bytes}"
                raise DataError(
                    f"the shard {file} {found}; copy the dataset again, or build it again with samestep data build, "
                    f"and check it with: samestep data verify {folder}"
                )
        return cls(folder, manifest)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            DataError: the one in the folder is not it.
        """
        tokenizer = Tokenizer.load(self.path / "tokenizer")
        if tokenizer.fingerprint != self.manifest.tokenizer_fingerprint:
            raise DataError(
                f"{self.path / 'tokenizer'} is not the tokenizer that made the shards beside it (fingerprint "
                f"{tokenizer.fingerprint[:12]}, the manifest says {self.manifest.tokenizer_fingerprint[:12]}); "
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
            fix = "raise heldout_fraction" if split == "heldout" else "check the source"
            raise DataError(f"the {split} split of {self.path} is empty; {fix} and build the dataset again")
        return shards

    def open_shard(self, info: ShardInfo) -> Shard:
        """Maps one of the shards."""
        return Shard.open(self.path / info.name, self.manifest.token_dtype)


def packing_digest(spec: PackSpec, policy: Policy) -> str:
    """Hex digest of how documents become examples; equal digests and seeds mean equal examples."""
    text = f"{PACKING_VERSION} {policy} {spec.sequence_length} {spec.prefix} {spec.suffix}"
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class _PackedShard:
    """An open shard and its plan, as narrow as it goes: of a large dataset hundreds are in memory.

    Attributes:
        tokens: [T], the whole file as tokens.
        example_start: [N + 1], as in `PackPlan`.
        pieces: [M, 3], per piece the index of its first token in `tokens`, its length and its column.
    """

    tokens: Tokens
    example_start: npt.NDArray[np.signedinteger[Any]]
    pieces: npt.NDArray[np.signedinteger[Any]]

    @property
    def plan_bytes(self) -> int:
        return self.example_start.nbytes + self.pieces.nbytes


def _split(array: Int64, first: Int64) -> list[Int64]:
    """Cuts an array into the parts that begin at `first` (np.split does the same at several times the cost)."""
    return [array[begin:end] for begin, end in itertools.pairwise([*first.tolist(), len(array)])]


class PackedSplit:
    """The examples of one split under one packing, addressed by (shard, index in the shard).

    Opened shards and their plans are kept, the least recently used dropped first. Threads may share an object.

    Attributes:
        counts: int64 [shards], examples in each shard.

    Args:
        dataset: the dataset.
        split: "train" or "heldout".
        spec: cells of an example, from the objective.
        policy: how documents become examples.
        seed: the run's seed; keys of examples and choices of the packing come from it.

    Raises:
        DataError: the split is empty or a shard is damaged.
        ConfigError: examples are too short to hold text.
    """

    def __init__(self, dataset: Dataset, split: str, spec: PackSpec, policy: Policy, seed: int) -> None:
        self._dataset = dataset
        self._shards = dataset.shards(split)
        self._spec = spec
        self._policy: Policy = policy
        self._seed = seed
        self._open: OrderedDict[int, _PackedShard] = OrderedDict()
        self._lock = threading.Lock()
        self.counts = self._cached_counts(split)
        if not self.counts.any():
            raise DataError(f"the {split} split of {dataset.path} holds no tokens; check the source and build it again")
        self._first_id = np.cumsum(self.counts) - self.counts

    def ids(self, at: Location) -> Int64:
        """The number of each example in the split, counted through the shards in the manifest's order: int64 [B]."""
        return self._first_id[at.shard] + at.index

    def read(self, at: Location, weight: npt.NDArray[np.float32]) -> Examples:
        """Gathers examples; all work is done once per batch or once per shard that is met, never per example.

        Args:
            at: places of B examples.
            weight: float32 [B], copied into the result.

        Raises:
            DataError: a shard is damaged.
        """
        by_shard = np.argsort(at.shard, kind="stable")
        numbers, first_row = np.unique(at.shard[by_shard], return_index=True)
        shards = [self._packed(number) for number in numbers.tolist()]

        index = _split(at.index[by_shard], first_row)
        begin = np.concatenate([shard.example_start[i] for shard, i in zip(shards, index, strict=True)])
        end = np.concatenate([shard.example_start[i + 1] for shard, i in zip(shards, index, strict=True)])
        count = (end - begin).astype(np.int64)

        first_piece = (np.cumsum(count) - count)[first_row]
        index = _split(ranges(begin.astype(np.int64), count), first_piece)
        piece = np.concatenate([shard.pieces[i] for shard, i in zip(shards, index, strict=True)])
        address, length, column = np.ascontiguousarray(piece.T, dtype=np.int64)

        first_token = np.cumsum(length) - length
        index = _split(ranges(address, length), first_token[first_piece])
        tokens = np.concatenate([shard.tokens[i] for shard, i in zip(shards, index, strict=True)])
        if tokens.max() >= self._dataset.manifest.vocab_size:
            self._refuse_damage(numbers)

        row = np.repeat(by_shard, count)
        back = np.argsort(row, kind="stable")
        return Examples(
            tokens=tokens[ranges(first_token[back], length[back])].astype(np.int32),
            row=row[back],
            column=column[back],
            length=length[back],
            key=combine(self._seed, _EXAMPLE, at.epoch, self.ids(at)),
            weight=weight,
            isolated=self._policy != "concat",
        )

    def origin(self, shard: int, index: int) -> npt.NDArray[np.uint32]:
        """The (source file, line) of the document of each piece of one example, in order: uint32 [pieces, 2]."""
        opened = self._dataset.open_shard(self._shards[shard])
        packed = self._plan(shard, opened)
        return opened.origin[packed.document[slice(*packed.example_start[index : index + 2])]]

    def _refuse_damage(self, shards: Int64) -> None:
        names = ", ".join(self._shards[shard].name for shard in shards)
        raise DataError(
            f"a token of {self._dataset.path} is outside the vocabulary of {self._dataset.manifest.vocab_size}, so one "
            f"of these shards is damaged: {names}; find it with: samestep data verify {self._dataset.path}"
        )

    def _packed(self, number: int) -> _PackedShard:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        packed = self._pack(number)  # outside the lock; two threads may make the same one, which does no harm
        with self._lock:
            self._open[number] = packed
            while len(self._open) > 1 and (
                len(self._open) > max_open_shards() or sum(p.plan_bytes for p in self._open.values()) > MAX_PLAN_BYTES
            ):
                self._open.popitem(last=False)
        return packed

    def _plan(self, number: int, shard: Shard) -> PackPlan:
        return plan(shard.length, self._spec, self._policy, int(combine(self._seed, _PACKING, number)[0]))

    def _pack(self, number: int) -> _PackedShard:
        shard = self._dataset.open_shard(self._shards[number])
        packed = self._plan(number, shard)
        narrow: type[np.signedinteger[Any]] = np.int32 if len(shard.tokens) < 2**31 else np.int64
        address = shard.start[packed.document] + packed.begin
        pieces = np.stack((address, packed.length, packed.column), axis=1).astype(narrow)
        return _PackedShard(np.asarray(shard.tokens), packed.example_start.astype(narrow), pieces)

    def _count(self, info: ShardInfo) -> int:
        return count_examples(self._dataset.open_shard(info).length, self._spec, self._policy)

    def _cached_counts(self, split: str) -> Int64:
        """Counts the examples of all shards, or takes the counts from an earlier run with the same packing.

        The cache is a convenience: it may be absent, damaged, unwritable or written by several processes at once.
        """
        parts = (self._dataset.manifest.digest, split, packing_digest(self._spec, self._policy))
        name = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
        file = self._dataset.path / ".cache" / f"{name}.counts"
        try:
            stored = file.read_bytes()
        except OSError:
            stored = b""
        checksum, content = stored[:32], stored[32:]
        if len(content) == 8 * len(self._shards) and hashlib.sha256(content).digest() == checksum:
            return np.frombuffer(content, dtype="<i8").astype(np.int64)
        with ThreadPoolExecutor() as pool:  # threads wait for the disk together; shards are not kept open
            counts = np.array(list(pool.map(self._count, self._shards)), dtype=np.int64)
        content = counts.astype("<i8").tobytes()
        try:
            with atomic_write(file) as out:
                out.write(hashlib.sha256(content).digest() + content)
        except (DataError, OSError) as error:
            logger.debug("example counts are not cached: %s", error)
        return counts
