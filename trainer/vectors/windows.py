"""Which words are predicted from which: the windows of word2vec, as arrays of a block of text.

Every random choice is a hash of the epoch and the word's position in the text: which frequent words
are skipped, how wide a window is, which words are negative examples.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from samestep.hashing import U64, combine, name_key, uniform
from trainer.vectors.corpus import END, Ids

Int64: TypeAlias = npt.NDArray[np.int64]

_SUBSAMPLE = name_key("vectors.subsample")
_REACH = name_key("vectors.reach")
_NEGATIVE = name_key("vectors.negative")

_ENTRIES_PER_WORD = 256
_FEWEST_ENTRIES, _MOST_ENTRIES = 2**20, 10**8


class Windows(NamedTuple):
    """The contexts of a block's words.

    Attributes:
        words: int64 [N].
        keys: uint64 [N], of the random choices of each word.
        center, context: int64 [P], places in `words`; ascending by center, then by context.
    """

    words: Int64
    keys: U64
    center: Int64
    context: Int64


def keep_probabilities(counts: Int64, threshold: float) -> npt.NDArray[np.float64]:
    """The probability to keep an occurrence of each word: float64 [V].

    For a word of relative frequency f it is (sqrt(f / t) + 1) t / f, at most 1, as in word2vec.c;
    Mikolov et al. (2013, equation 5) have sqrt(t / f), which is a little less.
    """
    if not threshold:
        return np.ones(len(counts))
    ratio: npt.NDArray[np.float64] = threshold * counts.sum() / counts
    return np.clip(np.sqrt(ratio) + ratio, 0.0, 1.0)


def windows(
    numbers: Ids,
    first: int,
    keep: npt.NDArray[np.float64],
    reach: int,
    seed: int,
    epoch: int,
) -> Windows:
    """Finds the contexts in a block of text.

    Skipped words are taken out before windows are laid over the rest, so the window reaches
    further. Its width is uniform in 1 to `reach`, which gives near words more weight.

    Args:
        numbers: int32 [N], words of the block, and `END` after each document.
        first: position of the block in the text.
        keep: float64 [V], see `keep_probabilities`.
    """
    position = first + np.arange(len(numbers))
    document = np.cumsum(numbers == END)
    is_word = numbers != END
    words, document, position = (
        numbers[is_word].astype(np.int64),
        document[is_word],
        position[is_word],
    )
    # Positions count through the whole text, so that a choice does not depend on the blocks.
    kept = uniform(combine(seed, _SUBSAMPLE, epoch, position)) < keep[words]
    words, document, position = words[kept], document[kept], position[kept]
    own = 1 + (uniform(combine(seed, _REACH, epoch, position)) * reach).astype(np.int64)
    # A column for each distance: with a reach of 2, the contexts of word p are p - 2, p - 1, p + 1
    # and p + 2, as far as these are in its document and within its own reach.
    distance = np.concatenate([np.arange(-reach, 0), np.arange(1, reach + 1)])
    place = np.arange(len(words))[:, None] + distance
    inside = (place >= 0) & (place < len(words)) & (np.abs(distance) <= own[:, None])
    place = np.where(inside, place, 0)  # any place that exists, as it is not used
    if len(words):
        inside &= document[place] == document[:, None]
    center = np.nonzero(inside)[0]
    keys = combine(seed, _NEGATIVE, epoch, position)
    return Windows(words, keys, center, place[inside])


class Negatives:
    """Random words with probabilities proportional to count ** 0.75 (Mikolov et al. 2013).

    As in word2vec.c, a large table has each word as many times as its probability says.
    """

    def __init__(self, counts: Int64) -> None:
        bounds = np.cumsum(counts.astype(np.float64) ** 0.75)
        size = min(_MOST_ENTRIES, max(_FEWEST_ENTRIES, _ENTRIES_PER_WORD * len(counts)))
        # The middle of each entry's share: entry 0 of 4 stands for probabilities from 0 to 0.25.
        quantiles = (np.arange(size) + 0.5) / size
        self._table = np.searchsorted(bounds / bounds[-1], quantiles).astype(np.int32)

    def __call__(self, keys: U64, number: int) -> Int64:
        """Returns `number` words for each key: int64 [P, number]."""
        draws = uniform(combine(keys[:, None], np.arange(number)))
        return self._table[(draws * len(self._table)).astype(np.int64)].astype(np.int64)
