"""Counts of pairs against a loop, in any memory."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.unit.vectors.corpora import random_text
from trainer.vectors import cooccurrence
from trainer.vectors.cooccurrence import Pairs, Weights, count, harmonic, linear, merged

V = 30
TEXT = random_text(2000, V, seed=1)


def expected(text: np.ndarray, weights: Weights) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for at, word in enumerate(text.tolist()):
        for distance, units in enumerate(weights.units.tolist(), start=1):
            if at + distance >= len(text) or -1 in text[at : at + distance + 1]:
                break
            other = int(text[at + distance])
            counts[word * V + other] += units
            counts[other * V + word] += units
    return dict(counts)


@pytest.mark.parametrize("weights", [harmonic(5), linear(4), linear(1)])
@pytest.mark.parametrize(("block", "memory"), [(10**6, 10**9), (7, 10**9), (50, 64 * 60), (100, 1)])
def test_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights, block: int, memory: int
) -> None:
    monkeypatch.setattr(cooccurrence, "_BLOCK", block)
    found = count(TEXT, weights, V, tmp_path, memory)
    pairs = dict(zip(found.pairs.keys.tolist(), found.pairs.units.tolist(), strict=True))
    assert pairs == expected(TEXT, weights)
    assert (np.diff(found.pairs.keys) > 0).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.keys", "all.units"]
    for i, j, number in found.blocks(37):
        values = [pairs[key] / weights.one for key in (i * V + j).tolist()]
        assert number.tolist() == values


def test_runs_are_written_where_memory_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooccurrence, "_BLOCK", 50)
    runs: list[str] = []
    write = cooccurrence._write
    monkeypatch.setattr(
        cooccurrence, "_write", lambda *arguments: runs.append(arguments[1]) or write(*arguments)
    )
    count(TEXT, linear(4), V, tmp_path, 64 * 60)
    assert len(runs) > 5
    runs.clear()
    count(TEXT, linear(4), V, tmp_path, 10**9)
    assert runs == ["all"]


def test_weights() -> None:
    weights = harmonic(20)
    shares = [Fraction(units, weights.one) for units in weights.units.tolist()]
    assert shares == [Fraction(1, distance) for distance in range(1, 21)]
    assert linear(4).units.tolist() == [4, 3, 2, 1]


def test_merged() -> None:
    generator = np.random.default_rng(0)
    runs = [
        Pairs.summed([Pairs(generator.integers(0, 40, size), np.ones(size, np.int64))])
        for size in (0, 1, 30, 55)
    ]
    for limit in (1, 3, 10, 1000):
        parts = list(merged(runs, limit))
        keys, units = (np.concatenate(each) for each in zip(*parts, strict=True))
        every = np.concatenate([np.repeat(run.keys, run.units) for run in runs])
        assert np.array_equal(np.repeat(keys, units), np.sort(every))
        assert (np.diff(keys) > 0).all()
        assert max(len(part.keys) for part in parts) <= max(limit, len(runs))
    assert list(merged([], 5)) == []


def test_a_text_without_pairs(tmp_path: Path) -> None:
    found = count(np.array([1, -1, 2, -1], np.int32), linear(2), V, tmp_path, 100)
    assert not len(found.pairs.keys)
