"""Shards that a run passes over, because their bytes are no longer those that were built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import Location
from data_pipeline.packing.plan import Int64
from trainer.errors import DataError

_NEVER = np.iinfo(np.int64).max


class CorruptShardError(DataError):
    """The bytes of a shard are not those that were built.

    `shard` is its number in its split, or in a mixture.
    """

    def __init__(self, message: str, shard: int) -> None:
        super().__init__(message)
        self.shard = shard


class CorruptShards:
    """From which global example on each shard is skipped.

    Immutable, so that threads may share it.

    Rows of its examples stay where they are and carry no weight. So no other example changes its
    place, and however many examples are gone, a run has to remember the shard only.

    Attributes:
        found: (digest of the dataset, name of the shard, global example) of each, in the order of
            the examples.

    Args:
        shards: (digest of the dataset, name) of all shards, by their numbers.
        found: as the attribute; some may be of datasets that are not there.
    """

    def __init__(
        self, shards: Sequence[tuple[str, str]], found: Iterable[Sequence[str | int]] = ()
    ) -> None:
        self._shards = shards
        named = ((str(digest), str(name), int(first)) for digest, name, first in found)
        self.found = tuple(
            sorted(named, key=lambda shard: (shard[2], *shard))
        )  # whichever replica came first
        first_of = {(digest, name): first for digest, name, first in self.found}
        self._first = np.array(
            [first_of.get(shard, _NEVER) for shard in shards] if first_of else (), dtype=np.int64
        )

    def add(self, shard: int, first: int) -> CorruptShards:
        """Passes over a shard, too, from a global example on."""
        return self.replaced((*self.found, (*self._shards[shard], first)))

    def replaced(self, found: Iterable[Sequence[str | int]]) -> CorruptShards:
        """Passes over these shards instead."""
        return CorruptShards(self._shards, found)

    def has(self, number: Int64, shard: Int64) -> npt.NDArray[np.bool_]:
        """Whether global examples, which are of these shards, are skipped: bool [B]."""
        return (
            number >= self._first[shard]
            if len(self._first)
            else np.zeros(len(number), dtype=np.bool_)
        )

    def without(self, shard: Int64) -> Int64:
        """The ones of some shards that are not skipped."""
        return shard[self._first[shard] == _NEVER] if len(self._first) else shard

    def stand_in(self, at: Location, gone: npt.NDArray[np.bool_], counts: Int64) -> Location:
        """The places to read for examples at `at`, of which some are gone.

        For those, an example of a sound shard.

        Args:
            at: places of B examples.
            gone: bool [B], True for the ones that are skipped.
            counts: int64 [shards], examples in each shard.

        Raises:
            DataError: no shard is sound.
        """
        if not gone.any():
            return at
        sound = np.flatnonzero((counts > 0) & (self._first == _NEVER))
        if not len(sound):
            raise DataError(f"all {len(counts)} shards are corrupt; copy the data again")
        epoch, index = np.where(gone, 0, (at.epoch, at.index))
        return Location(epoch, np.where(gone, sound[0], at.shard), index)
