"""Permutation language modeling: XLNet's objective (Yang et al. 2019, sections 2.2 and 2.3).

The tokens of an example get a random factorization order, and the last 1/K of them are predicted,
each from the tokens before it in this order (eq. 5). The order is a hash of the example's key, so
it is the same in any batch and process, and a new one in each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from samestep.hashing import combine, name_key
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.chosen_tokens import ChosenTokens, check_ngrams

_ORDER = name_key("permutation_lm.order")


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Permutation language modeling with partial prediction.

    Attributes:
        k: one token in this number is predicted; XLNet's K is 6. May be a fraction, as 6.5.
        ngrams: predicts runs of up to this number of tokens (or words, with `whole_words`); a run
            of n has a probability proportional to 1/n.
        whole_words: predicts all tokens of a word or none.
    """

    k: float = 6.0
    ngrams: int = 5
    whole_words: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.k < float("inf"):
            raise ConfigError(f"k is {self.k}. Use a number of 1 or more, such as 6.")
        check_ngrams(self.ngrams)

    @property
    def mask_fraction(self) -> float:
        """The fraction of tokens to predict."""
        return 1 / self.k

    def build(self, vocabulary: Vocabulary) -> Objective:
        return PermutationLM(self, vocabulary)


class PermutationLM(ChosenTokens):
    """The permutation-language-modeling objective; see `trainer.objectives.Objective`.

    The tokens stay as they are. To the arrays of `rows.Rows` it adds, for B examples of S positions
    and P predictions:
        predicted: int64 [B, P], the positions to predict; unused entries, at the end, are 0.
        labels: int64 [B, P], the tokens of those positions.
        weights: float32 [B, P], 1 for a prediction that counts, 0 for unused entries and examples
            of weight 0.
        rank: int32 [B, S], the place of each predicted token in the order, from 1; 0 for all
            others, which come before them.
    """

    predicts = "permuted_tokens"
    needs = frozenset({"permuted_tokens"})
    denominator = "plm"
    columns = frozenset({"rank"})

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        rows = self._rows.lay_out(examples, sequence_length)
        tokens = rows["tokens"]
        predicted, used = self.choose(examples.key, tokens)
        # Predicted positions 2, 5, 6 with hashes 30, 10, 20 get the ranks 3, 1, 2. Hashes of
        # unused entries are the largest, so these come last; position 0, [CLS], keeps rank 0.
        hashed = combine(examples.key[:, None], _ORDER, predicted)
        hashed[~used] = np.iinfo(np.uint64).max
        places = np.argsort(np.argsort(hashed, axis=1, kind="stable"), axis=1) + 1
        rank = np.zeros_like(tokens)
        np.put_along_axis(rank, predicted, np.where(used, places, 0).astype(np.int32), 1)
        return {
            **rows,
            "predicted": predicted,
            "labels": np.take_along_axis(tokens, predicted, 1).astype(np.int64),
            "weights": used * examples.weight[:, None],
            "rank": rank,
        }
