"""Prefix language modelling: the rest of a text is predicted from its beginning (Raffel et al. 2020, section 3.2.3).

Where a text is cut is uniformly random, as in `random_prefix_noise_mask` of
google-research/text-to-text-transfer-transformer, and a hash of the text's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainer.examples import Vocabulary
from trainer.hashing import U64, combine, name_key, uniform
from trainer.models import Outputs
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.rows import check_z_loss
from trainer.objectives.text_to_text import Int64, Pairs, Ragged, SelfSupervised, layouts_for

_CUT = name_key("prefix_lm.cut")


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Prefix language modelling.

    `data.sequence_length` is that of the encoder, and then of the decoder as well, or that of a decoder alone.

    Attributes:
        layout: encoder_decoder, whose encoder reads the prefix, or prefix_lm for a decoder that gets all in one row.
        z_loss: coefficient of log(Z)^2, where Z is the softmax's denominator, in the loss; 1e-4 in T5 v1.1.
    """

    layout: Literal["encoder_decoder", "prefix_lm"] = "encoder_decoder"
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_z_loss(self.z_loss)

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        return layouts_for(offers, ("encoder_decoder", "prefix_lm"))

    def build(self, vocabulary: Vocabulary) -> Objective:
        return PrefixLM(self, vocabulary)


class PrefixLM(SelfSupervised):
    """The language-modelling objective for models that see a prefix whole; see `TextToText` for the arrays.

    A source is a prefix, the target is the rest, and `</s>` ends both.

    An encoder and a decoder get two pairs of each text, one of each half. The first half's prefix has any length; the
    second one's is as long as the rest of the first. So each prefix is uniformly random, and yet the sources of a text
    together have as many tokens as its targets: rows of a fixed shape are full on both sides.
    """

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary, config.layout, config.z_loss)
        self.config = config

    def cells(self, length: Int64) -> tuple[Int64, Int64]:
        """Those of the sources and of the targets; or of both without the last token, and of the longest target."""
        if self._layout == "prefix_lm":
            return length + 1, length
        ends = np.minimum(length, 2)
        return (length + 1) // 2 + ends, length // 2 + ends

    def pairs(self, texts: Ragged, key: U64) -> Pairs:
        """Two of each text for an encoder and a decoder, or one for a decoder alone."""
        text = np.arange(texts.length.size)
        length = texts.length if self._layout == "prefix_lm" else (texts.length + 1) // 2
        prefix = 1 + np.floor(uniform(combine(key, _CUT)) * (length - 1)).astype(np.int64)
        if self._layout == "encoder_decoder":
            halves = np.stack((length, texts.length - length), axis=1).reshape(-1)
            prefixes = np.stack((prefix, length - prefix), axis=1).reshape(-1)
            used = halves > 0
            text, length, prefix = np.repeat(text, 2)[used], halves[used], prefixes[used]
        in_prefix = np.repeat(
            np.tile([True, False], length.size),
            np.stack((prefix, length - prefix), axis=1).reshape(-1),
        )
        return Pairs(
            text,
            self._joined(texts.tokens[in_prefix], prefix + 1),
            self._joined(texts.tokens[~in_prefix], length - prefix + 1),
        )
