"""Ranges [first, end) of global example numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def merged(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """The same examples in as few ranges, in order."""
    found: list[list[int]] = []
    for first, end in sorted(map(tuple, ranges)):
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found


def global_number(taken: int, excluded: Sequence[Sequence[int]]) -> int:
    """The global example that comes after so many taken ones.

    Args:
        taken: how many.
        excluded: ranges that are passed over, in order and apart.
    """
    number = taken
    for first, end in excluded:
        if first > number:
            break
        number += end - first
    return number
