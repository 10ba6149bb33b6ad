"""The PPMI matrix and its SVD against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.progress import Progress
from tests.unit.vectors.corpora import random_text
from trainer.vectors import ppmi
from trainer.vectors.cooccurrence import Cooccurrences, count, linear
from trainer.vectors.ppmi import Matrix, train

V = 60


@pytest.fixture
def counts(tmp_path: Path) -> Cooccurrences:
    return count(random_text(4000, V, seed=1), linear(3), V, tmp_path, 10**9)


def dense(counts: Cooccurrences) -> np.ndarray:
    x = np.zeros((V, V))
    for i, j, number in counts.blocks(10**6):
        x[i, j] = number
    p_word = x.sum(1) / x.sum()
    p_context = x.sum(0) ** 0.75 / (x.sum(0) ** 0.75).sum()
    with np.errstate(divide="ignore"):
        pmi = np.log(x / x.sum() / np.outer(p_word, p_context))
    return np.maximum(pmi, 0)


def test_matrix(counts: Cooccurrences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppmi, "_BLOCK", 100)
    expected = dense(counts)
    assert 0.1 < (expected > 0).mean() < 0.9
    assert not np.allclose(expected, expected.T)  # smoothing is of contexts only
    matrix, identity = Matrix.of(counts), torch.eye(V, dtype=torch.float64)
    with Progress("", None) as progress:
        found = matrix.times(identity, progress).numpy()
        transposed = matrix.times(identity, progress, transposed=True).numpy()
    assert found == pytest.approx(expected, abs=1e-12)
    assert transposed == pytest.approx(expected.T, abs=1e-12)


@pytest.mark.parametrize(
    ("dimensions", "iterations", "tolerance"),
    [(1, 40, 1e-6), (8, 40, 1e-6), (V, 1, 1e-6), (8, ppmi._ITERATIONS, 1e-2)],
)
def test_svd(
    counts: Cooccurrences,
    monkeypatch: pytest.MonkeyPatch,
    dimensions: int,
    iterations: int,
    tolerance: float,
) -> None:
    # The matrix of a random text has many singular values that are almost equal: the hardest case
    # for subspace iteration.
    monkeypatch.setattr(ppmi, "_ITERATIONS", iterations)
    left, values, _ = np.linalg.svd(dense(counts))
    expected = left[:, :dimensions] * np.sqrt(values[:dimensions])
    found = train(counts, dimensions, seed=0)
    # Signs are arbitrary, so products of vectors are compared.
    error = np.abs(found.double().numpy() @ found.double().numpy().T - expected @ expected.T).max()
    assert error < tolerance * np.abs(expected @ expected.T).max()
    assert torch.equal(found, train(counts, dimensions, seed=0))
    largest = found.abs().argmax(0)
    assert (found[largest, torch.arange(dimensions)] >= 0).all()
