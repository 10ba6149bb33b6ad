"""Vectors from the SVD of a PPMI matrix (Levy, Goldberg & Dagan 2015).

PMI(i, j) = log p(i, j) / (p(i) p(j)), where p(j) of a context is smoothed: its count to the power
of 0.75, as word2vec does for its random words. PPMI has 0 for negative values and unseen pairs, so
it is sparse. With PPMI = U S V' of rank D, the word vectors are U sqrt(S).

The matrix is never in memory: its entries are computed from the counts on disk, a block at a time,
each time it is multiplied with a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from samestep.hashing import combine, name_key, uniform
from samestep.progress import Progress
from trainer.vectors.cooccurrence import Cooccurrences, Float64s

_SMOOTHING = 0.75
_TEST_MATRIX = name_key("vectors.svd")
_BLOCK = 2**16  # pairs; a block times the width of the other matrix is in memory
_EXTRA = 10  # columns beyond D, for the accuracy of the last ones
_ITERATIONS = 6


@dataclass(frozen=True)
class Matrix:
    """A PPMI matrix [V, V] that can be multiplied.

    Attributes:
        counts: of pairs.
        sums: float64 [V], the counts of each word with all others.
        contexts: float64 [V], the smoothed probability of each context.
    """

    counts: Cooccurrences
    sums: Float64s
    contexts: Float64s

    @classmethod
    def of(cls, counts: Cooccurrences) -> Matrix:
        sums = np.zeros(counts.words)
        for i, _, count in counts.blocks(_BLOCK):
            sums += np.bincount(i, count, minlength=counts.words)
        smoothed = sums**_SMOOTHING
        return cls(counts, sums, smoothed / smoothed.sum())

    def times(self, other: Tensor, progress: Progress, *, transposed: bool = False) -> Tensor:
        """The product of the matrix, or its transpose, and another one: fp64 [V, K]."""
        product = torch.zeros_like(other)
        for i, j, count in self.counts.blocks(_BLOCK):
            # Counts are symmetric. So entry (i, j) of the transpose, which is PPMI(j, i), has the
            # same count as PPMI(i, j), and the roles of the words are exchanged.
            word, context = (j, i) if transposed else (i, j)
            values = np.log(count / (self.sums[word] * self.contexts[context]))
            own = values > 0
            i, j, values = i[own], j[own], values[own]
            rows = other.index_select(0, torch.from_numpy(j))
            product.index_add_(0, torch.from_numpy(i), rows * torch.from_numpy(values)[:, None])
            progress.advance(len(count))
        return product


def train(counts: Cooccurrences, dimensions: int, seed: int) -> Tensor:
    """Computes the word vectors: fp32 [V, D].

    By subspace iteration from a random matrix (Halko et al. 2011, algorithm 4.4).

    Args:
        dimensions: D, at most V.
    """
    width = min(dimensions + _EXTRA, counts.words)
    size = len(counts.pairs.keys)
    with Progress("decomposing", (2 * _ITERATIONS + 2) * size) as progress:
        matrix = Matrix.of(counts)
        elements = uniform(combine(seed, _TEST_MATRIX, np.arange(counts.words * width)))
        # Normally distributed, by inverse transform sampling.
        test = torch.erfinv(torch.from_numpy(2 * elements - 1)).view(counts.words, width)
        basis = torch.linalg.qr(matrix.times(test, progress)).Q
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(matrix.times(basis, progress, transposed=True)).Q
            basis = torch.linalg.qr(matrix.times(basis, progress)).Q
        # PPMI is about Q Q' PPMI, and Q' PPMI is small: its SVD gives the SVD of the whole.
        projected = matrix.times(basis, progress, transposed=True).T
    left, values, _ = torch.linalg.svd(projected, full_matrices=False)
    vectors = (basis @ left)[:, :dimensions] * values[:dimensions].sqrt()
    # The sign of a singular vector is arbitrary: its largest element is made positive.
    largest = vectors.abs().argmax(0)
    negative = vectors[largest, torch.arange(vectors.shape[1])] < 0
    return torch.where(negative, -vectors, vectors).float()
