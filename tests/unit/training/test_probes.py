"""The classifier of a probe."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.errors import SamestepError
from trainer.training.observers.probes import Split, accuracy, rows_of


def rows(count: int, seed: int, shift: float = 3.0) -> Split:
    """Three classes; each raises a feature of its own."""
    labels = np.arange(count) % 3
    features = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    features[np.arange(count), labels] += shift
    return Split(features, labels.astype(np.int64))


def test_it_finds_classes_that_lie_apart_and_guesses_where_nothing_tells() -> None:
    assert accuracy(rows(300, 0), rows(300, 1)) > 0.9
    assert accuracy(rows(300, 0, shift=0.0), rows(3000, 1, shift=0.0)) == pytest.approx(
        1 / 3, abs=0.05
    )


def test_a_scale_of_the_features_changes_nothing() -> None:
    train, heldout = rows(90, 0), rows(90, 1)
    scaled = [Split(split.features * 1000, split.labels) for split in (train, heldout)]
    assert accuracy(*scaled) == accuracy(train, heldout)


def test_rows_of_a_single_class_are_no_error() -> None:
    train = rows(30, 0)
    same = Split(train.features, np.zeros(30, np.int64))
    assert accuracy(same, train) == pytest.approx(1 / 3)


def test_skipped_rows_are_left_out_and_features_must_be_finite() -> None:
    table = np.ones((30, 6), np.float32)
    table[4, -1] = 0  # skipped
    assert len(rows_of(table).labels) == 29
    table[3, 2] = np.nan
    with pytest.raises(SamestepError, match="not finite"):
        rows_of(table)
