"""The global order of examples: a pure function of (examples per shard, seed, lanes, window).

Global example n = 0, 1, 2, ... is the n-th example that a run consumes; nothing here knows about ranks, batches,
workers or buffers, so none of them can change it, and finding example n costs the same for any n.
See docs/data_order.md for the picture.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data_pipeline.packing.plans import Int64, ranges
from trainer.errors import ConfigError
from trainer.hashing import U64, combine, mix, name_key

ORDER_VERSION = (
    1  # part of the loader's state: raise it when `Order` gives other examples for the same input
)

_SHARDS = name_key("shards")
_WINDOW = name_key("window")
_SAMPLE = name_key("sample")
_FEISTEL_ROUNDS = (
    4  # as many as make a Feistel network of random functions look random (Luby and Rackoff 1988)
)
_NEXT_ROUNDS = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Location:
    """Where B examples are.

    Attributes:
        epoch: int64 [B], the pass over the data.
        shard: int64 [B], the shard's number in its split.
        index: int64 [B], the example's number in the shard.
    """

    epoch: Int64
    shard: Int64
    index: Int64

    def __getitem__(self, rows: slice | Int64) -> Location:
        return Location(self.epoch[rows], self.shard[rows], self.index[rows])


class ExampleOrder(Protocol):
    """An order of examples that batches can be cut from.

    Attributes:
        examples: number of examples in one pass.
    """

    examples: int

    def batch(self, start: int, size: int) -> Int64:
        """The global example numbers of rows 0, 1, ... of the global batch [start, start + size)."""

    def rows(self, number: Int64) -> Int64:
        """The same for a global batch of any other examples."""

    def locate(self, number: npt.ArrayLike) -> Location:
        """The places of global examples."""

    def working_set(self, size: int, index: int, count: int) -> int:
        """How many shards replica `index` of `count` reads from at a time, in global batches of `size`."""

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        """The shards that the replica reads from global example `start` on: those in use, then those that come next."""


class Lanes:
    """Deals examples to lanes in turn: global example n is the (n div lanes)-th of lane n mod lanes.

    Attributes:
        lanes: how many there are.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._by_lane = functools.lru_cache(maxsize=8)(self._sort_by_lane)
        self.lanes_of = functools.lru_cache(maxsize=8)(self._find_lanes)

    def batch(self, start: int, size: int) -> Int64:
        """Rows of a global batch are sorted by lane, so that a replica's share stays with few lanes, hence shards."""
        return start + self._by_lane(start % self.lanes, size)

    def rows(self, number: Int64) -> Int64:
        """As in `ExampleOrder`."""
        return number[np.argsort(number % self.lanes, kind="stable")]

    def _sort_by_lane(self, first: int, size: int) -> Int64:
        return np.argsort((first + np.arange(size)) % self.lanes, kind="stable")

    def turn(self, lane: Int64, start: int) -> Int64:
        """How many examples of each lane come before global example `start`."""
        return -((lane - start) // self.lanes)

    def _find_lanes(self, size: int, index: int, count: int) -> Int64:
        """The lanes whose examples replica `index` of `count` takes from global batches of `size`."""
        batches = max(
            1, min(self.lanes // math.gcd(size, self.lanes), 2**20 // size)
        )  # until they repeat, or many
        number = np.arange(batches * size).reshape(batches, size)
        return np.unique(np.sort(number % self.lanes)[:, share(size, index, count)])


class Order(Lanes):
    """The endless shuffled order of training.

    Each epoch permutes the shards, lays their examples end to end and cuts the line into `lanes` equal spans. Global
    example n is the (n div lanes)-th of lane n mod lanes; a lane reads its span of epoch 0, 1, ... in turn, shuffled
    within windows of about `window` shards.

    Args:
        counts: int [shards], examples in each shard.
        seed: the run's seed.
        lanes: independent readers of the line; a constant of the run, unrelated to batch size and world size.
        window: shards' worth of examples that are shuffled together in a lane.

    Raises:
        ConfigError: there are fewer examples than lanes.
    """

    def __init__(
        self, counts: npt.ArrayLike, *, seed: int, lanes: int = 64, window: int = 4
    ) -> None:
        super().__init__(lanes)
        self._counts = np.asarray(counts, dtype=np.int64)
        self._seed = seed
        self.examples = int(self._counts.sum())
        if self.examples < lanes:
            raise ConfigError(
                f"data.lanes is {lanes}, but an epoch has only {self.examples} examples; "
                f"set data.lanes to at most {self.examples}, or use more text or a smaller data.sequence_length"
            )
        self._span, self._longer_spans = divmod(self.examples, lanes)
        together = window * self.examples / len(self._counts)
        self._windows = min(max(1, round(self._span / together)), self._span)
        self._window_key = combine(seed, _WINDOW)
        self._line = functools.lru_cache(maxsize=8)(
            self._lay_line
        )  # one or two epochs are in use at any time

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return len(self._counts)

    def working_set(self, size: int, index: int, count: int) -> int:
        """As in `ExampleOrder`."""
        window = (
            self._span / self._windows * len(self._counts) / self.examples
        )  # in shards; it overlaps one more
        return min(
            len(self._counts), math.ceil(len(self.lanes_of(size, index, count)) * (window + 1))
        )

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        """As in `ExampleOrder`."""
        lane = self.lanes_of(size, index, count)
        return np.concatenate(self.ahead(lane, self.turn(lane, start)))

    def ahead(self, lane: Int64, turn: Int64) -> list[Int64]:
        """The shards of the windows that lanes are in after so many of their examples, and those of the next ones."""
        span = self._span + (lane < self._longer_spans)
        epoch, position = np.divmod(turn, span)
        window = ((position + 1) * self._windows - 1) // span
        windows = []
        for _ in range(2):
            found = []
            first = lane * self._span + np.minimum(lane, self._longer_spans)
            begin, end = (
                first + window * span // self._windows,
                first + (window + 1) * span // self._windows,
            )
            for e in sorted(set(epoch.tolist())):
                shards, ends = self._line(e)
                cells = begin[epoch == e], end[epoch == e] - 1
                place, last = (np.searchsorted(ends, cell, side="right") for cell in cells)
                found.append(shards[ranges(place, last - place + 1)])
            windows.append(np.concatenate(found))
            epoch, window = epoch + (window + 1) // self._windows, (window + 1) % self._windows
        return windows

    def locate(self, number: npt.ArrayLike) -> Location:
        turn, lane = np.divmod(np.asarray(number, dtype=np.int64), self.lanes)
        span = self._span + (lane < self._longer_spans)
        epoch, position = np.divmod(turn, span)
        window = ((position + 1) * self._windows - 1) // span
        begin = window * span // self._windows
        size = (window + 1) * span // self._windows - begin
        key = combine(self._window_key, (epoch * self.lanes + lane) * self._windows + window)
        shuffled = permute(position - begin, size, key)
        cell = lane * self._span + np.minimum(lane, self._longer_spans) + begin + shuffled
        shard, index = np.empty_like(cell), np.empty_like(cell)
        for e in set(epoch.tolist()):
            rows = np.flatnonzero(epoch == e)
            shards, end = self._line(e)
            place = np.searchsorted(end, cell[rows], side="right")
            shard[rows] = shards[place]
            index[rows] = cell[rows] - end[place] + self._counts[shards[place]]
        return Location(epoch, shard, index)

    def _lay_line(self, epoch: int) -> tuple[Int64, Int64]:
        """The epoch's shards in order, and the line's cell after each."""
        shards = np.argsort(
            combine(self._seed, _SHARDS, epoch, np.arange(len(self._counts))), kind="stable"
        )
        return shards, np.cumsum(self._counts[shards])


class SinglePass:
    """One pass for evaluation: the last batch may be short, batches after it are empty.

    The order is a fixed shuffle of the whole split, the same for every seed, so that however few batches an evaluation
    takes, they are a fair sample of all documents, and the same sample each time.
    """

    def __init__(self, counts: npt.ArrayLike) -> None:
        self._end = np.cumsum(np.asarray(counts, dtype=np.int64))
        self.examples = int(self._end[-1]) if len(self._end) else 0

    def batch(self, start: int, size: int) -> Int64:
        """As in `ExampleOrder`."""
        return self.rows(np.arange(start, min(start + size, self.examples)))

    def rows(self, number: Int64) -> Int64:
        """Rows are sorted by shard, so that a replica's share comes from few shards."""
        return number[np.argsort(self._shuffle(number))]

    def locate(self, number: npt.ArrayLike) -> Location:
        cell = self._shuffle(np.asarray(number, dtype=np.int64))
        shard = np.searchsorted(self._end, cell, side="right")
        begin = np.concatenate(([0], self._end))[shard]
        return Location(np.zeros_like(cell), shard, cell - begin)

    def working_set(self, size: int, index: int, count: int) -> int:
        """As in `ExampleOrder`: any batch may take from all of them."""
        return len(self._end)

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        """As in `ExampleOrder`."""
        return np.arange(len(self._end))

    def _shuffle(self, number: Int64) -> Int64:
        return permute(
            number,
            np.full_like(number, self.examples),
            np.full(len(number), _SAMPLE, dtype=np.uint64),
        )


class Replica(Protocol):
    """Which data-parallel replica this process belongs to: `index` of `count`; its rows are split over `devices`."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def devices(self) -> int: ...


def share(size: int, index: int, count: int) -> slice:
    """The rows of a global batch of `size` that replica `index` of `count` takes: contiguous, equal to one row."""
    return slice(index * size // count, (index + 1) * size // count)


def permute(x: Int64, size: Int64, key: U64) -> Int64:
    """Permutes [0, size) under a key, one element each at a time and without a table.

    A generalised Feistel network on a grid of a * b >= size cells, a = ceil(sqrt(size)), walking on from the few cells
    outside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Each element has its own size and key.

    Args:
        x: int64 [N], 0 <= x < size.
        size: int64 [N], at least 1.
        key: uint64 [N].

    Returns:
        int64 [N]; for equal (size, key) distinct x give distinct results in [0, size).
    """
    bound = size.astype(np.uint64)
    a = np.ceil(np.sqrt(size)).astype(np.uint64)
    b = (bound + a - np.uint64(1)) // a
    result = x.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        result[outside] = _feistel(result[outside], a[outside], b[outside], key[outside])
        outside = outside[result[outside] >= bound[outside]]
    return result.astype(np.int64)


def _feistel(x: U64, a: U64, b: U64, key: U64) -> U64:
    right, left = np.divmod(x, a)
    for _ in range(_FEISTEL_ROUNDS // 2):
        left = (left + mix(key ^ right) % a) % a
        right = (right + mix(~key ^ left) % b) % b
        key = key + _NEXT_ROUNDS
    return left + a * right
