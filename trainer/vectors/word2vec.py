"""Skip-gram and CBOW with negative sampling (Mikolov et al. 2013, "Distributed representations").

word2vec.c updates the vectors after every pair of words. Here a batch of predictions is computed
with the same vectors, and the sum of its updates is applied, so that arrays can be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.hashing import combine, name_key
from trainer.vectors.corpus import Ids, Words
from trainer.vectors.settings import Settings
from trainer.vectors.windows import (
    Int64,
    Negatives,
    Windows,
    keep_probabilities,
    windows,
)
from trainer.vectors.work import State, check_finite, random_table

_INPUT = name_key("vectors.input")
BLOCK = 2**16  # words; windows end with a block, as they do after 1,000 words in word2vec.c
_LOWEST_RATE = 1e-4  # relative to the first one


class Batch(NamedTuple):
    """Predictions of words from the mean of others.

    Attributes:
        inputs: int64 [C], the words that are read.
        row: int64 [C], the prediction that each one belongs to, ascending.
        targets: int64 [P, 1 + K], the word to predict, then random ones.
        weight: fp32 [P, 1 + K]; 0 for a random word that is the right one, else 1.
    """

    inputs: Tensor
    row: Tensor
    targets: Tensor
    weight: Tensor


def batch_of(
    found: Windows, first: int, end: int, negatives: Negatives, number: int, cbow: bool
) -> Batch:
    """Makes a batch of the pairs [first, end) of windows.

    Skip-gram has a prediction for each pair, the context from the center. CBOW has one for each
    center, from the mean of its contexts; `first` and `end` are then borders between centers.

    Args:
        number: K, of random words for each prediction.
    """
    center, context = found.center[first:end], found.context[first:end]
    if cbow:
        is_first = np.diff(center, prepend=-1) > 0
        begins, row = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        inputs, right, keys = context, center[begins], found.keys[center[begins]]
    else:
        row = np.arange(len(center))
        # Every pair has its own random words, so its key has both places.
        inputs, right = center, context
        keys = combine(found.keys[center], context - center)
    # A random word that is the right one gets no update, as in word2vec.c.
    right = found.words[right]
    random = negatives(keys, number)
    targets = np.concatenate([right[:, None], random], axis=1)
    weight = np.ones(targets.shape, dtype=np.float32)
    weight[:, 1:] = random != right[:, None]
    arrays = (found.words[inputs], row, targets, weight)
    return Batch(*map(torch.from_numpy, arrays))


def _losses(scores: Tensor) -> Tensor:
    # The first column should be high, the others low.
    return torch.cat([F.softplus(-scores[:, :1]), F.softplus(scores[:, 1:])], dim=1)


def step(inputs: Tensor, outputs: Tensor, batch: Batch, rate: float) -> float:
    """Takes a step of gradient descent, in place; returns the loss before it.

    The loss is the sum over predictions of -log s(h o) - sum log s(-h n), s(x) = 1 / (1 + exp(-x)),
    with the mean h of the input vectors, the output vector o of the right word, and the output
    vectors n of random words (Mikolov et al. 2013, equation 4). The gradient of CBOW's mean is
    divided among its words, which word2vec.c and gensim leave out (Irsoy et al. 2021, "Corrected
    CBOW performs as well as skip-gram").

    Args:
        inputs, outputs: fp32 [V, D].
    """
    # Written out instead of autograd, which would make a gradient for every word of the vocabulary.
    sizes = torch.bincount(batch.row, minlength=len(batch.targets)).float()[:, None]
    total = inputs.new_zeros(len(batch.targets), inputs.shape[1])
    hidden = total.index_add(0, batch.row, inputs.index_select(0, batch.inputs)) / sizes
    rows = outputs.index_select(0, batch.targets.view(-1)).view(*batch.targets.shape, -1)
    scores = (rows * hidden[:, None]).sum(-1)
    before = float((_losses(scores) * batch.weight).sum())
    # The derivative of softplus(-x) is s(x) - 1, and of softplus(x) it is s(x).
    slope = torch.sigmoid(scores)
    slope[:, 0] -= 1
    slope *= batch.weight
    of_hidden = torch.bmm(slope[:, None], rows)[:, 0] / sizes
    of_rows = (slope[:, :, None] * hidden[:, None]).flatten(0, 1)
    outputs.index_add_(0, batch.targets.view(-1), of_rows, alpha=-rate)
    inputs.index_add_(0, batch.inputs, of_hidden.index_select(0, batch.row), alpha=-rate)
    return before


def initial_vectors(words: int, dimensions: int, seed: int) -> dict[str, Tensor]:
    """The vectors at the start: inputs uniform in (-0.5, 0.5) / D, outputs 0, as in word2vec.c."""
    inputs = random_table(combine(seed, _INPUT, np.arange(words * dimensions)), words, dimensions)
    return {"inputs": inputs, "outputs": torch.zeros(words, dimensions)}


def train(
    text: Ids,
    words: Words,
    settings: Settings,
    state: State,
    advance: Callable[[int, str], None],
) -> Tensor:
    """Trains input vectors: fp32 [V, D].

    Args:
        text: int32 [N], see `corpus.write_numbers`.
        state: continues with the first block that it does not have.
        advance: called with the number of words of each block, and its mean loss as text.

    Raises:
        ConfigError: the vectors grow without bound.
    """
    vectors = state.load(
        lambda: initial_vectors(len(words.names), settings.dimensions, settings.seed)
    )
    inputs, outputs = vectors["inputs"], vectors["outputs"]
    keep, negatives = keep_probabilities(words.counts, settings.subsample), Negatives(words.counts)
    blocks = -(-len(text) // BLOCK)
    total = settings.epochs * len(text)
    for number in range(state.done, settings.epochs * blocks):
        # Blocks are numbered through all epochs: a stopped training continues with the next one.
        epoch, first = number // blocks, number % blocks * BLOCK
        numbers = np.asarray(text[first : first + BLOCK])
        found = windows(numbers, first, keep, settings.window, settings.seed, epoch)
        summed, predictions = 0.0, 0
        bounds = _bounds(found, settings.batch_size, settings.method == "cbow")
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            batch = batch_of(
                found, begin, end, negatives, settings.negatives, settings.method == "cbow"
            )
            # The rate falls with the place in the text, also within a block.
            done = epoch * len(text) + first + len(numbers) * begin / bounds[-1]
            rate = settings.rate * max(_LOWEST_RATE, 1 - done / total)
            summed += step(inputs, outputs, batch, rate)
            predictions += len(batch.targets)
        check_finite(summed, settings)
        state.save(number + 1, vectors)
        advance(len(numbers), f"loss {summed / max(1, predictions):.3f}")
    return inputs


def _bounds(found: Windows, size: int, cbow: bool) -> Int64:
    """Where batches of `size` predictions begin among the pairs, and where the last one ends."""
    pairs = len(found.center)
    starts = np.flatnonzero(np.diff(found.center, prepend=-1)) if cbow else np.arange(pairs)
    return np.append(starts[::size], pairs)
