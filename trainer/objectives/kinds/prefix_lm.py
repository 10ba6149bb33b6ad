"""Prefix language modeling: predicts the rest of a text from its beginning.

The objective of Raffel et al. 2020, section 3.2.3. A text is cut at a uniformly random place, as in
`random_prefix_noise_mask` of google-research/text-to-text-transfer-transformer; here the place is a
hash of the text's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from samestep.examples import Vocabulary
from samestep.hashing import U64, combine, name_key, uniform
from trainer.objectives import Objective
from trainer.objectives.rows import Int64
from trainer.objectives.text_to_text import LayoutConfig, Ragged, SelfSupervised, alternating

_CUT = name_key("prefix_lm.cut")


@dataclass(frozen=True)
class Config(LayoutConfig):
    """Prefix language modeling.

    `data.sequence_length` is the length of the encoder, and then of the decoder as well, or of a
    decoder alone.

    Attributes:
        layout: encoder_decoder, whose encoder reads the prefix, or prefix_lm for a decoder that
            gets all in one row.
    """

    layout: Literal["encoder_decoder", "prefix_lm"] = "encoder_decoder"
    z_loss: float = 0.0

    layouts = ("encoder_decoder", "prefix_lm")

    def build(self, vocabulary: Vocabulary) -> Objective:
        return PrefixLM(self, vocabulary)


class PrefixLM(SelfSupervised):
    """The objective for models that see a whole prefix; see `TextToText` for the arrays.

    A source is a prefix, the target is the rest, and `</s>` ends both.

    An encoder-decoder gets two pairs of each text, one of each half. The first half's prefix has
    any length; the second half's is as long as the rest of the first half. So each prefix is
    uniformly random, and yet the sources of a text have as many tokens as its targets: rows of a
    fixed shape are full on both sides.
    """

    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        if not self._has_encoder:
            return length + 1, length
        ends = np.minimum(length, 2)  # a text of one token has no second half
        return (length + 1) // 2 + ends, length // 2 + ends

    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        text = np.arange(texts.length.size)
        length = (texts.length + 1) // 2 if self._has_encoder else texts.length
        prefix = 1 + np.floor(uniform(combine(key, _CUT)) * (length - 1)).astype(np.int64)
        if self._has_encoder:
            # A text of 10 tokens with a prefix of 2 in the first half gives pairs of 2 + 3 and 3 +
            # 2 tokens, 5 on each side. The two halves of a text are neighbors.
            halves = np.stack((length, texts.length - length), axis=1).reshape(-1)
            prefixes = np.stack((prefix, length - prefix), axis=1).reshape(-1)
            used = halves > 0
            text, length, prefix = np.repeat(text, 2)[used], halves[used], prefixes[used]
        in_prefix = alternating(prefix, length - prefix)
        source = self._ended(texts.tokens[in_prefix], prefix + 1)
        target = self._ended(texts.tokens[~in_prefix], length - prefix + 1)
        return text, source, target
