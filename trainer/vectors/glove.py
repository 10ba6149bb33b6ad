"""GloVe: weighted least squares on the logarithms of counts (Pennington et al. 2014).

The cost of a pair with count x is f(x) (w v + b + c - log x)^2 / 2, with the vector w and the bias
b of its first word, v and c of its second one, and f(x) = min(1, (x / x_max)^0.75). AdaGrad divides
the rate times the gradient by the root of the sum of the earlier squares of this product, which
begins at 1. That the squares include the rate is as in Stanford's program (glove.c of
https://github.com/stanfordnlp/GloVe), and so is the result, the sum of a word's two vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from samestep.hashing import combine, name_key, uniform
from samestep.progress import Progress
from samestep.storage import atomic_write
from trainer.vectors.cooccurrence import Cooccurrences
from trainer.vectors.settings import Settings
from trainer.vectors.work import State, check_finite, random_table

_ORDER = name_key("vectors.order")
_INITIAL = name_key("vectors.glove")
_EXPONENT = 0.75
BLOCK = 2**18  # pairs
_ENTRY = np.dtype([("i", "<i4"), ("j", "<i4"), ("count", "<f4")])
_BYTES_PER_ENTRY = 48  # in memory while they are sorted: hash, order, entry, and copies


class Batch(NamedTuple):
    """Pairs of words.

    Attributes:
        i, j: int64 [B].
        counts: fp32 [B].
    """

    i: Tensor
    j: Tensor
    counts: Tensor


def shuffle(counts: Cooccurrences, path: Path, seed: int, memory: int) -> None:
    """Writes all pairs in a random order, by the hashes of their keys.

    Args:
        memory: about the bytes that sorting takes; if the pairs need more, they are read several
            times, each time for those with the next hashes.
    """
    total = len(counts.pairs.keys)
    parts = -(-total * _BYTES_PER_ENTRY // memory)
    with Progress("shuffling pairs", parts * total) as progress, atomic_write(path) as file:
        for part in range(parts):
            hashes, entries = [], []
            for i, j, count in counts.blocks(BLOCK):
                hashed = combine(seed, _ORDER, i, j)
                # With 3 parts, those with the lowest third of hashes come first: the order is that
                # of all hashes, whatever the number of parts.
                own = (uniform(hashed) * parts).astype(np.int64) == part
                entry = np.empty(np.count_nonzero(own), _ENTRY)
                entry["i"], entry["j"], entry["count"] = i[own], j[own], count[own]
                hashes.append(hashed[own])
                entries.append(entry)
                progress.advance(len(i))
            order = np.argsort(np.concatenate(hashes), kind="stable")
            file.write(np.concatenate(entries)[order].tobytes())


def _difference(own: Tensor, other: Tensor, batch: Batch, x_max: float) -> tuple[Tensor, Tensor]:
    """The error of each pair's logarithm, and its weight f(x): fp32 [B]."""
    predicted = (own[:, :-1] * other[:, :-1]).sum(1) + own[:, -1] + other[:, -1]
    weight = (batch.counts / x_max).clamp(max=1.0) ** _EXPONENT
    return predicted - batch.counts.log(), weight


def step(vectors: dict[str, Tensor], batch: Batch, rate: float, x_max: float) -> float:
    """Takes a step of AdaGrad, in place; returns the sum of the pairs' costs before it.

    A word that is in several pairs of the batch gets the sum of their updates, and their squares
    are added one by one: as if they came one after the other, computed with the same vectors.

    Args:
        vectors: fp32 "words" and "contexts", each [V, D + 1], of which the last column is the bias;
            and the sums of squares, "words.squares" and "contexts.squares".
    """
    own, other = vectors["words"][batch.i], vectors["contexts"][batch.j]
    difference, weight = _difference(own, other, batch, x_max)
    # The rate comes first, as in glove.c (`fdiff *= eta`), so the squares contain its square.
    slope = rate * (weight * difference)[:, None]
    ones = torch.ones(len(slope), 1)
    # The derivative by the bias is the slope itself.
    changes = {
        "words": (batch.i, slope * torch.cat([other[:, :-1], ones], 1)),
        "contexts": (batch.j, slope * torch.cat([own[:, :-1], ones], 1)),
    }
    for name, (rows, change) in changes.items():
        squares = vectors[f"{name}.squares"]
        # Stanford's program also divides by the sum before the new square is added.
        vectors[name].index_add_(0, rows, change / squares[rows].sqrt(), alpha=-1)
        squares.index_add_(0, rows, change**2)
    return float((weight * difference**2).sum()) / 2


def initial_vectors(words: int, dimensions: int, seed: int) -> dict[str, Tensor]:
    """The vectors and biases at the start: uniform in (-0.5, 0.5) / D, as in Stanford's program."""
    width = dimensions + 1
    vectors = {}
    for kind, name in enumerate(("words", "contexts")):
        keys = combine(seed, _INITIAL, kind, np.arange(words * width))
        vectors[name] = random_table(keys, words, dimensions)
        vectors[f"{name}.squares"] = torch.ones(words, width)
    return vectors


def train(
    path: Path,
    words: int,
    settings: Settings,
    state: State,
    advance: Callable[[int, str], None],
) -> Tensor:
    """Trains vectors: fp32 [V, D].

    Args:
        path: the shuffled pairs.
        words: V.
        state: continues with the first block that it does not have.
        advance: called with the number of pairs of each block, and its mean cost as text.

    Raises:
        ConfigError: the vectors grow without bound.
    """
    vectors = state.load(lambda: initial_vectors(words, settings.dimensions, settings.seed))
    # Pairs are read in the order of the file, in every epoch, so memory holds one block.
    entries = np.memmap(path, _ENTRY, mode="r")
    blocks = -(-len(entries) // BLOCK)
    for number in range(state.done, settings.epochs * blocks):
        first = number % blocks * BLOCK
        block = np.asarray(entries[first : first + BLOCK])
        i, j = (torch.from_numpy(block[name].astype(np.int64)) for name in ("i", "j"))
        columns = Batch(i, j, torch.from_numpy(block["count"].astype(np.float32)))
        # A slice of tensors costs less than an array for each batch.
        total = 0.0
        for begin in range(0, len(block), settings.batch_size):
            batch = Batch(*(column[begin : begin + settings.batch_size] for column in columns))
            total += step(vectors, batch, settings.rate, settings.x_max)
        check_finite(total, settings)
        state.save(number + 1, vectors)
        advance(len(block), f"cost {total / len(block):.4f}")
    return vectors["words"][:, :-1] + vectors["contexts"][:, :-1]
