"""Groups of examples of about the same length, so that little of a batch is padding.

Pools of consecutive examples of an order are sorted by length and cut into groups, which are taken in a random order.
A pure function of the order and the seed, like the order itself: the size of batches and the number of devices have no
part in it, but batches that are as large as a group, or a part of it, have the least padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from data_pipeline.order import ExampleOrder, Location
from data_pipeline.packing import Int64
from trainer.hashing import combine, name_key

GROUPS = 50  # of a pool, as in transformers' `group_by_length`
WIDTH_MULTIPLE = 8  # rows of a batch are as wide as its longest example, rounded up to this

_GROUPS = name_key("length groups")


class LengthGroups:
    """An order in groups of about the same length.

    Attributes:
        examples: as that of the order.

    Args:
        order: that is grouped.
        cells: how many cells the examples at some places take: int64 [B].
        size: examples of a group.
        seed: the run's.
        finite: whether the order ends after one pass.
    """

    def __init__(
        self, order: ExampleOrder, cells: Callable[[Location], Int64], size: int, seed: int, finite: bool
    ) -> None:
        self._order, self._cells, self._size, self._seed = order, cells, size, seed
        self.examples = order.examples
        self._end = order.examples if finite else None
        self._pool = functools.lru_cache(maxsize=8)(self._arrange)  # a batch is of one or two

    def _arrange(self, pool: int) -> Int64:
        """The numbers, in the order that is grouped, of a pool's examples."""
        first, end = pool * GROUPS * self._size, (pool + 1) * GROUPS * self._size
        number = np.arange(first, end if self._end is None else min(end, self._end))
        by_length = number[np.argsort(self._cells(self._order.locate(number)), kind="stable")]
        whole = len(number) // self._size
        turns = np.argsort(combine(self._seed, _GROUPS, pool, np.arange(whole)), kind="stable")
        groups = by_length[: whole * self._size].reshape(whole, self._size)[turns]
        return np.concatenate((groups.reshape(-1), by_length[whole * self._size :]))

    def _grouped(self, number: Int64) -> Int64:
        pool, place = np.divmod(number, GROUPS * self._size)
        found = np.empty_like(number)
        for each in set(pool.tolist()):
            rows = np.flatnonzero(pool == each)
            found[rows] = self._pool(each)[place[rows]]
        return found

    def width(self, number: Int64, most: int) -> int:
        """How wide rows must be for examples."""
        longest = int(self._cells(self.locate(number)).max(initial=1))
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
        """As in `ExampleOrder`: any batch may take from all that its pool does."""
        return self._order.working_set(GROUPS * self._size, 0, 1)

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        """As in `ExampleOrder`."""
        pool = GROUPS * self._size
        return self._order.shards_ahead(start // pool * pool, pool, 0, 1)
