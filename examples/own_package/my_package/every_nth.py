"""An objective of one's own: predicts every nth token of a text, counted from a random one.

The rules of an objective: a row depends only on its own tokens and key, everything is vectorized,
and shapes are static. `examples.key` is random and differs from epoch to epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import samestep


@dataclass(frozen=True)
class Config(samestep.ObjectiveConfig):
    """Settings of the objective.

    Attributes:
        every: distance between predicted tokens.
    """

    every: int = 7

    def __post_init__(self) -> None:
        if self.every < 2:
            raise samestep.ConfigError(f"every is {self.every}. Use 2 or more.")

    def build(self, vocabulary: samestep.Vocabulary) -> EveryNth:
        return EveryNth(self.every, vocabulary)


class EveryNth(samestep.TokenObjective):
    """The mean cross-entropy of every nth token, which the input replaces by [MASK]."""

    predicts = "tokens"
    needs = frozenset({"tokens"})
    denominator = "tokens"

    def __init__(self, every: int, vocabulary: samestep.Vocabulary) -> None:
        if vocabulary.mask is None:
            raise samestep.ConfigError("every_nth needs a tokenizer with [MASK]. Use one of BERT.")
        self._every, self._mask = every, vocabulary.mask
        self._special = np.array(vocabulary.special)
        self._rows = samestep.Rows.for_encoder(vocabulary)

    def predictions(self, sequence_length: int) -> int:
        return -(-sequence_length // self._every)

    def collate(self, examples: samestep.Examples, sequence_length: int) -> samestep.Batch:
        """Adds `predicted` and `labels`, int64 [B, P], and `weights`, float32 [B, P]."""
        rows = self._rows.lay_out(examples, sequence_length)  # tokens, segments, positions: [B, S]
        tokens = rows["tokens"]
        first = (examples.key % np.uint64(self._every)).astype(np.int64)
        predicted = first[:, None] + self._every * np.arange(self.predictions(sequence_length))
        inside = predicted < sequence_length
        predicted = np.where(inside, predicted, 0)  # position 0 is [CLS], which never counts
        labels = np.take_along_axis(tokens, predicted, axis=1)
        counts = inside & ~np.isin(labels, self._special)
        np.put_along_axis(tokens, predicted, np.where(counts, self._mask, labels), axis=1)
        weights = counts * examples.weight[:, None]
        return {**rows, "predicted": predicted, "labels": labels.astype(np.int64)} | {
            "weights": weights
        }
