"""Choosing the tokens of an example to predict, for objectives that predict some of them.

The choice is a hash of (the example's key, position), so it does not depend on the batch or the
process that holds the example.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.hashing import U64, combine, name_key
from trainer.objectives.rows import (
    COLUMN_BITS,
    NEVER,
    Bools,
    Int32,
    Int64,
    Rows,
    TokenObjective,
    columns_of,
)

MOST_WORDS = 100
"""The longest runs of words that may be predicted together."""

_CHOOSE = name_key("mlm.choose")


class Choice(Protocol):
    """How many tokens are predicted, and which together; see `kinds.mlm.Config`."""

    @property
    def mask_fraction(self) -> float: ...
    @property
    def whole_words(self) -> bool: ...
    @property
    def ngrams(self) -> int: ...


def check_ngrams(ngrams: int) -> None:
    """Rejects lengths of runs that cannot be.

    Raises:
        ConfigError: names the value.
    """
    if not 1 <= ngrams <= MOST_WORDS:
        raise ConfigError(f"ngrams is {ngrams}. Use 1 to {MOST_WORDS}, such as 3.")


class ChosenTokens(TokenObjective):
    """An objective that predicts an exact fraction of an example's ordinary tokens.

    Raises:
        ConfigError: the vocabulary has no [CLS], [SEP] or [PAD], or only special tokens; or whole
            words are to be chosen and it does not say where words begin.
    """

    def __init__(self, choice: Choice, vocabulary: Vocabulary) -> None:
        self._choice = choice
        self._rows = Rows.for_encoder(vocabulary)
        ids = np.arange(vocabulary.size, dtype=np.int32)
        self._is_ordinary = ~np.isin(ids, vocabulary.special)
        self._ordinary = ids[self._is_ordinary]
        if self._ordinary.size == 0:
            raise ConfigError(
                "the tokenizer has 0 ordinary tokens, only special ones. Train one on your text.",
            )
        self._is_continuing: Bools | None = None
        if choice.whole_words:
            if vocabulary.continuing is None:
                raise ConfigError(
                    "whole_words is true, and this tokenizer does not say where words begin. Use a "
                    "WordPiece, byte-level BPE or SentencePiece tokenizer, or set whole_words to "
                    "false."
                )
            self._is_continuing = np.isin(ids, list(vocabulary.continuing))

    def predictions(self, sequence_length: int) -> int:
        return max(1, round(self._choice.mask_fraction * (sequence_length - 2)))

    def choose(self, key: U64, tokens: Int32) -> tuple[Int64, Bools]:
        """Chooses the positions to predict: their columns, and which entries are in use."""
        maskable, count = self.budget(tokens)
        slots = self.predictions(tokens.shape[1])
        if self._choice.ngrams > 1:
            from trainer.objectives.word_spans import choose_spans, ngram_probabilities

            likely = ngram_probabilities(self._choice.ngrams)
            spans = choose_spans(key, maskable, self.continues(tokens), count, likely)
            return columns_of(spans > 0, slots)
        if self._is_continuing is not None:
            from trainer.objectives.whole_words import choose_words

            chosen = choose_words(key, maskable, self._is_continuing.take(tokens), count)
            return columns_of(chosen, slots)
        return _smallest(key, maskable, count, slots)

    def budget(self, tokens: Int32) -> tuple[Bools, Int64]:
        """The positions that may be predicted, bool [B, S], and how many are, int64 [B]."""
        # The count is exact, not a probability for each token: of 100 ordinary tokens,
        # mask_fraction 0.15 takes the 15 of smallest hash.
        maskable = self._is_ordinary.take(tokens)
        available = maskable.sum(axis=1, dtype=np.int32)
        rounded = np.maximum(1, np.rint(self._choice.mask_fraction * available))
        return maskable, np.minimum(available, rounded).astype(np.int64)

    def continues(self, tokens: Int32) -> Bools | None:
        """The positions that continue a word; None if every token is a word."""
        return None if self._is_continuing is None else self._is_continuing.take(tokens)


def _smallest(key: U64, maskable: Bools, count: Int64, slots: int) -> tuple[Int64, Bools]:
    """Chooses the `count` maskable positions of smallest hash in each row."""
    # The low 16 bits of each hash are replaced by its column. That makes hashes distinct, and lets
    # us partition values, from which the columns can be read, instead of indices, which is slower.
    column = np.arange(maskable.shape[1], dtype=np.uint64)
    rank = combine(key[:, None], _CHOOSE, column)
    rank &= ~COLUMN_BITS
    rank |= column
    rank[~maskable] = NEVER
    rank.partition(slots - 1, axis=1)
    lowest = np.sort(rank[:, :slots], axis=1)
    used = np.arange(slots) < count[:, None]
    return np.where(used, lowest & COLUMN_BITS, 0).astype(np.int64), used
