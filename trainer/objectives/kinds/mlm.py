"""Masked language modeling (Devlin et al. 2019, "BERT", section 3.1), with new masks each epoch.

The masks of an example are hashes of (its key, position), so they do not depend on the batch or the
process that holds it. The key differs from epoch to epoch, unless `maskings` limits the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from samestep.hashing import U64, combine, hash_rows, mix, name_key, uniform
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.chosen_tokens import ChosenTokens, check_ngrams
from trainer.objectives.rows import Bools, Int32, Int64

_REPLACE = name_key("mlm.replace")
_TEXT = name_key("mlm.text")


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Masked language modeling.

    Attributes:
        mask_fraction: fraction of an example's tokens to predict; the rounded count, at least 1, is
            exact.
        replace_mask: probability that a predicted token is replaced by [MASK].
        replace_random: probability that it is replaced by a random token; else it stays as it is.
        whole_words: predicts all tokens of a word or none, as many words as fit into the fraction.
        ngrams: predicts runs of up to this number of words (or tokens, without `whole_words`); a
            run of n has a probability proportional to 1/n (Lan et al. 2020, "ALBERT": 3).
        maskings: number of different maskings of a row, one of which each epoch uses, as of a
            file that was masked beforehand. 1 is static masking (Liu et al. 2019, "RoBERTa",
            section 4.1); BERT's files had 10. null: new masks in each epoch. Rows of pairs hold
            other texts in each epoch, and so have other masks.
    """

    masked = True

    mask_fraction: float = 0.15
    replace_mask: float = 0.8
    replace_random: float = 0.1
    whole_words: bool = False
    ngrams: int = 1
    maskings: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.mask_fraction <= 1:
            raise ConfigError(
                f"mask_fraction is {self.mask_fraction}. "
                "Use a fraction above 0 and at most 1, such as 0.15."
            )
        replaced = self.replace_mask + self.replace_random
        if min(self.replace_mask, self.replace_random) < 0 or replaced > 1 + 1e-9:
            raise ConfigError(
                f"replace_mask is {self.replace_mask} and replace_random is {self.replace_random}. "
                "Use probabilities that add up to at most 1, such as 0.8 and 0.1."
            )

        check_ngrams(self.ngrams)
        if self.maskings is not None and self.maskings < 1:
            raise ConfigError(f"maskings is {self.maskings}. Use 1 or more, or null.")

    def build(self, vocabulary: Vocabulary) -> Objective:
        return MaskedLM(self, vocabulary)


class MaskedLM(ChosenTokens):
    """The masked-language-modeling objective; see `trainer.objectives.Objective`.

    To the arrays of `rows.Rows`, with masks applied, it adds for B examples and P predictions:
        predicted: int64 [B, P], the positions to predict; unused entries, at the end, are 0.
        labels: int64 [B, P], the original tokens of those positions.
        weights: float32 [B, P], 1 for a prediction that counts, 0 for unused entries and examples
            of weight 0.

    Raises:
        ConfigError: the vocabulary has no [MASK], [CLS], [SEP] or [PAD], or only special tokens; or
            whole words are to be masked and it does not say where words begin.
    """

    predicts = "tokens"
    needs = frozenset({"tokens"})
    denominator = "mlm"

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        if vocabulary.mask is None:
            raise ConfigError(
                "masked language modeling needs a tokenizer with [MASK]. "
                "Use one made for BERT or RoBERTa, or add [MASK] by samestep data extend."
            )
        super().__init__(config, vocabulary)
        self.config = config
        self._mask = np.int32(vocabulary.mask)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        rows = self._rows.lay_out(examples, sequence_length)
        return {**rows, **self.predict(rows["tokens"], examples)}

    def predict(self, tokens: Int32, examples: Examples) -> Batch:
        """Masks rows of tokens [B, S] in place; returns the columns of the predictions."""
        predicted, labels, used = self.mask(tokens, self.masking_key(tokens, examples))
        return {
            "predicted": predicted,
            "labels": labels.astype(np.int64),
            "weights": used * examples.weight[:, None],
        }

    def masking_key(self, tokens: Int32, examples: Examples) -> U64:
        """Returns what each row's masks are hashed from: uint64 [B]."""
        if self.config.maskings is None:
            return examples.key
        text = hash_rows(tokens.astype(np.uint64))
        return combine(_TEXT, text, examples.key % np.uint64(self.config.maskings))

    def mask(self, tokens: Int32, key: U64) -> tuple[Int64, Int32, Bools]:
        """Masks rows of tokens [B, S], in place.

        Returns:
            [B, P] each: the positions to predict, their original tokens, and which entries are in
            use.
        """
        predicted, used = self.choose(key, tokens)
        return predicted, self.replace(key, tokens, predicted, used, predicted), used

    def replace(self, key: U64, tokens: Int32, predicted: Int64, used: Bools, unit: Int64) -> Int32:
        """Replaces predicted tokens in place, and returns the original ones.

        Args:
            unit: int64 [B, P]; tokens with the same number are replaced in the same way.
        """
        at = predicted + np.arange(len(tokens))[:, None] * tokens.shape[1]
        labels: Int32 = tokens.reshape(-1)[at]
        # Unused entries point at position 0, [CLS], which is never masked; they write back its
        # token, so the order of writes does not matter.
        replaced = self._replacements(key, predicted, labels, unit)
        tokens.reshape(-1)[at] = np.where(used, replaced, labels)
        return labels

    def _replacements(self, key: U64, predicted: Int64, labels: Int32, unit: Int64) -> Int32:
        """The tokens to put at predicted positions: [MASK], random ordinary ones, or the labels."""
        # With the defaults, a number below 0.8 means [MASK], one from 0.8 to 0.9 a random token,
        # and a higher one the label, of which the model cannot know that it was left in place.
        hashed = combine(key[:, None], _REPLACE, predicted)
        same = unit is predicted
        sample = uniform(hashed if same else combine(key[:, None], _REPLACE, unit))
        is_masked = sample < self.config.replace_mask
        tokens = np.where(is_masked, self._mask, labels)
        is_random = ~is_masked & (sample < self.config.replace_mask + self.config.replace_random)
        # Hashed again: the hashes of random replacements all lie in one narrow range.
        tokens[is_random] = self._ordinary[mix(hashed[is_random]) % np.uint64(self._ordinary.size)]
        return tokens
