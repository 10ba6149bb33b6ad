"""Hashes never change: batches and weights of old runs depend on them."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.hashing import combine, mix, signed

MASK = 2**64 - 1


def reference(*parts: int) -> int:
    """The definition, in Python's integers: splitmix64 of (key so far xor next part)."""

    def finalize(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & MASK
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    key = finalize(parts[0])
    for part in parts[1:]:
        key = finalize(key ^ part & MASK)
    return key


@pytest.mark.parametrize("parts", [(5,), (5, 6), (0, MASK, 3), (7, 2**63, 1, 0)])
def test_numbers_and_arrays_give_the_same_hash(parts) -> None:
    assert combine(*parts).tolist() == [reference(*parts)]
    assert combine(*(np.array([part], np.uint64) for part in parts)).tolist() == [reference(*parts)]
    assert combine(*parts, np.arange(3)).tolist() == [reference(*parts, i) for i in range(3)]
    assert combine(np.arange(3), *parts).tolist() == [reference(i, *parts) for i in range(3)]


def test_arrays_broadcast_negative_numbers_wrap_and_nothing_given_is_changed() -> None:
    rows, columns = np.array([[1], [-2]]), np.array([0, 4, 5])
    expected = [[reference(9, r, c) for c in (0, 4, 5)] for r in (1, -2)]
    assert combine(9, rows, columns).tolist() == expected
    assert combine(9, rows, columns).tolist() == expected
    values = np.arange(3, dtype=np.uint64)
    assert mix(values).tolist() == [reference(i) for i in range(3)]
    assert values.tolist() == [0, 1, 2]


def test_signed() -> None:
    assert [signed(2**64 - 1), signed(2**63), signed(5), signed(-5)] == [-1, -(2**63), 5, -5]
