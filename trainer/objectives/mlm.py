"""Masked language modelling (Devlin et al. 2019, "BERT", section 3.1), with masks drawn anew for each epoch.

The masks of an example are hashes of (its key, position), so they do not depend on the batch it travels in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.hashing import U64, combine, mix, name_key, uniform
from trainer.objectives import Loss, Objective, ObjectiveConfig
from trainer.objectives.rows import Rows, logits, pack_spec, score_tokens
from trainer.objectives.whole_words import choose_words, columns_of

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]

_CHOOSE = name_key("mlm.choose")
_REPLACE = name_key("mlm.replace")
_COLUMN_BITS = np.uint64(0xFFFF)
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Masked language modelling.

    Attributes:
        mask_fraction: share of an example's tokens that are predicted; the rounded count, at least 1, is exact.
        replace_mask: probability that a predicted token is replaced by [MASK].
        replace_random: probability that it is replaced by a random token; otherwise it is left as it is.
        whole_words: predicts all tokens of a word or none, as many words as fit into the share.
    """

    mask_fraction: float = 0.15
    replace_mask: float = 0.8
    replace_random: float = 0.1
    whole_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.mask_fraction <= 1:
            raise ConfigError(
                f"mask_fraction is {self.mask_fraction}; use a share above 0 and at most 1, as 0.15"
            )
        if (
            min(self.replace_mask, self.replace_random) < 0
            or self.replace_mask + self.replace_random > 1 + 1e-9
        ):
            raise ConfigError(
                f"replace_mask {self.replace_mask} and replace_random {self.replace_random} must be probabilities that "
                "add up to at most 1; use 0.8 and 0.1"
            )

    def build(self, vocabulary: Vocabulary) -> Objective:
        return MaskedLM(self, vocabulary)


class MaskedLM(Objective):
    """The masked-language-modelling objective; see `trainer.objectives.Objective`.

    To the rows of `rows.Rows`, masks applied, it adds for B examples and P predictions (`predictions(S)`):
        predicted: int64 [B, P], the cells to predict; unused entries, all at the end of a row, are 0.
        labels: int64 [B, P], the original tokens of those cells.
        weights: float32 [B, P], 1 for a prediction that counts, 0 for unused entries and examples of weight 0.

    Raises:
        ConfigError: the vocabulary has no [MASK], [CLS], [SEP] or [PAD], or only special tokens, or does not say where
            words begin and whole ones are to be masked.
    """

    predicts = "tokens"
    needs = frozenset({"tokens"})

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        if vocabulary.mask is None:
            raise ConfigError(
                "masked language modelling needs a tokenizer with [MASK]; use one made for BERT or RoBERTa"
            )
        self._rows = Rows.between_specials(vocabulary)
        ordinary = np.setdiff1d(np.arange(vocabulary.size, dtype=np.int32), vocabulary.special)
        if ordinary.size == 0:
            raise ConfigError(
                "the tokenizer has 0 ordinary tokens, only special ones; train one on your text"
            )
        self.config = config
        self._mask = np.int32(vocabulary.mask)
        self._ordinary = ordinary
        self._is_ordinary = np.zeros(vocabulary.size, dtype=np.bool_)
        self._is_ordinary[ordinary] = True
        self._is_continuing = _continuing(vocabulary) if config.whole_words else None

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As `rows.pack_spec`."""
        return pack_spec(sequence_length)

    def predictions(self, sequence_length: int) -> int:
        """P, the predictions that a row of `sequence_length` cells has room for."""
        return max(1, round(self.config.mask_fraction * (sequence_length - 2)))

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the pieces out in rows of S = `sequence_length` cells and masks them; see the class for the arrays."""
        rows = self._rows.lay_out(examples, sequence_length)
        predicted, labels, used = self.mask(rows["tokens"], examples.key)
        return {
            **rows,
            "predicted": predicted,
            "labels": labels.astype(np.int64),
            "weights": used * examples.weight[:, None],
        }

    def mask(self, tokens: Int32, key: U64) -> tuple[Int64, Int32, npt.NDArray[np.bool_]]:
        """Masks rows of tokens [B, S], in place.

        Returns:
            The cells to predict, the tokens that stood there, and which of these entries are in use: [B, P] each.
        """
        predicted, used = self._choose(key, tokens)
        cells = predicted + np.arange(len(tokens))[:, None] * tokens.shape[1]
        labels = tokens.reshape(-1)[cells]
        # Unused entries point at cell 0, which is never masked: they write back what they read.
        tokens.reshape(-1)[cells] = np.where(used, self._replace(key, predicted, labels), labels)
        return predicted, labels, used

    def _choose(self, key: U64, tokens: Int32) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Chooses the ordinary tokens of smallest hash; returns their columns [B, P] and which are in use [B, P]."""
        width = tokens.shape[1]
        slots = self.predictions(width)
        maskable = self._is_ordinary.take(tokens)
        available = maskable.sum(axis=1, dtype=np.int32)
        count = np.minimum(available, np.maximum(1, np.rint(self.config.mask_fraction * available)))
        if self._is_continuing is not None:
            return columns_of(
                choose_words(key, maskable, self._is_continuing.take(tokens), count), slots
            )
        column = np.arange(width, dtype=np.uint64)
        # The column in the low bits makes hashes distinct, and lets us partition values, which is quicker than indices.
        rank = combine(key[:, None], _CHOOSE, column)
        rank &= ~_COLUMN_BITS
        rank |= column
        rank[~maskable] = _NEVER
        rank.partition(slots - 1, axis=1)
        lowest = np.sort(rank[:, :slots], axis=1)
        used = np.arange(slots) < count[:, None]
        return np.where(used, lowest & _COLUMN_BITS, 0).astype(np.int64), used

    def _replace(self, key: U64, predicted: Int64, labels: Int32) -> Int32:
        """What stands in the predicted cells [B, P]: [MASK], a random ordinary token, or the label itself."""
        hashed = combine(key[:, None], _REPLACE, predicted)
        draw = uniform(hashed)
        is_masked = draw < self.config.replace_mask
        tokens = np.where(is_masked, self._mask, labels)
        is_random = ~is_masked & (draw < self.config.replace_mask + self.config.replace_random)
        tokens[is_random] = self._ordinary[mix(hashed[is_random]) % np.uint64(self._ordinary.size)]
        return tokens

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of predictions that count."""
        return {"mlm": float(batch["weights"].sum())}

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """Cross-entropy of the predicted tokens in float32, over the step's number of predictions, totals["mlm"]."""
        score = score_tokens(logits(model, batch, self.predicts), batch)
        metrics = {
            "loss": (score.nll.detach(), score.weight),
            "accuracy": (score.correct, score.weight),
        }
        return Loss(score.nll / totals["mlm"], metrics)


def _continuing(vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    """bool [V], the tokens that go on with the word of the token before."""
    if vocabulary.continuing is None:
        raise ConfigError(
            "whole_words is true, and this tokenizer does not say where words begin; use a WordPiece, byte-level BPE "
            "or SentencePiece tokenizer, or set whole_words to false"
        )
    marked = np.zeros(vocabulary.size, dtype=np.bool_)
    marked[list(vocabulary.continuing)] = True
    return marked
