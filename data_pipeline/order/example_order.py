"""The global order of examples: a pure function of (examples per shard, seed, lanes, window).

Global example n = 0, 1, 2, ... is the n-th example that a run consumes. The order knows nothing of
ranks, batches, workers or buffers, so none of them can change it, and finding example n costs the
same for any n. docs/data_order.md has the picture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data_pipeline.packing import Int64, ranges
from samestep.errors import ConfigError
from samestep.hashing import U64, combine, mix, name_key

# Part of the loader's state. Raise it when `Order` returns other examples for the same input.
ORDER_VERSION = 1

_SHARDS = name_key("shards")
_WINDOW = name_key("window")
_SAMPLE = name_key("sample")
# Four rounds, each of which updates one half, as in Luby and Rackoff (1988). It mixes well;
# nothing here has to be secure.
_FEISTEL_ROUNDS = 4
_NEXT_ROUNDS = np.uint64(0x9E3779B97F4A7C15)
_OFFSETS = 16  # see `Lanes.offsets`


@dataclass(frozen=True, eq=False)
class Location:
    """Where B examples are stored.

    Attributes:
        epoch: int64 [B].
        shard: int64 [B], the shard's number in its split.
        index: int64 [B], the example's number in the shard.
    """

    epoch: Int64
    shard: Int64
    index: Int64

    def __getitem__(self, rows: slice | Int64) -> Location:
        return Location(self.epoch[rows], self.shard[rows], self.index[rows])


class ExampleOrder(Protocol):
    """An order of examples that global batches are taken from.

    Attributes:
        examples: number of examples in one pass.
    """

    examples: int

    @property
    def width(self) -> Callable[[Int64, int], int] | None:
        """Finds the width of the rows of examples, up to a maximum; None: all rows have that."""

    def batch(self, start: int, size: int) -> Int64:
        """Returns the example numbers of the global batch [start, start + size), in row order."""

    def rows(self, number: Int64) -> Int64:
        """Sorts the example numbers of a global batch into the order of their rows."""

    def locate(self, number: npt.ArrayLike) -> Location:
        """Returns where global examples are stored."""

    def working_set(self, size: int, index: int, count: int) -> int:
        """Returns how many shards replica `index` of `count` has open, for batches of `size`."""

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        """Returns shards to prefetch for a replica, the current window first.

        Shards may appear twice; their order within a window is not the order of reading.

        Args:
            start: first example of a global batch.
        """


class Lanes:
    """Deals examples to lanes in turn: example n is number n // lanes of lane n % lanes."""

    width = None

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._by_lane = functools.lru_cache(maxsize=8)(self._sort_by_lane)
        self._lanes_of = functools.lru_cache(maxsize=8)(self._find_lanes)

    def batch(self, start: int, size: int) -> Int64:
        """Returns a global batch sorted by lane, so that a replica's rows come from few lanes.

        For example, 3 lanes and the batch [4, 10): lanes 1, 2, 0, 1, 2, 0, so the rows are 6, 9, 4,
        7, 5, 8. The first of two replicas takes 6, 9, 4, from lanes 0 and 1 only.
        """
        return start + self._by_lane(start % self.lanes, size)

    def rows(self, number: Int64) -> Int64:
        return number[np.argsort(number % self.lanes, kind="stable")]

    def _sort_by_lane(self, first: int, size: int) -> Int64:
        return np.argsort((first + np.arange(size)) % self.lanes, kind="stable")

    def turn(self, lane: Int64, start: int) -> Int64:
        """Returns how many examples of each lane come before global example `start`."""
        return -((lane - start) // self.lanes)

    def lanes_of(self, start: int, size: int, index: int, count: int) -> Int64:
        """The lanes that replica `index` of `count` reads in global batches from `start` on."""
        return self._lanes_of(start % math.gcd(size, self.lanes), size, index, count)

    def _find_lanes(self, start: int, size: int, index: int, count: int) -> Int64:
        # 4 lanes and batches of 6: two batches have 12 examples, three turns of all lanes, so the
        # third batch uses the same lanes as the first. Batches from example 1 on use others.
        # The lanes of batches repeat every lanes / gcd(size, lanes) batches. One such cycle is
        # looked at, but at most about 2**20 examples; beyond that a lane may be missed.
        batches = min(self.lanes // math.gcd(size, self.lanes), 2**20 // size)
        number = start + np.arange(max(1, batches) * size).reshape(-1, size)
        return np.unique(np.sort(number % self.lanes)[:, share(size, index, count)])

    def offsets(self, size: int) -> range:
        """Examples to begin at from which batches of `size` use different lanes; a few of many."""
        # A batch of whole turns has equally many examples of each lane, wherever it begins.
        different = math.gcd(size, self.lanes) if size % self.lanes else 1
        return range(0, different, -(-different // _OFFSETS))


class Order(Lanes):
    """The endless shuffled order of training.

    Each epoch permutes the shards and joins their examples to one line, which is cut into `lanes`
    spans of equal length. A lane reads its span of epoch 0, 1, ... in turn, shuffled within windows
    of about `window` shards. For example, shards of 3, 4 and 5 examples and 2 lanes: epoch 0 may
    order the shards 2, 0, 1. The line 222220001111 has the spans 222220 and 001111; global examples
    0, 2, 4, ... come from the first, examples 1, 3, 5, ... from the second. So a rank reads few
    shards at a time, and global batches still mix distant parts of the data.

    Args:
        counts: int [shards], examples in each shard.
        seed: the run's seed.
        lanes: number of spans that are read in parallel; a constant of the run, independent of
            batch size and world size.
        window: size of a window, in shards of average size.

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
                f"data.lanes is {lanes}, but an epoch has only {self.examples} examples; set "
                f"data.lanes to at most {self.examples}, use more text, or a smaller "
                "data.sequence_length"
            )
        # 11 examples on 3 lanes are spans of 4, 4 and 3.
        # The first `_longer_spans` lanes have one example more than the others.
        self._span, self._longer_spans = divmod(self.examples, lanes)
        # Each span is cut into a whole number of windows of about `window` average shards each.
        examples_of_window = window * self.examples / len(self._counts)
        self._windows = min(max(1, round(self._span / examples_of_window)), self._span)
        self._window_key = combine(seed, _WINDOW)
        # Usually one or two epochs are in use at a time. Lanes differ in length by one example, so
        # with very few examples they drift further apart.
        self._line = functools.lru_cache(maxsize=8)(self._lay_line)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self._counts)

    def working_set(self, size: int, index: int, count: int) -> int:
        # Windows over small shards overlap more of them. All lanes are in the same window at a
        # time, so the largest sum over lanes counts. Epochs differ little in it: take the first.
        lanes = np.arange(self.lanes)[:, None]
        first, last = self._overlap(0, lanes, np.arange(self._windows))
        shards = last - first + 1  # [lanes, windows]
        most = max(
            int(shards[self.lanes_of(start, size, index, count)].sum(axis=0).max())
            for start in self.offsets(size)
        )
        return min(len(self._counts), most)

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        lane = self.lanes_of(start, size, index, count)
        return np.concatenate(self.ahead(lane, self.turn(lane, start)))

    def ahead(self, lane: Int64, turn: Int64) -> list[Int64]:
        """Returns the shards of the current window of lanes, and of their next one.

        Args:
            lane: int64 [N].
            turn: int64 [N], how many examples each of these lanes has consumed.
        """
        # Lanes may be in different epochs, since their spans differ in length.
        span = self._span + (lane < self._longer_spans)
        epoch, position = np.divmod(turn, span)
        window = self._window_of(position, span)
        windows = []
        for _ in range(2):
            found = []
            for e in sorted(set(epoch.tolist())):
                in_epoch = epoch == e
                first, last = self._overlap(e, lane[in_epoch], window[in_epoch])
                found.append(self._line(e)[0][ranges(first, last - first + 1)])
            windows.append(np.concatenate(found))
            epoch, window = epoch + (window + 1) // self._windows, (window + 1) % self._windows
        return windows

    def _overlap(self, epoch: int, lane: Int64, window: Int64) -> tuple[Int64, Int64]:
        """The first and the last shard on an epoch's line that windows of lanes overlap."""
        ends = self._line(epoch)[1]
        first, span = self._first_of_lane(lane), self._span + (lane < self._longer_spans)
        begin = first + window * span // self._windows
        last = first + (window + 1) * span // self._windows - 1
        return np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, last, side="right")

    def locate(self, number: npt.ArrayLike) -> Location:
        # Which lane, which epoch of it, and which example of its span is this?
        turn, lane = np.divmod(np.asarray(number, dtype=np.int64), self.lanes)
        span = self._span + (lane < self._longer_spans)
        epoch, position = np.divmod(turn, span)
        # Shuffle within the window, with a key of its own.
        window = self._window_of(position, span)
        begin = window * span // self._windows
        size = (window + 1) * span // self._windows - begin
        key = combine(self._window_key, (epoch * self.lanes + lane) * self._windows + window)
        shuffled = permute(position - begin, size, key)
        # From the place on the epoch's line to a shard and an example of it.
        place = self._first_of_lane(lane) + begin + shuffled
        shard, index = np.empty_like(place), np.empty_like(place)
        for e in set(epoch.tolist()):
            rows = np.flatnonzero(epoch == e)
            shards, ends = self._line(e)
            nth = np.searchsorted(ends, place[rows], side="right")
            shard[rows] = shards[nth]
            index[rows] = place[rows] - ends[nth] + self._counts[shards[nth]]
        return Location(epoch, shard, index)

    def _first_of_lane(self, lane: Int64) -> Int64:
        """Where the spans of lanes begin on the line."""
        return lane * self._span + np.minimum(lane, self._longer_spans)

    def _window_of(self, position: Int64, span: Int64) -> Int64:
        """The window of a position in a span; window w begins at w * span // windows."""
        return ((position + 1) * self._windows - 1) // span

    def _lay_line(self, epoch: int) -> tuple[Int64, Int64]:
        """The epoch's shards in order, and where each ends on the line."""
        key = combine(self._seed, _SHARDS, epoch, np.arange(len(self._counts)))
        shards = np.argsort(key, kind="stable")
        return shards, np.cumsum(self._counts[shards])


class SinglePass:
    """One pass for evaluation: the last batch may be short, and batches after it are empty.

    The order is a fixed shuffle of the whole split, the same for every seed. However few batches an
    evaluation takes, they are a fair sample of all documents, and the same sample each time.
    """

    width = None

    def __init__(self, counts: npt.ArrayLike) -> None:
        self._end = np.cumsum(np.asarray(counts, dtype=np.int64))
        self.examples = int(self._end[-1]) if len(self._end) else 0

    def batch(self, start: int, size: int) -> Int64:
        return self.rows(np.arange(start, min(start + size, self.examples)))

    def rows(self, number: Int64) -> Int64:
        """Sorts rows by shard, so that a replica's rows come from few shards."""
        return number[np.argsort(self._shuffle(number))]

    def locate(self, number: npt.ArrayLike) -> Location:
        place = self._shuffle(np.asarray(number, dtype=np.int64))
        shard = np.searchsorted(self._end, place, side="right")
        begin = np.concatenate(([0], self._end))[shard]
        return Location(np.zeros_like(place), shard, place - begin)

    def working_set(self, size: int, index: int, count: int) -> int:
        """Any batch may read from all shards."""
        return len(self._end)

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        return np.arange(len(self._end))

    def _shuffle(self, number: Int64) -> Int64:
        size = np.full_like(number, self.examples)
        return permute(number, size, np.full(len(number), _SAMPLE, dtype=np.uint64))


class Replica(Protocol):
    """The data-parallel replica of this process; its rows are split over `devices`."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def devices(self) -> int: ...


def share(size: int, index: int, count: int) -> slice:
    """Returns the rows of a global batch of `size` that replica `index` of `count` takes.

    Rows are contiguous, and shares differ by at most one row: 10 rows on 3 replicas are 0-2, 3-5,
    6-9.
    """
    return slice(index * size // count, (index + 1) * size // count)


def permute(x: Int64, size: Int64, key: U64) -> Int64:
    """Permutes [0, size) under a key, element by element and without a table.

    A generalized Feistel network on a grid of a * b >= size elements, a = ceil(sqrt(size)). Results
    outside [0, size) are permuted again until they are inside, which keeps the mapping one-to-one
    (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        x: int64 [N], 0 <= x < size.
        size: int64 [N], at least 1.
        key: uint64 [N].

    Returns:
        int64 [N]; for equal (size, key), different x give different results in [0, size).
    """
    # size 10 needs a grid of 4 x 3; on average 12 / 10 walks are enough.
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
    """Permutes the a * b elements left + a * right: each half is shifted by a hash of the other."""
    # Each round adds a function of the other half, which can be subtracted again, so the map
    # is invertible whatever the hash.
    right, left = np.divmod(x, a)
    for _ in range(_FEISTEL_ROUNDS // 2):
        left = (left + mix(key ^ right) % a) % a
        right = (right + mix(~key ^ left) % b) % b
        key = key + _NEXT_ROUNDS
    return left + a * right
