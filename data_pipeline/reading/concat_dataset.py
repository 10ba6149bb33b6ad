"""Several datasets as one, like `torch.utils.data.ConcatDataset`.

Their shards are numbered consecutively, in the order of the sources. `data_pipeline.order.mixture`
decides which source an example comes from; this module reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import Location, Order
from data_pipeline.order.sources import Source
from data_pipeline.packing.plan import Int64, ranges
from data_pipeline.reading.dataset import CorruptShardError, Dataset, PackedSplit
from data_pipeline.reading.open_files import max_open_shards
from samestep.errors import ConfigError, DataError
from samestep.examples import Examples, Labels, PackSpec, Policy

if TYPE_CHECKING:
    from data_pipeline.reading.cache import ShardCache
    from data_pipeline.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ConcatDataset:
    """The datasets of a mixture, by name."""

    sources: dict[str, Dataset]

    @classmethod
    def open(
        cls, sources: Sequence[Source], cache: ShardCache | None, *, whole: bool = True
    ) -> ConcatDataset:
        """Opens datasets with the same tokenizer; `whole` as for `Dataset.open`.

        Raises:
            ConfigError: a dataset is listed twice.
            DataError: one is unfinished or damaged, or has another tokenizer.
        """
        opened: dict[str, Dataset] = {}
        for source in sources:
            dataset = Dataset.open(source.path, cache, whole=whole)
            # Ids of different tokenizers mean different tokens, which nothing later would notice.
            for other in opened.values():
                if dataset.manifest.tokenizer_fingerprint != other.manifest.tokenizer_fingerprint:
                    raise DataError(
                        f"{other.name} and {dataset.name} were built with different tokenizers. "
                        "Build one of them again with "
                        f"tokenizer.path={other.path / 'tokenizer'}."
                    )
                if dataset.manifest.digest == other.manifest.digest:
                    raise ConfigError(
                        f"data.sources lists the same dataset twice, {other.name} and "
                        f"{dataset.name}. List it once, with the sum of the weights."
                    )
            opened[source.label] = dataset
        return cls(opened)

    @property
    def name(self) -> str:
        """Their locations, for messages."""
        return ", ".join(dataset.name for dataset in self.sources.values())

    @property
    def tokenizer(self) -> Tokenizer:
        """Their common tokenizer.

        Raises:
            DataError: the first dataset's folder has another one.
        """
        return next(iter(self.sources.values())).tokenizer


AnyDataset: TypeAlias = Dataset | ConcatDataset


def named_sources(dataset: AnyDataset) -> dict[str, Dataset]:
    """The datasets of a mixture by name; a single dataset by its location."""
    return dataset.sources if isinstance(dataset, ConcatDataset) else {dataset.name: dataset}


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
        return parts[0][1] if len(parts) == 1 else _merge(parts, weight)

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


def _merge(parts: Sequence[tuple[Int64, Examples]], weight: npt.NDArray[np.float32]) -> Examples:
    """Merges examples of several datasets into one batch.

    Args:
        parts: the rows of the batch that come from a dataset, and their examples.
    """
    rows, examples = zip(*parts, strict=True)
    # Rows 0 and 2 of the batch come from dataset A, row 1 from B. A counts its rows 0 and 1, which
    # become 0 and 2; then chunks are sorted by row.
    row = np.concatenate([mine[each.row] for mine, each in parts])
    pieces = np.argsort(row, kind="stable")
    length = np.concatenate([each.length for each in examples])
    tokens = ranges((np.cumsum(length) - length)[pieces], length[pieces])
    by_row = np.argsort(np.concatenate(rows))
    random = [each.random for each in examples if each.random is not None]
    paired = [each.paired for each in examples if each.paired is not None]
    return Examples(
        tokens=np.concatenate([each.tokens for each in examples])[tokens],
        row=row[pieces],
        column=np.concatenate([each.column for each in examples])[pieces],
        length=length[pieces],
        key=np.concatenate([each.key for each in examples])[by_row],
        weight=weight,
        isolated=examples[0].isolated,
        random=np.concatenate(random)[by_row] if random else None,
        paired=np.concatenate(paired)[by_row] if paired else None,
        labels=_merge_labels([each.labels for each in examples if each.labels is not None], by_row),
    )


def _merge_labels(parts: Sequence[Labels], by_row: Int64) -> Labels | None:
    """Merges the labels of several datasets; `by_row` sorts their rows."""
    if not parts:
        return None
    count = np.concatenate([each.count for each in parts])
    values = ranges((np.cumsum(count) - count)[by_row], count[by_row])
    return Labels(
        values=np.concatenate([each.values for each in parts])[values],
        count=count[by_row],
        document=np.concatenate([each.document for each in parts])[by_row],
        begin=np.concatenate([each.begin for each in parts])[by_row],
        examples=np.concatenate([each.examples for each in parts])[by_row],
    )
