"""Runs of neighboring words to mask: ALBERT's n-grams and SpanBERT's spans."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from samestep.hashing import U64, combine, name_key, uniform
from trainer.objectives.rows import Bools, Int32, Int64

Probabilities: TypeAlias = npt.NDArray[np.float64]
"""The probability of spans of 1, 2, ... words."""

_START = name_key("mlm.span.start")
_LENGTH = name_key("mlm.span.length")


def ngram_probabilities(longest: int) -> Probabilities:
    """p(n) proportional to 1/n for n = 1 ... longest (Lan et al. 2020, section 4.1)."""
    return _normalized(1 / np.arange(1, longest + 1))


def geometric_probabilities(p: float, longest: int) -> Probabilities:
    """p(n) proportional to p (1 - p)^(n - 1), n = 1 ... longest (Joshi et al. 2020, section 3.1).

    With p = 0.2 and 10, the mean is 3.8 words.
    """
    return _normalized(p * (1 - p) ** np.arange(longest))


def _normalized(weights: npt.NDArray[Any]) -> Probabilities:
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def choose_spans(
    key: U64,
    maskable: Bools,
    continuing: Bools | None,
    budget: Int64,
    probabilities: Probabilities,
) -> Int32:
    """Chooses runs of whole words until each row's budget of tokens is spent.

    A row's words are tried in random order as the first word of a span, whose length in words is
    random. The span ends early before a word that is chosen already, that follows a special token,
    or that does not fit into the rest of the budget.

    Args:
        key: uint64 [B], of each row's choices.
        maskable: bool [B, S], the positions that may be chosen.
        continuing: bool [B, S], the positions that continue the word before them; None: each
            position is a word.
        budget: int64 [B], number of tokens to choose.
        probabilities: of a span's length in words.

    Returns:
        int32 [B, S], the number of the span of each position, from 1 in each row, in the order of
        choice; 0 for positions that are not chosen.
    """
    # Example: [CLS] a b c d [SEP] with a budget of 3. If c is the first word in the random order,
    # and its span has length 2, the span 1 is "c d". If b is next with length 3, its span 2 ends
    # before c, and the budget is spent: 0 0 2 1 1 0.
    rows, width = maskable.shape
    begins = maskable.copy()
    if continuing is not None:
        begins[:, 1:] &= ~(maskable[:, :-1] & continuing[:, 1:])
    # Words are numbered through all rows, as in `whole_words.choose_words`.
    first = np.flatnonzero(begins)
    words = len(first)
    if not words:
        return np.zeros(maskable.shape, dtype=np.int32)
    word = np.cumsum(begins) - 1
    length = np.bincount(word[maskable.ravel()], minlength=words)
    row, column = np.divmod(first, width)
    # Words with the same number in `text` follow each other without a gap.
    # A gap is a special token, or the border of a row.
    gap = np.ones(words, dtype=np.bool_)
    gap[1:] = (first[1:] != first[:-1] + length[:-1]) | (row[1:] != row[:-1])
    text = np.cumsum(gap)

    # Sorted by row, then by hash: the words of row r are order[start[r] : start[r] + in_row[r]].
    order = np.lexsort((combine(key[row], _START, column), row))
    in_row = np.bincount(row, minlength=rows)
    start = np.cumsum(in_row) - in_row
    bounds = np.cumsum(probabilities)[:-1]
    wanted = 1 + np.searchsorted(bounds, uniform(combine(key[row], _LENGTH, column)), side="right")

    span = np.zeros(words, dtype=np.int32)
    left = np.minimum(budget, np.bincount(row, length, minlength=rows)).astype(np.int64)
    steps = np.arange(len(bounds) + 1)
    # One try per row at a time, for all rows together: try number i is the row's i-th word.
    for number in range(int(in_row.max())):
        active = np.flatnonzero((left > 0) & (number < in_row))
        if not len(active):
            break
        begin = order[start[active] + number]
        # The words that the span could have, [rows, longest], with their cumulative tokens.
        members = np.minimum(begin[:, None] + steps, words - 1)
        tokens = np.cumsum(length[members], axis=1)
        fits = (
            (begin[:, None] + steps < words)
            & (steps < wanted[begin, None])
            & (text[members] == text[begin, None])
            & (span[members] == 0)
            & (tokens <= left[active, None])
        )
        # The span ends before the first word that does not fit.
        count = np.logical_and.accumulate(fits, axis=1).sum(axis=1)
        taken = steps < count[:, None]
        span[members[taken]] = number + 1
        some = count > 0
        left[active[some]] -= tokens[some, count[some] - 1]
    return np.where(maskable, span.take(np.maximum(word, 0)).reshape(maskable.shape), 0)
