"""The examples of a split of a dataset under one packing."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, repeat
from operator import getitem

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Shard
from data_pipeline.order.example_order import Location
from data_pipeline.packing import Int64, PackPlan
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
from data_pipeline.reading.dataset import CorruptShardError, Dataset
from data_pipeline.reading.packed_shard import (
    MAX_OPEN_SHARDS,
    PackedShard,
    gather,
    gather_labels,
    max_open_shards,
)
from samestep.errors import CorruptError, DataError
from samestep.examples import Examples, PackSpec, Policy
from samestep.hashing import U64, combine, name_key

logger = logging.getLogger(__name__)

MAX_PLAN_BYTES = 2**31  # per split
_INDEX_READERS = 32  # threads that read document lengths of remote shards; mostly they wait
_OPENERS = 16  # threads that open shards; reading and hashing release the interpreter lock

_PACKING = name_key("packing")
_EXAMPLE = name_key("example")


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
        self._is_retrieval = spec.parts is not None and spec.parts.kind == "retrieval"
        if self._is_retrieval:
            dataset.passages  # noqa: B018  # whole on this node before the first step
        self._seed = seed
        # Every seed is scored with the same passages of held-out rows.
        self._choice_seed = 0 if split == "heldout" else seed
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
        if self._is_retrieval:
            from data_pipeline.reading.retrieval_rows import positions

            shards = [opened[shard] for shard in at.shard.tolist()]
            keys = self._keys(at, self._choice_seed)
            return positions(shards, at.index, keys, self._dataset.passages, self._spec)
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
        examples = Examples(
            tokens=tokens.astype(np.int32),
            row=np.repeat(np.arange(len(shards)), end - first),
            column=column,
            length=length,
            key=self._keys(at, self._seed),
            weight=weight,
            isolated=self._policy in ("best_fit", "padded") and self._spec.parts is None,
            random=np.array([shard.random[i] for shard, i in zip(shards, at.index, strict=True)])
            if is_pairs
            else None,
            labels=None if self._spec.parts is None else gather_labels(shards, at.index),
            paired=np.full(len(shards), self._spec.text_pairs),
        )
        if not self._is_retrieval:
            return examples
        from data_pipeline.reading.retrieval_rows import complete

        keys = self._keys(at, self._choice_seed)
        manifest, passages = self._dataset.manifest, self._dataset.passages
        return complete(examples, shards, at.index, keys, passages, self._spec, manifest.digest)

    def _keys(self, at: Location, seed: int) -> U64:
        return combine(seed, _EXAMPLE, at.epoch, self.ids(at))

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
        check_shard(shard, self._spec, self._policy, self._dataset.manifest.files)
        if self._is_retrieval:
            self._dataset.passages.check(shard, self._shards[number].name)
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
            self._shards[number], needs_parts(self._spec, self._policy), self._is_retrieval
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
