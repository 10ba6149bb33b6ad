"""Span corruption, T5's denoising objective (Raffel et al. 2020, section 3.1.4).

Spans of the text are replaced by sentinels, and the targets are the sentinels, each with the text that it stands for.
Which spans is decided as by `random_spans_noise_mask` of google-research/text-to-text-transfer-transformer: the number
of tokens and of spans is exact, and each way of cutting the corrupted and the other tokens into so many spans is
equally likely. But the cuts are hashes of (the text's key, position), so that they depend on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from trainer.errors import ConfigError
from trainer.examples import PackSpec, Vocabulary
from trainer.hashing import U64, combine, mix, name_key
from trainer.models import Outputs
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.rows import check_z_loss, paint
from trainer.objectives.text_to_text import (
    Int64,
    Layout,
    Pairs,
    Ragged,
    SelfSupervised,
    layouts_for,
)

_KEPT = name_key("span_corruption.kept")
_NOISE = name_key("span_corruption.noise")
_POSITION_BITS = np.uint64(0xFFFF)


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Span corruption.

    `data.sequence_length` is that of the sources. 512 with the other values as here takes 568 tokens of text and gives
    targets of 114, without padding under `packing: concat`.

    Attributes:
        noise_density: share of a text's tokens that are corrupted; the rounded count, at least 1, is exact.
        mean_span_length: corrupted tokens for each sentinel, on average; at least 1.
        layout: encoder_decoder; or prefix_lm or language_model, for a decoder that gets sources and targets in one row.
        target_length: cells of targets; null is what a single text needs that fills the sources. With short documents
            and `packing: best_fit` a few more waste less, since each of them has sentinels and an end of its own.
        z_loss: coefficient of log(Z)^2, where Z is the softmax's denominator, in the loss; 1e-4 in T5 v1.1.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0
    layout: Layout = "encoder_decoder"
    target_length: int | None = None
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise ConfigError(
                f"noise_density is {self.noise_density}; use a share between 0 and 1, as 0.15"
            )
        if self.mean_span_length < 1:
            raise ConfigError(
                f"mean_span_length is {self.mean_span_length}; use at least 1 token, as 3"
            )
        if self.target_length is not None and self.target_length < 1:
            raise ConfigError(
                f"target_length is {self.target_length}; use a number of cells, as 114, or null"
            )
        check_z_loss(self.z_loss)

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        return layouts_for(offers, get_args(Layout))

    def build(self, vocabulary: Vocabulary) -> Objective:
        return SpanCorruption(self, vocabulary)


class SpanCorruption(SelfSupervised):
    """The denoising objective; see `TextToText` for the arrays.

    Of a text `a b c d e`, where `b` and `d e` are corrupted, the source is `a <0> c <1> </s>` and the target
    `<0> b <1> d e </s>`, with sentinels <0>, <1>. It begins with a token that is not corrupted and ends with one that
    is; a text of one token is left as it is, and its target is `</s>`.

    Raises:
        ConfigError: the vocabulary has no sentinels, or lacks what `TextToText` needs.
    """

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary, config.layout, config.z_loss, config.target_length)
        if not vocabulary.sentinels:
            raise ConfigError(
                "span corruption needs a tokenizer with sentinels (<extra_id_0>, ...), and this one has none; use one "
                'made for T5, or for another SentencePiece model write "extra_ids": 100 into tokenizer_config.json '
                "beside it, and build the dataset again"
            )
        self._sentinels = np.array(vocabulary.sentinels, dtype=np.int32)
        self.config = config

    def counts(self, length: Int64) -> tuple[Int64, Int64]:
        """How many tokens of texts are corrupted, and in how many spans."""
        noise = np.clip(np.rint(length * self.config.noise_density), 1, length - 1)
        spans = np.clip(
            np.rint(noise / self.config.mean_span_length), np.minimum(noise, 1), length - noise
        )
        return noise.astype(np.int64), spans.astype(np.int64)

    def cells(self, length: Int64) -> tuple[Int64, Int64]:
        """Those of the source and of the target; or of both without the last token, and of the target."""
        noise, spans = self.counts(length)
        source, target = length - noise + spans + 1, noise + spans + 1
        return (
            (source, target) if self._layout == "encoder_decoder" else (source + target - 1, target)
        )

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As for `TextToText`.

        Raises:
            ConfigError: there are too few sentinels, too.
        """
        spec = super().pack_spec(sequence_length)
        length = np.arange(1, spec.sequence_length + 1)
        spans, cells = self.counts(length)[1], self.cells(length)[0]
        if spans[-1] > self._sentinels.size:
            served = cells[np.searchsorted(spans, self._sentinels.size, side="right") - 1]
            raise ConfigError(
                f"sequence_length {sequence_length} has {spans[-1]} corrupted spans, and the tokenizer has "
                f"{self._sentinels.size} sentinels to put in their place; use a sequence_length of at most {served}, "
                "a larger mean_span_length, or a tokenizer with more sentinels"
            )
        return spec

    def pairs(self, texts: Ragged, key: U64) -> Pairs:
        """One of each text."""
        noise, spans = self.counts(texts.length)
        several = spans > 0  # texts of more than one token
        items = np.concatenate(((texts.length - noise)[several], noise[several]))
        keys = np.concatenate((combine(key[several], _KEPT), combine(key[several], _NOISE)))
        kept, corrupted = np.split(random_parts(items, np.tile(spans[several], 2), keys), 2)

        text, span = np.repeat(np.arange(spans.size), spans), np.arange(kept.size)
        kept_before = np.cumsum(kept) + np.cumsum(~several)[text]  # through all texts
        corrupted_before = np.cumsum(corrupted) - corrupted
        begin = kept_before + corrupted_before
        is_noise = paint(begin, begin + corrupted, np.True_, texts.tokens.size)
        sentinel = self._sentinels[span - (np.cumsum(spans) - spans)[text]]
        # Before each sentinel are those of the spans before, and the ends of the texts before.
        source_cell, target_cell = (
            before + span + text for before in (kept_before, corrupted_before)
        )
        source_length, target_length = texts.length - noise + spans + 1, noise + spans + 1
        return Pairs(
            np.arange(spans.size),
            self._joined(texts.tokens[~is_noise], source_length, source_cell, sentinel),
            self._joined(texts.tokens[is_noise], target_length, target_cell, sentinel),
        )


def random_parts(items: Int64, parts: Int64, key: U64) -> Int64:
    """Cuts rows of items into parts of at least one item; each way to do so is equally likely.

    The first part begins with the first item, the others with those items that have the lowest hashes.

    Args:
        items: int64 [G], of each row; at most 65,536.
        parts: int64 [G], of each row; at least 1, at most its items.
        key: uint64 [G], of each row's choices.

    Returns:
        int64 [sum of parts], the items of each part.
    """
    row_bits = items.size.bit_length()
    start = np.cumsum(items) - items
    position = np.arange(items.sum(), dtype=np.uint64) - np.repeat(start.astype(np.uint64), items)
    rank = mix(np.repeat(key, items) ^ position)
    # All rows are sorted at once, by the row in the high bits; the position in the low ones makes hashes distinct.
    rank >>= np.uint64(row_bits)
    rank &= ~_POSITION_BITS
    rank |= position
    rank[start] = 0
    rank |= np.repeat(np.arange(items.size, dtype=np.uint64) << np.uint64(64 - row_bits), items)
    rank.sort()
    lowest = np.repeat(start - (np.cumsum(parts) - parts), parts) + np.arange(parts.sum())
    begin = (rank[lowest] & _POSITION_BITS).astype(np.int64) + np.repeat(start, parts)
    begin.sort()
    lengths: Int64 = np.diff(begin, append=rank.size)
    return lengths
