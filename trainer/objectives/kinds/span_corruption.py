"""Span corruption, T5's denoising objective (Raffel et al. 2020, section 3.1.4).

Sentinels replace spans of the text. The target is each sentinel, followed by the span that it
stands for. Spans are chosen as by `random_spans_noise_mask` of
google-research/text-to-text-transfer-transformer: the numbers of corrupted tokens and of spans are
exact, and each way to cut the corrupted tokens, and the others, into that many spans is equally
likely. Here the cuts are hashes of (the text's key, position), so they depend on nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from samestep.errors import ConfigError
from samestep.examples import PackSpec, Vocabulary
from samestep.hashing import U64
from trainer.objectives import Objective
from trainer.objectives.noise import noise_count, random_spans, span_count
from trainer.objectives.rows import Int64, fill_spans
from trainer.objectives.text_to_text import Layout, LayoutConfig, Ragged, SelfSupervised


@dataclass(frozen=True)
class Config(LayoutConfig):
    """Span corruption.

    `data.sequence_length` is the length of the sources. With 512 and the defaults, 568 tokens of
    text give sources of 512 and targets of 114, without padding under `packing: concat`.

    Attributes:
        noise_density: fraction of a text's tokens to corrupt; the rounded count, at least 1, is
            exact.
        mean_span_length: mean number of corrupted tokens for each sentinel; at least 1.
        target_length: maximum length of targets; null is what a single text needs that fills the
            sources. For short documents with `packing: best_fit`, a larger value wastes less, as
            each of them has sentinels and an end token of its own.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0
    layout: Layout = "encoder_decoder"
    target_length: int | None = None
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.noise_density < 1:
            raise ConfigError(
                f"noise_density is {self.noise_density}. Use a fraction between 0 and 1, such "
                "as 0.15.",
            )
        if self.mean_span_length < 1:
            raise ConfigError(
                f"mean_span_length is {self.mean_span_length}. Use at least 1 token, such as 3.",
            )
        if self.target_length is not None and self.target_length < 1:
            raise ConfigError(
                f"target_length is {self.target_length}. Use at least 1, such as 114, or null.",
            )

    def build(self, vocabulary: Vocabulary) -> Objective:
        return SpanCorruption(self, vocabulary)


class SentinelPairs(SelfSupervised):
    """Replaces each span of a text by a sentinel; the target is the sentinels with their spans.

    Attributes:
        fewer_spans: what to change for fewer spans in a text of the same length.

    Raises:
        ConfigError: the vocabulary has no sentinels, or lacks what `TextToText` needs.
    """

    fewer_spans = "a larger mean_span_length"

    def __init__(self, config: LayoutConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        if not vocabulary.sentinels:
            raise ConfigError(
                "span corruption needs a tokenizer with sentinels (<extra_id_0>, ...), and this "
                'one has none. Use one made for T5, or write "extra_ids": 100 into the '
                "tokenizer_config.json of another SentencePiece model and build the dataset again."
            )
        self._sentinels = np.array(vocabulary.sentinels, dtype=np.int32)

    @abstractmethod
    def most_spans(self, length: Int64) -> Int64:
        """Maximum number of spans in texts of the given lengths; grows with the length."""

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As for `TextToText`.

        Raises:
            ConfigError: also if there are too few sentinels.
        """
        spec = super().pack_spec(sequence_length)
        length = np.arange(1, spec.sequence_length + 1)
        spans = self.most_spans(length)
        if spans[-1] > self._sentinels.size:
            # `spans` ascends, so this is the longest text with enough sentinels.
            longest = np.searchsorted(spans, self._sentinels.size, side="right") - 1
            raise ConfigError(
                f"sequence_length {sequence_length} has {spans[-1]} corrupted spans, and the "
                f"tokenizer has {self._sentinels.size} sentinels to replace them. Use a "
                f"sequence_length of at most {self.sizes(length)[0][longest]}, {self.fewer_spans}, "
                "or a tokenizer with more sentinels."
            )
        return spec

    def replaced(
        self, texts: Ragged, spans: Int64, begin: Int64, corrupted: Int64
    ) -> tuple[Ragged, Ragged]:
        """The sources and targets of texts whose spans are given.

        Args:
            spans: int64 [Q], number of spans of each text.
            begin, corrupted: int64 [number of spans], the first token of each span, counted through
                all texts, and its number of tokens; no span begins where another one ends.
        """
        # Example: the spans (b) and (d e) of the text a b c d e. All numbers are counted through
        # all texts.
        #
        #     corrupted_before   0 1     corrupted tokens before each span
        #     begin              1 3
        #     source position    1 3     of <0> and <1> in a <0> c <1> </s>
        #     target position    0 2     of <0> and <1> in <0> b <1> d e </s>
        text, span = np.repeat(np.arange(spans.size), spans), np.arange(begin.size)
        corrupted_before = np.cumsum(corrupted) - corrupted
        noise = np.bincount(text, corrupted, spans.size).astype(np.int64)
        is_noise = fill_spans(begin, begin + corrupted, np.True_, texts.tokens.size)
        sentinel = self._sentinels[span - (np.cumsum(spans) - spans)[text]]
        # A sentinel comes after the sentinels of earlier spans and the </s> of earlier texts.
        specials_before = span + text
        source = self._ended(
            texts.tokens[~is_noise],
            texts.length - noise + spans + 1,
            (begin - corrupted_before + specials_before, sentinel),
        )
        target = self._ended(
            texts.tokens[is_noise],
            noise + spans + 1,
            (corrupted_before + specials_before, sentinel),
        )
        return source, target


class SpanCorruption(SentinelPairs):
    """The denoising objective; see `TextToText` for the arrays.

    If `b` and `d e` of the text `a b c d e` are corrupted, the source is `a <0> c <1> </s>` and the
    target `<0> b <1> d e </s>`, with sentinels <0> and <1>. A text begins with a kept token and
    ends with a corrupted one. A text of one token is kept, and its target is `</s>`.
    """

    config: Config

    def counts(self, length: Int64) -> tuple[Int64, Int64]:
        """Number of corrupted tokens, and of spans, in texts of the given lengths."""
        noise = noise_count(length, self.config.noise_density)
        return noise, span_count(length, noise, self.config.mean_span_length)

    def most_spans(self, length: Int64) -> Int64:
        return self.counts(length)[1]

    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        noise, spans = self.counts(length)
        # Kept tokens, sentinels and </s>; corrupted tokens, sentinels and </s>.
        source, target = length - noise + spans + 1, noise + spans + 1
        return (source if self._has_encoder else source + target - 1), target

    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        """Makes one pair of each text."""
        noise, spans = self.counts(texts.length)
        begin, corrupted = random_spans(texts.length, noise, spans, key)
        return np.arange(spans.size), *self.replaced(texts, spans, begin, corrupted)
