"""Ranges of a data order's examples that a run passes over."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from data_pipeline.packing.plans import Int64
from trainer.ranges import merged


class Exclusions:
    """Ranges of global example numbers that are passed over; immutable, so that threads may share it.

    Attributes:
        ranges: [first, end) of each, in order and apart.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges = merged(ranges)
        self._first, self._end = np.array(self.ranges, dtype=np.int64).reshape(-1, 2).T
        self._total = np.concatenate(([0], np.cumsum(self._end - self._first)))
        self._kept_before = self._first - self._total[:-1]  # how many are kept before each range

    def __or__(self, other: Exclusions) -> Exclusions:
        return Exclusions((*self.ranges, *other.ranges))

    def before(self, number: int) -> int:
        """How many examples are excluded among those before `number`."""
        return (
            int(np.clip(number - self._first, 0, self._end - self._first).sum())
            if self.ranges
            else 0
        )

    def take(self, start: int, size: int) -> Int64:
        """The next `size` examples from `start` on that are kept: int64 [size]."""
        kept = start - self.before(start) + np.arange(size)
        return kept + self._total[np.searchsorted(self._kept_before, kept, side="right")]

    def after(self, start: int, size: int) -> int:
        """The example after the next `size` ones that are kept."""
        if not self.ranges:
            return start + size
        last = start - self.before(start) + size - 1
        return last + int(self._total[np.searchsorted(self._kept_before, last, side="right")]) + 1

    def kept(self, start: int, end: int) -> list[list[int]]:
        """The ranges of [start, end) that are left."""
        bounds = [
            start,
            *(bound for part in self.ranges for bound in part if start < bound < end),
            end,
        ]
        return [
            [a, b] for a, b in itertools.pairwise(bounds) if b - a > self.before(b) - self.before(a)
        ]
