"""Groups examples of similar length, to reduce the padding of batches.

Pools of consecutive examples of an epoch are sorted by length and cut into groups, which are read
in random order: lengths 7 2 5 3 in groups of 2 become [2 3] [5 7], or [5 7] [2 3]. The result is a
pure function of the order and the seed; batch size and number of devices play no role. Batches as
large as a group, or a divisor of it, have the least padding. If an epoch ends within a batch, that
batch holds the shortest examples of both epochs.

With groups from one source (`data.group_by_source`), examples change places with others of their
source alone, so groups stay from one source: A9 A2, B4 B8, A3 A7 (sources and lengths) become
A2 A3, B4 B8, A7 A9, in random order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import ExampleOrder, Location
from data_pipeline.order.mixture import SourceGroups
from data_pipeline.packing import Int64
from data_pipeline.reading.config import Config
from samestep.errors import ConfigError
from samestep.examples import PackSpec
from samestep.hashing import combine, name_key

GROUPS = 50  # per pool, as in transformers' `group_by_length`
WIDTH_MULTIPLE = 8  # a batch is as wide as its longest example, rounded up to a multiple of this

_GROUPS = name_key("length groups")


def can_group(spec: PackSpec) -> bool:
    """Whether examples are rows of a task with one sequence each."""
    return spec.parts is not None and spec.parts.choices == 1


def check_groups(config: Config, spec: PackSpec) -> None:
    """Rejects settings that are incompatible with `data.group_by_length`."""
    if not can_group(spec):
        raise ConfigError(
            "data.group_by_length needs rows of a task with one sequence each. Set it to null."
        )
    if config.on_corrupt == "skip" or config.weights or config.on_change == "accept":
        raise ConfigError(
            "data.group_by_length needs an order that never changes. Set it to null, or set "
            "data.on_corrupt=stop data.weights=[] data.on_change=error."
        )
    if config.group_by_source not in (None, config.group_by_length):
        raise ConfigError(
            f"data.group_by_length is {config.group_by_length}, and "
            f"data.group_by_source is {config.group_by_source}. Set both to the same number, or "
            "one of them to null."
        )


class LengthGroups:
    """An `ExampleOrder` in groups of similar length.

    Args:
        order: the order to group.
        positions: returns the number of filled positions of examples, int64 [B].
        size: number of examples in a group.
        finite: whether the order ends after one epoch.
    """

    def __init__(
        self,
        order: ExampleOrder,
        positions: Callable[[Location], Int64],
        size: int,
        seed: int,
        finite: bool,
    ) -> None:
        self._order, self._positions, self._size, self._seed = order, positions, size, seed
        self.examples = order.examples
        self._sources = order if isinstance(order, SourceGroups) else None
        self._end = order.examples if finite else None
        self._pool = functools.lru_cache(maxsize=8)(self._arrange)  # a batch needs one or two

    def _arrange(self, first: int, end: int) -> Int64:
        """A pool's example numbers in the underlying order, grouped."""
        # A stable sort, so equal lengths keep the order's shuffling.
        number = np.arange(first, end)
        length = self._positions(self._order.locate(number))
        if self._sources is None:
            by_length = number[np.argsort(length, kind="stable")]
        else:
            source = self._sources.source_of(number)
            by_length = np.empty_like(number)
            by_length[np.argsort(source, kind="stable")] = number[np.lexsort((length, source))]
        # Groups begin at multiples of their size, as batches do. The first and the last group may
        # belong partly to another epoch, so they are not shuffled.
        head = min(-first % self._size, len(number))
        tail = (len(number) - head) % self._size
        groups = by_length[head + tail :].reshape(-1, self._size)
        turns = np.argsort(
            combine(self._seed, _GROUPS, first, np.arange(len(groups))), kind="stable"
        )
        return np.concatenate(
            (by_length[:head], groups[turns].reshape(-1), by_length[head : head + tail])
        )

    def _bounds(self, number: Int64) -> tuple[Int64, Int64]:
        """The range [first, end) of each example's pool; of one source, it crosses no epochs."""
        size, begin = GROUPS * self._size, number // self.examples * self.examples
        pool = number // size * size
        # Sources have epochs of their own, and groups must stay whole.
        if self._sources is not None:
            return pool, pool + size
        # Pools of 100 in epochs of 250: example 260 is in [250, 300), the rest of its pool.
        return np.maximum(pool, begin), np.minimum(pool + size, begin + self.examples)

    def _grouped(self, number: Int64) -> Int64:
        first, end = self._bounds(number)
        found = np.empty_like(number)
        for begin, stop in set(zip(first.tolist(), end.tolist(), strict=True)):
            rows = np.flatnonzero(first == begin)
            found[rows] = self._pool(begin, stop)[number[rows] - begin]
        return found

    def width(self, number: Int64, most: int) -> int:
        """The width of rows for these examples, at most `most`."""
        longest = int(self._positions(self.locate(number)).max(initial=1))
        return min(most, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)

    def batch(self, start: int, size: int) -> Int64:
        """As in `ExampleOrder`."""
        end = start + size if self._end is None else min(start + size, self._end)
        return np.arange(start, end)

    def rows(self, number: Int64) -> Int64:
        """As in `ExampleOrder`."""
        return number

    def locate(self, number: npt.ArrayLike) -> Location:
        """As in `ExampleOrder`."""
        return self._order.locate(self._grouped(np.asarray(number, dtype=np.int64)))

    def working_set(self, size: int, index: int, count: int) -> int:
        """As in `ExampleOrder`; a batch may read any shard of its pool."""
        return self._order.working_set(GROUPS * self._size, 0, 1)

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        """As in `ExampleOrder`."""
        pool = GROUPS * self._size
        return self._order.shards_ahead(start // pool * pool, pool, 0, 1)
