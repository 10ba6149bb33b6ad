"""Whole-word masking: all tokens of a word or none (google-research/bert, "Whole Word Masking")."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from samestep.hashing import U64, combine, name_key
from trainer.objectives.rows import COLUMN_BITS, NEVER, Bools, Int64

_WORD = name_key("mlm.word")


def choose_words(key: U64, maskable: Bools, continuing: Bools, budget: Int64) -> Bools:
    """Takes a row's words in random order, each one that still fits into the row's budget.

    A word that does not fit is skipped in favor of later, shorter ones. So the budget is never
    exceeded, and a row whose words are all longer than it gets none. A word does not extend across
    a token that is not maskable.

    Args:
        key: uint64 [B], of each row's choices.
        maskable: bool [B, S], the positions that may be chosen.
        continuing: bool [B, S], the positions that continue the word before them.
        budget: int64 [B], number of tokens to choose.

    Returns:
        bool [B, S], the chosen positions.
    """
    # Example: [CLS] un ##want ##ed run ##ning sea [SEP] with a budget of 3 holds words of 3, 2 and
    # 1 tokens. In the random order "running", "unwanted", "sea", the second does not fit after the
    # first, so "running" and "sea" are chosen.
    rows, width = maskable.shape
    begins = maskable.copy()
    begins[:, 1:] &= ~(maskable[:, :-1] & continuing[:, 1:])
    # Words are numbered through all rows: `first` is the position of each one's first token, and
    # `word` the number of the last word that began, for each position.
    first = np.flatnonzero(begins)
    if not len(first):
        return maskable
    word = np.cumsum(begins) - 1
    length = np.zeros(maskable.size, dtype=np.int32)
    length[first] = np.bincount(word[maskable.ravel()], minlength=len(first))

    # Sorts each row's words by hash. The column in the low bits makes hashes distinct, and saves
    # sorting indices. Entries after a row's last word are NEVER, and get the length 0.
    row, column = np.divmod(first, width)
    column = column.astype(np.uint64)
    rank = np.full((rows, width), NEVER)
    rank[begins] = (combine(key[row], _WORD, column) & ~COLUMN_BITS) | column
    rank.sort(axis=1)
    columns = np.minimum((rank & COLUMN_BITS).astype(np.int64), width - 1)
    at = columns + np.arange(rows)[:, None] * width
    taken = _take(np.where(rank == NEVER, 0, length.take(at)), budget)
    is_first_chosen = np.zeros(maskable.size, dtype=np.bool_)
    is_first_chosen[at[taken]] = True
    is_chosen_word = is_first_chosen.take(first)
    return maskable & is_chosen_word.take(word).reshape(maskable.shape)


def _take(lengths: npt.NDArray[np.int32], budget: Int64) -> Bools:
    """Takes, going through a row of lengths [B, W], each one that the rest of its budget allows.

    Lengths of 0 are not taken.
    """
    # All rows are processed together, a block of columns at a time: most budgets are spent after
    # the first block. Within a block, the sum up to each length must stay within the budget.
    # From the first one that exceeds it on, every length above what was left before it cannot fit:
    # it becomes 0, and the sums are recomputed. Example with a budget of 6:
    #
    #     lengths 3 2 4 1 2    sums 3 5 9 10 12    exceeds from the 4 on, with 6 - 5 = 1 left
    #     lengths 3 2 0 1 0    sums 3 5 5 6 6      fits: 3, 2 and 1 are taken
    taken = np.zeros(lengths.shape, dtype=np.bool_)
    left = budget.copy()
    block = int(budget.max(initial=0)) + 1
    for begin in range(0, lengths.shape[1], block):
        rows = np.flatnonzero(left)
        some, room = lengths[rows, begin : begin + block], left[rows]
        while True:
            total = np.cumsum(some, axis=1)
            over = total > room[:, None]
            if not over.any():
                break
            spent = np.where(over, 0, total).max(axis=1)
            some[over & (some > (room - spent)[:, None])] = 0
        taken[rows, begin : begin + block] = some > 0
        left[rows] -= some.sum(axis=1)
    return taken
