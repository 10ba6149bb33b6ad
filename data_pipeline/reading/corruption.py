"""Shards that a run skips because their bytes differ from those that were built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import Location
from data_pipeline.packing import Int64
from samestep.errors import DataError

_NEVER = np.iinfo(np.int64).max


class Announcements(Protocol):
    """Numbers of 0 or more that the replicas of a run tell each other about blocks of steps."""

    def announce(self, block: int, number: int) -> None:
        """Tells this replica's number for a block. Called by any thread."""

    def largest(self, block: int) -> int:
        """The largest number of all replicas for a block; waits until all have told theirs."""


class OwnAnnouncements:
    """`Announcements` of a single replica."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def announce(self, block: int, number: int) -> None:
        self._numbers[block] = number

    def largest(self, block: int) -> int:
        # Alone, a replica has announced a block by the time it takes it.
        return self._numbers.pop(block)


class CorruptShards:
    """The skipped shards, each with the global example from which on it is skipped. Immutable.

    Rows of their examples stay in place, with weight 0. So no other example moves, and a run has to
    remember only the shards, not their examples.

    Attributes:
        found: (digest of the dataset, name of the shard, global example), sorted by example.

    Args:
        shards: (digest of the dataset, name) of all shards, by index.
        found: as the attribute; datasets that are not in `shards` are ignored.
    """

    def __init__(
        self, shards: Sequence[tuple[str, str]], found: Iterable[Sequence[str | int]] = ()
    ) -> None:
        self._shards = shards
        named = ((str(digest), str(name), int(first)) for digest, name, first in found)
        # Sorted, so the result does not depend on which replica found a shard first.
        self.found = tuple(sorted(named, key=lambda shard: (shard[2], *shard)))
        # The earliest entry of a shard counts, so it is stored last.
        first_of = {(digest, name): first for digest, name, first in reversed(self.found)}
        self._first = np.array(
            [first_of.get(shard, _NEVER) for shard in shards] if first_of else (), dtype=np.int64
        )

    def has(self, number: Int64, shard: Int64) -> npt.NDArray[np.bool_]:
        """Whether global examples in these shards are skipped: bool [B]."""
        if not len(self._first):
            return np.zeros(len(number), dtype=np.bool_)
        return number >= self._first[shard]

    def without(self, shard: Int64) -> Int64:
        """The given shards without those that are skipped."""
        return shard[self._first[shard] == _NEVER] if len(self._first) else shard

    def stand_in(self, at: Location, gone: npt.NDArray[np.bool_], counts: Int64) -> Location:
        """Replaces the locations of skipped examples by an example of an intact shard.

        Args:
            gone: bool [B], True for skipped examples.
            counts: int64 [shards], examples in each shard.

        Raises:
            DataError: no shard is intact.
        """
        if not gone.any():
            return at
        sound = np.flatnonzero((counts > 0) & (self._first == _NEVER))
        if not len(sound):
            raise DataError(f"all {len(counts)} shards are corrupt. Copy the dataset again.")
        epoch, index = np.where(gone, 0, (at.epoch, at.index))
        return Location(epoch, np.where(gone, sound[0], at.shard), index)
