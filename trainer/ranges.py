"""Ranges [first, end) of global example numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
