"""Span corruption, T5's denoising objective (Raffel et al. 2020, section 3.1.4).

Sentinels replace spans of the text. The target is each sentinel, followed by the span that it
stands for. Spans are chosen as by `random_spans_noise_mask` of
google-research/text-to-text-transfer-transformer: the numbers of corrupted tokens and of spans are
exact, and each way to cut the corrupted tokens, and the others, into that many spans is equally
likely. Here the cuts are hashes of (the text's key, position), so they depend on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.errors import ConfigError
from trainer.examples import PackSpec, Vocabulary
from trainer.hashing import U64, combine, mix, name_key
from trainer.objectives import Objective
from trainer.objectives.rows import Int64, fill_spans
from trainer.objectives.text_to_text import Layout, LayoutConfig, Ragged, SelfSupervised

_KEPT = name_key("span_corruption.kept")
_NOISE = name_key("span_corruption.noise")
_POSITION_BITS = np.uint64(0xFFFF)


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
                f"noise_density is {self.noise_density}. Use a fraction between 0 and 1, as 0.15.",
            )
        if self.mean_span_length < 1:
            raise ConfigError(
                f"mean_span_length is {self.mean_span_length}. Use at least 1 token, as 3.",
            )
        if self.target_length is not None and self.target_length < 1:
            raise ConfigError(
                f"target_length is {self.target_length}. Use at least 1, as 114, or null.",
            )

    def build(self, vocabulary: Vocabulary) -> Objective:
        return SpanCorruption(self, vocabulary)


class SpanCorruption(SelfSupervised):
    """The denoising objective; see `TextToText` for the arrays.

    If `b` and `d e` of the text `a b c d e` are corrupted, the source is `a <0> c <1> </s>` and the
    target `<0> b <1> d e </s>`, with sentinels <0> and <1>. A text begins with a kept token and
    ends with a corrupted one. A text of one token is kept, and its target is `</s>`.

    Raises:
        ConfigError: the vocabulary has no sentinels, or lacks what `TextToText` needs.
    """

    config: Config

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        if not vocabulary.sentinels:
            raise ConfigError(
                "span corruption needs a tokenizer with sentinels (<extra_id_0>, ...), and this "
                'one has none. Use one made for T5, or write "extra_ids": 100 into the '
                "tokenizer_config.json of another SentencePiece model and build the dataset again."
            )
        self._sentinels = np.array(vocabulary.sentinels, dtype=np.int32)

    def counts(self, length: Int64) -> tuple[Int64, Int64]:
        """Number of corrupted tokens, and of spans, in texts of the given lengths."""
        # The bounds keep at least one token before each span, and at least one in it. For a text of
        # one token they contradict each other, and np.clip gives the upper one, 0 tokens.
        config = self.config
        noise = np.clip(np.rint(length * config.noise_density), 1, length - 1)
        wanted = np.rint(noise / config.mean_span_length)
        spans = np.clip(wanted, np.minimum(noise, 1), length - noise)
        return noise.astype(np.int64), spans.astype(np.int64)

    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        noise, spans = self.counts(length)
        # Kept tokens, sentinels and </s>; corrupted tokens, sentinels and </s>.
        source, target = length - noise + spans + 1, noise + spans + 1
        return (source if self._has_encoder else source + target - 1), target

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As for `TextToText`.

        Raises:
            ConfigError: also if there are too few sentinels.
        """
        spec = super().pack_spec(sequence_length)
        length = np.arange(1, spec.sequence_length + 1)
        spans = self.counts(length)[1]
        if spans[-1] > self._sentinels.size:
            # `spans` ascends, so this is the longest text with enough sentinels.
            longest = np.searchsorted(spans, self._sentinels.size, side="right") - 1
            raise ConfigError(
                f"sequence_length {sequence_length} has {spans[-1]} corrupted spans, and the "
                f"tokenizer has {self._sentinels.size} sentinels to replace them. Use a "
                f"sequence_length of at most {self.sizes(length)[0][longest]}, a larger "
                "mean_span_length, or a tokenizer with more sentinels."
            )
        return spec

    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        """Makes one pair of each text."""
        # Example: the text a b c d e with kept parts of 1 and 1 tokens and corrupted ones of 1 and
        # 2 is a (b) c (d e). All numbers are counted through all texts.
        #
        #     kept_before        1 2     kept tokens up to each span
        #     corrupted_before   0 1     corrupted tokens before it
        #     begin              1 3     their sum: where the span begins in the text
        #     source position    1 3     of <0> and <1> in a <0> c <1> </s>
        #     target position    0 2     of <0> and <1> in <0> b <1> d e </s>
        noise, spans = self.counts(texts.length)
        has_spans = spans > 0  # texts of more than one token
        # The kept tokens of all texts, then the corrupted ones of all texts, in one call.
        items = np.concatenate(((texts.length - noise)[has_spans], noise[has_spans]))
        keys = np.concatenate((combine(key[has_spans], _KEPT), combine(key[has_spans], _NOISE)))
        parts = random_parts(items, np.tile(spans[has_spans], 2), keys)
        kept, corrupted = np.split(parts, 2)

        text, span = np.repeat(np.arange(spans.size), spans), np.arange(kept.size)
        # Texts of one token have no part in `kept`; each one before adds its token.
        kept_before = np.cumsum(kept) + np.cumsum(~has_spans)[text]
        corrupted_before = np.cumsum(corrupted) - corrupted
        begin = kept_before + corrupted_before
        is_noise = fill_spans(begin, begin + corrupted, np.True_, texts.tokens.size)
        sentinel = self._sentinels[span - (np.cumsum(spans) - spans)[text]]
        # A sentinel comes after the sentinels of earlier spans and the </s> of earlier texts.
        specials_before = span + text
        source = self._ended(
            texts.tokens[~is_noise],
            texts.length - noise + spans + 1,
            (kept_before + specials_before, sentinel),
        )
        target = self._ended(
            texts.tokens[is_noise],
            noise + spans + 1,
            (corrupted_before + specials_before, sentinel),
        )
        return np.arange(spans.size), source, target


def random_parts(items: Int64, parts: Int64, key: U64) -> Int64:
    """Cuts rows of items into parts of at least one item; each way to do so is equally likely.

    A row's first part begins with its first item, and the others with the items of lowest hash.

    Args:
        items: int64 [G], number of items of each row; at most 65,536.
        parts: int64 [G], number of parts of each row; at least 1, at most its items.
        key: uint64 [G], of each row's choices.

    Returns:
        int64 [sum of parts], the number of items of each part.
    """
    # Example: 5 items in 3 parts with the hashes 7 4 9 1 6. Parts begin with the items 0, 3 (hash
    # 1) and 1 (hash 4), so they have 1, 2 and 2 items.
    #
    # All rows are sorted at once. The bits of a rank, from high to low: the row, which keeps rows
    # apart; bits of the hash; and the item's position in its row, 16 bits, which makes ranks
    # distinct and is read back after sorting. A row's first item has hash 0 and so comes first.
    row_bits = items.size.bit_length()
    start = np.cumsum(items) - items
    position = np.arange(items.sum(), dtype=np.uint64) - np.repeat(start.astype(np.uint64), items)
    rank = mix(np.repeat(key, items) ^ position)
    rank >>= np.uint64(row_bits)
    rank &= ~_POSITION_BITS
    rank |= position
    rank[start] = 0
    row = np.arange(items.size, dtype=np.uint64)
    rank |= np.repeat(row << np.uint64(64 - row_bits), items)
    rank.sort()
    # The first parts[g] ranks of each row g, which begin at start[g].
    first_part = np.cumsum(parts) - parts
    lowest = np.repeat(start - first_part, parts) + np.arange(parts.sum())
    begin = (rank[lowest] & _POSITION_BITS).astype(np.int64) + np.repeat(start, parts)
    begin.sort()
    lengths: Int64 = np.diff(begin, append=rank.size)
    return lengths
