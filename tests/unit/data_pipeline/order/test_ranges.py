"""Ranges of examples."""

from __future__ import annotations

from data_pipeline.order.exclusions import global_number, merged


def test_global_number_skips_excluded_examples() -> None:
    excluded = [[2, 4], [5, 7], [20, 30]]
    kept = [
        number for number in range(40) if not any(first <= number < end for first, end in excluded)
    ]
    assert [global_number(taken, excluded) for taken in range(len(kept))] == kept


def test_merged_ranges_are_in_order_and_apart() -> None:
    assert merged([(7, 9), (1, 3), (3, 5), (8, 12), (2, 4)]) == [[1, 5], [7, 12]]
