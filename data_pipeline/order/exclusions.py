"""Ranges of a data order's examples that a run skips."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from data_pipeline.packing import Int64


class Exclusions:
    """Ranges of global example numbers that are skipped. Immutable, so threads can share it.

    For example, with [3, 5) excluded, the steps of 4 examples are 0 1 2 5 and 6 7 8 9.

    Attributes:
        ranges: [first, end) of each range, sorted and disjoint.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges = merged(ranges)
        self._first, self._end = np.array(self.ranges, dtype=np.int64).reshape(-1, 2).T
        self._total = np.concatenate(([0], np.cumsum(self._end - self._first)))
        # Number of kept examples before each range: 2 and 5 for [2, 4) and [7, 9).
        self._kept_before = self._first - self._total[:-1]

    def __or__(self, other: Exclusions) -> Exclusions:
        return Exclusions((*self.ranges, *other.ranges))

    def before(self, number: int) -> int:
        """Returns the number of excluded examples before `number`."""
        if not self.ranges:  # as in most runs, several times a step
            return 0
        return int(np.clip(number - self._first, 0, self._end - self._first).sum())

    def take(self, start: int, size: int) -> Int64:
        """Returns the next `size` examples from `start` on that are kept: int64 [size]."""
        # Number the kept examples 0, 1, ...; then add the excluded ones before each.
        kept = start - self.before(start) + np.arange(size)
        return kept + self._total[np.searchsorted(self._kept_before, kept, side="right")]

    def after(self, start: int, size: int) -> int:
        """Returns the exclusive end of the next `size` kept examples; it may itself be excluded."""
        if not self.ranges:
            return start + size
        last = start - self.before(start) + size - 1
        return last + int(self._total[np.searchsorted(self._kept_before, last, side="right")]) + 1

    def kept(self, start: int, end: int) -> list[list[int]]:
        """Returns the ranges of [start, end) that are kept."""
        inside = [bound for part in self.ranges for bound in part if start < bound < end]
        pairs = itertools.pairwise([start, *inside, end])
        return [[a, b] for a, b in pairs if b - a > self.before(b) - self.before(a)]


def merged(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Returns the same examples in as few ranges as possible, in order."""
    found: list[list[int]] = []
    for first, end in sorted(map(tuple, ranges)):
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found


def global_number(taken: int, excluded: Sequence[Sequence[int]]) -> int:
    """Returns the number of the next global example after `taken` examples that are not excluded.

    With [[2, 4]] excluded, the examples 0, 1, 4, 5, ... are taken: after 3 of them comes number 5.

    Args:
        excluded: ranges in order, merged.
    """
    number = taken
    for first, end in excluded:
        if first > number:
            break
        number += end - first
    return number
