"""Which whole words to mask: all pieces of a word or none (google-research/bert, "Whole Word Masking" models)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.hashing import U64, combine, name_key

_WORD = name_key("mlm.word")
_COLUMN_BITS = np.uint64(0xFFFF)
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

Int64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def choose_words(key: U64, maskable: Bools, continuing: Bools, budget: Int64) -> Bools:
    """Takes a row's words in random order, each one that still fits into the row's budget of tokens.

    A word that does not fit is passed over for later, shorter ones, so the budget is never exceeded, and a row whose
    words are all longer than it gets none. A word does not reach across a token that is not maskable.

    Args:
        key: uint64 [B], of each row's choices.
        maskable: bool [B, S], the cells that may be chosen; at most 65,536 in a row.
        continuing: bool [B, S], the cells that go on with the word of the cell before.
        budget: int64 [B], tokens to choose.

    Returns:
        bool [B, S], the chosen cells.
    """
    rows, width = maskable.shape
    begins = maskable.copy()
    begins[:, 1:] &= ~(maskable[:, :-1] & continuing[:, 1:])
    first = np.flatnonzero(begins)  # the cell of each word's first token, through all rows
    word = np.cumsum(begins) - 1
    length = np.zeros(maskable.size, dtype=np.int32)
    length[first] = np.bincount(word[maskable.ravel()], minlength=len(first))

    row = np.repeat(np.arange(rows), np.count_nonzero(begins, axis=1))
    column = (first - row * width).astype(np.uint64)
    rank = np.full((rows, width), _NEVER)
    rank[begins] = (combine(key[row], _WORD, column) & ~_COLUMN_BITS) | column
    rank.sort(axis=1)  # the column in the low bits makes hashes distinct, and saves sorting indices
    at = (
        np.minimum((rank & _COLUMN_BITS).astype(np.int64), width - 1)
        + np.arange(rows)[:, None] * width
    )
    taken = _take(np.where(rank == _NEVER, 0, length.take(at)), budget)
    chosen = np.zeros(maskable.size, dtype=np.bool_)
    chosen[at[taken]] = True
    return (
        maskable & chosen.take(first).take(word).reshape(maskable.shape) if len(first) else maskable
    )


def _take(lengths: npt.NDArray[np.int32], budget: Int64) -> Bools:
    """Which of the lengths [B, W] to take: going through a row, each one that what is left of its budget allows.

    Lengths of 0 are not taken. The columns are gone through in blocks, since most rows are full after the first.
    """
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
            # From the first length that is too much on, none above what was left before it can be taken any more.
            some[over & (some > (room - np.where(over, 0, total).max(axis=1))[:, None])] = 0
        taken[rows, begin : begin + block] = some > 0
        left[rows] -= some.sum(axis=1)
    return taken


def columns_of(chosen: Bools, slots: int) -> tuple[Int64, Bools]:
    """The columns of the chosen cells, in ascending order and then 0, and which of these entries are in use.

    Args:
        chosen: bool [B, S], at most `slots` in a row.
        slots: P, entries of a row of the result.

    Returns:
        int64 and bool [B, P].
    """
    count = np.count_nonzero(chosen, axis=1)
    used = np.arange(slots) < count[:, None]
    columns = np.zeros(used.shape, dtype=np.int64)
    columns[used] = np.nonzero(chosen)[1]
    return columns, used
