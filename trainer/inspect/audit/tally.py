"""Counts how often each example of a source was consumed, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer.inspect.audit.batches import Columns

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass
class Pass:
    """An epoch of a source.

    Attributes:
        seen: bool [N], the examples that were consumed or excluded.
        consumed: number of examples that were consumed.
        repeated: number of times that an example was consumed again.
        excluded: number of examples that the run skipped.
    """

    seen: Bool
    consumed: int = 0
    repeated: int = 0
    excluded: int = 0

    def add(self, example: Int64, times: Int64) -> None:
        """Adds examples, each with the number of times that it was consumed."""
        consumed = np.unique(example[times > 0])
        new = int((~self.seen[consumed]).sum())
        self.consumed += new
        self.repeated += int(times.sum()) - new
        self.seen[consumed] = True

    def exclude(self, example: Int64) -> None:
        """Adds examples that the run skipped."""
        self.excluded += int((~self.seen[example]).sum())
        self.seen[example] = True

    @property
    def missing(self) -> int:
        """Number of examples that were neither consumed nor excluded."""
        return len(self.seen) - self.consumed - self.excluded


@dataclass
class Tally:
    """The passes over one source in one data order.

    An example that has not appeared is lost only if its pass is over, and passes overlap: each lane
    of the order reads its part of a pass and then starts the next pass at once. A pass is over when
    all lanes are beyond it. With four lanes, lane n % 4 reads example n. In groups of examples from
    one source, n counts the examples of the source.

    Grouping by length hides the lanes: it shuffles the examples of a pool. A pass is then over when
    a complete pool holds none of it, and is large enough that each lane has a part in it.

    Attributes:
        size: examples in a pass.
        lanes: of the order.
        pool: examples that are grouped by length at a time; None without grouping.
        own_numbers: whether lanes take turns by the number of examples of the source, not of all.
        passes: by number, from 0.
    """

    size: int
    lanes: int
    pool: int | None = None
    own_numbers: bool = False
    passes: dict[int, Pass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reached = np.full(self.lanes, -1)  # the pass that each lane has come to
        self._added = 0
        self._pool = -1  # of the examples added last
        self._passes_in_pool = np.zeros(0, dtype=np.int64)  # pass of each of its examples so far

    def add(self, rows: Columns, times: Int64, excluded: Bool) -> None:
        """Adds consecutive examples of the order.

        Args:
            rows: their columns `number`, `epoch` and `example`.
            times: how often each was consumed.
            excluded: which of them the run skipped.
        """
        number, epoch, example = rows["number"], rows["epoch"], rows["example"]
        if self.pool is not None:
            self._add_pools(number // self.pool, epoch)
        else:
            if self.own_numbers:
                number = self._added + np.arange(len(number))
            np.maximum.at(self._reached, number % self.lanes, epoch)
        self._added += len(number)
        for each in np.unique(epoch).tolist():
            found = self.passes.setdefault(each, Pass(np.zeros(self.size, dtype=np.bool_)))
            here = epoch == each
            found.add(example[here], times[here])
            found.exclude(example[here & excluded])

    def _add_pools(self, pool: Int64, epoch: Int64) -> None:
        for each in np.unique(pool).tolist():
            if each > self._pool:  # the pool before it is complete
                # A smaller one need not have an example of every lane, as at the end of a run.
                if len(self._passes_in_pool) >= 2 * self.lanes:
                    self._reached[:] = self._passes_in_pool.min()
                self._pool, self._passes_in_pool = each, self._passes_in_pool[:0]
            self._passes_in_pool = np.concatenate((self._passes_in_pool, epoch[pool == each]))

    def is_over(self, number: int) -> bool:
        """Whether all examples of a pass have come, or none can come any more."""
        return bool(self._reached.min() > number) or self.passes[number].missing == 0
