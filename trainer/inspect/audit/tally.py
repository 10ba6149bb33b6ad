"""How often each example of a source was consumed, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer.inspect.audit.batches import Columns

Int64 = npt.NDArray[np.int64]


@dataclass
class Pass:
    """One pass over a source.

    Attributes:
        seen: bool [N], which of its examples were consumed or excluded.
        consumed, repeated, excluded: examples that were consumed; how often one was that had been
            before; examples that the run passed over.
    """

    seen: npt.NDArray[np.bool_]
    consumed: int = 0
    repeated: int = 0
    excluded: int = 0

    def add(self, example: Int64, times: Int64) -> None:
        """Adds examples that were fed so many times each."""
        fed, count = np.unique(np.repeat(example, times), return_counts=True)
        new = int((~self.seen[fed]).sum())
        self.consumed += new
        self.repeated += int(count.sum()) - new
        self.seen[fed] = True

    def exclude(self, example: Int64) -> None:
        """Adds examples that the run passed over."""
        self.excluded += int((~self.seen[example]).sum())
        self.seen[example] = True

    @property
    def missing(self) -> int:
        """Examples that were neither consumed nor excluded."""
        return len(self.seen) - self.consumed - self.excluded


@dataclass
class Tally:
    """The passes over one source in one data order.

    A lane of the order reads its part of each pass in turn, so a pass is over when every lane is
    beyond it. Of an order that is grouped by length, which hides the lanes, it is over when there
    has been a pool without any of it, and with so many examples that all lanes have a part in it.

    Attributes:
        size: examples in a pass.
        lanes: of the order.
        pool: where it is grouped by length, how many examples are arranged anew at a time.
        passes: by their numbers.
    """

    size: int
    lanes: int
    pool: int | None = None
    passes: dict[int, Pass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reached = np.full(self.lanes, -1)
        self._pool = -1  # that the examples added last are of
        self._of_pool = np.zeros(0, dtype=np.int64)  # their passes

    def add(self, fed: Columns, times: Int64, excluded: npt.NDArray[np.bool_]) -> None:
        """Adds consecutive examples of the order.

        Args:
            fed: their columns `number`, `epoch` and `example`.
            times: how often each was fed.
            excluded: which of them the run passed over.
        """
        if self.pool is None:
            np.maximum.at(self._reached, fed["number"] % self.lanes, fed["epoch"])
        else:
            self._add_pools(fed["number"] // self.pool, fed["epoch"])
        for epoch in np.unique(fed["epoch"]).tolist():
            rows = fed["epoch"] == epoch
            each = self.passes.setdefault(epoch, Pass(np.zeros(self.size, dtype=np.bool_)))
            each.add(fed["example"][rows], times[rows])
            each.exclude(fed["example"][rows & excluded])

    def _add_pools(self, pool: Int64, epoch: Int64) -> None:
        for each in np.unique(pool).tolist():
            if each > self._pool:  # the one before is complete
                if len(self._of_pool) >= 2 * self.lanes:
                    self._reached[:] = self._of_pool.min()
                self._pool, self._of_pool = each, self._of_pool[:0]
            self._of_pool = np.concatenate((self._of_pool, epoch[pool == each]))

    def is_over(self, number: int) -> bool:
        """Whether the order has left a pass behind."""
        return bool(self._reached.min() > number) or self.passes[number].missing == 0
