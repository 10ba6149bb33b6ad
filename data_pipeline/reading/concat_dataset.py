"""Several datasets as one, like `torch.utils.data.ConcatDataset`.

Their shards are numbered consecutively, in the order of the sources. `data_pipeline.order.mixture`
decides which source an example comes from; this module reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import Location, Order
from data_pipeline.packing import Int64
from data_pipeline.reading.dataset import CorruptShardError, Dataset
from data_pipeline.reading.packed_shard import max_open_shards
from data_pipeline.reading.packed_split import PackedSplit
from samestep.errors import ConfigError
from samestep.examples import Examples, PackSpec, Policy

if TYPE_CHECKING:
    from data_pipeline.reading.several_datasets import ConcatDataset


AnyDataset: TypeAlias = "Dataset | ConcatDataset"


def named_sources(dataset: AnyDataset) -> dict[str, Dataset]:
    """The datasets of a mixture by name; a single dataset by its location."""
    return dataset.sources


class ConcatSplit:
    """The examples of one split of several datasets, addressed by (shard, index in the shard).

    Attributes:
        counts: int64 [shards], examples in each shard.
        sizes: name and number of examples of each dataset.

    Arguments and errors as for `PackedSplit`.
    """

    def __init__(
        self, sources: Mapping[str, Dataset], split: str, spec: PackSpec, policy: Policy, seed: int
    ) -> None:
        splits = [PackedSplit(source, split, spec, policy, seed) for source in sources.values()]
        self._splits = splits
        self.sizes = tuple(
            (name, int(each.counts.sum())) for name, each in zip(sources, splits, strict=True)
        )
        self.counts = np.concatenate([split.counts for split in splits])
        # Datasets of 3, 2 and 4 shards begin at shards 0, 3 and 5.
        self._first_shard = np.cumsum([0, *(len(split.counts) for split in splits[:-1])])
        if len(splits) > 1:
            self.keep_open([max_open_shards() // len(splits)] * len(splits))

    def orders(
        self, keys: Mapping[str, str], *, seed: int, lanes: int, window: int
    ) -> dict[str, Order]:
        """The order of each dataset alone, by its key.

        Args:
            keys: name -> key of a dataset.

        Raises:
            ConfigError: a dataset has fewer examples than lanes.
        """
        orders = {}
        for (name, _), split in zip(self.sizes, self._splits, strict=True):
            try:
                orders[keys[name]] = Order(split.counts, seed=seed, lanes=lanes, window=window)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        return orders

    def keep_open(self, most: Sequence[int]) -> None:
        """Limits the number of open shards of each dataset."""
        for split, number in zip(self._splits, most, strict=True):
            split.most_open = max(1, number)

    def source(self, at: Location) -> Int64:
        """The index of each example's dataset: int64 [B]."""
        return np.searchsorted(self._first_shard, at.shard, side="right") - 1

    def ids(self, at: Location) -> Int64:
        """The index of each example in its dataset's split: int64 [B]."""
        ids = np.empty_like(at.index)
        for split, rows, within in self._parts(at):
            ids[rows] = split.ids(within)
        return ids

    def positions(self, at: Location) -> Int64:
        """See `PackedSplit.positions`."""
        filled = np.empty_like(at.index)
        for split, rows, within in self._parts(at):
            filled[rows] = split.positions(within)
        return filled

    def documents(self, at: Location) -> list[list[tuple[str, int]]]:
        """See `PackedSplit.documents`."""
        found: list[list[tuple[str, int]]] = [[] for _ in at.index]
        for split, rows, within in self._parts(at):
            for row, documents in zip(rows.tolist(), split.documents(within), strict=True):
                found[row] = documents
        return found

    def read(self, at: Location, weight: npt.NDArray[np.float32]) -> Examples:
        """See `PackedSplit.read`."""
        parts = []
        for split, rows, within in self._parts(at):
            try:
                parts.append((rows, split.read(within, weight[rows])))
            except CorruptShardError as error:
                # The split knows its own numbering only.
                error.shard += int(self._first_shard[self._splits.index(split)])
                raise
        if len(parts) == 1:
            return parts[0][1]
        from data_pipeline.reading.several_datasets import merge

        return merge(parts, weight)

    def _parts(self, at: Location) -> Iterator[tuple[PackedSplit, Int64, Location]]:
        """For each dataset among the examples: its split, their rows, and their locations in it."""
        if len(self._splits) == 1:
            yield self._splits[0], np.arange(len(at.index)), at
            return
        source = self.source(at)
        for number in sorted(set(source.tolist())):
            rows = np.flatnonzero(source == number)
            within = Location(
                at.epoch[rows], at.shard[rows] - self._first_shard[number], at.index[rows]
            )
            yield self._splits[number], rows, within


def sources_of(dataset: AnyDataset, split: str, single_pass: bool) -> dict[str, Dataset]:
    """The datasets by name; for a single pass, only those that have the split."""
    named = named_sources(dataset)
    if not single_pass:
        return named
    return {
        name: source for name, source in named.items() if source.manifest.splits.get(split)
    } or named
