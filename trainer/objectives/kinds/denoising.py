"""Denoising: predicts a text, or what was taken from it, from a corrupted text.

One scheme each for the objectives that Raffel et al. 2020 ("T5"), section 3.3, compare, for the
corruptions of Lewis et al. 2020 ("BART"), section 2.2, and for the mixture of denoisers of Tay et
al. 2022 ("UL2"), table 1. `noise` has the corruptions, `span_corruption` the random spans of T5,
and `prefix_lm` its prefix language modeling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.hashing import U64, combine, name_key, uniform
from trainer.objectives import Objective, noise
from trainer.objectives.kinds import span_corruption
from trainer.objectives.rows import Int64
from trainer.objectives.text_to_text import Layout, LayoutConfig, Ragged, SelfSupervised

Scheme: TypeAlias = Literal[
    "bert",
    "mass",
    "drop",
    "replace_spans",
    "spans",
    "deshuffle",
    "infill",
    "permute_sentences",
    "bart",
    "delete",
    "rotate",
    "ul2",
]

_DENSITY = {"noise_density": 0.15}
_INFILL = {"noise_density": 0.3, "mean_span_length": 3.0}
_DEFAULTS: dict[Scheme, dict[str, float]] = {
    "bert": {**_DENSITY, "replace_mask": 0.8, "replace_random": 0.1},
    "mass": _DENSITY,
    "drop": _DENSITY,
    "replace_spans": _DENSITY,
    "spans": {**_DENSITY, "mean_span_length": 3.0},
    "deshuffle": {},
    "infill": _INFILL,
    "permute_sentences": {},
    "bart": _INFILL,
    "delete": _DENSITY,
    "rotate": {},
    "ul2": {},
}
"""The settings of each scheme, and their values unless the experiment sets them."""

_DENOISER = name_key("denoising.denoiser")
_SUFFIX = name_key("denoising.suffix")

# UL2's denoisers (table 1): density, mean length and mode of each. The last one, S, is
# a prefix language model: its only span is the end of the text, a quarter of it on average.
_R, _S, _X = 1, 2, 3
_DENSITIES = np.array([0.15, 0.15, 0.5, 0.5, 0.15, 0.5])
_MEANS = np.array([3.0, 8.0, 3.0, 8.0, 64.0, 64.0])
_MODES = np.array([_R, _R, _X, _X, _X, _X, _S])


@dataclass(frozen=True)
class Config(LayoutConfig):
    """Denoising of texts by one of several schemes.

    `data.sequence_length` is the length of the sources, or of a decoder alone. A setting that the
    scheme does not have must be left out.

    Attributes:
        scheme: what is corrupted, and what is predicted.
            The whole text from: `bert`, tokens replaced as by BERT; `mass`, tokens replaced by the
            mask alone; `deshuffle`, the tokens in another order; `infill`, spans replaced by one
            mask each; `permute_sentences`, the sentences in another order; `bart`, both of these;
            `delete`, some tokens missing; `rotate`, the text beginning at another token.
            What was taken from: `drop`, some tokens missing; `replace_spans`, runs of random tokens
            replaced by sentinels; `spans`, random spans replaced by sentinels, as
            `span_corruption`; `ul2`, UL2's mixture of seven denoisers.
        noise_density: fraction of a text's tokens to corrupt; the rounded count, at least 1, is
            exact. null: 0.15, and 0.3 for infill and bart. deshuffle, permute_sentences, rotate and
            ul2 have none.
        mean_span_length: mean number of tokens of a span, for spans, infill and bart only, whose
            lengths are Poisson-distributed in the last two; at least 1. null: 3.
        replace_mask: of bert: probability that a corrupted token is replaced by the mask. null:
            0.8.
        replace_random: of bert: probability that it is replaced by a random token; else it stays
            as it is. null: 0.1.
        target_length: maximum length of targets; null is what a single text needs that fills the
            sources.
    """

    scheme: Scheme
    noise_density: float | None = None
    mean_span_length: float | None = None
    replace_mask: float | None = None
    replace_random: float | None = None
    layout: Layout = "encoder_decoder"
    target_length: int | None = None
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("noise_density", "mean_span_length", "replace_mask", "replace_random"):
            if getattr(self, name) is not None and name not in _DEFAULTS[self.scheme]:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, which scheme {self.scheme} does not have. "
                    "Leave it out, or choose another scheme."
                )
        settings = self.settings()
        density, mean = settings.get("noise_density", 0.15), settings.get("mean_span_length", 3.0)
        if not 0 < density < 1:
            raise ConfigError(
                f"noise_density is {density}. Use a fraction between 0 and 1, such as 0.15."
            )
        if mean < 1:
            raise ConfigError(f"mean_span_length is {mean}. Use at least 1 token, such as 3.")
        mask, random = settings.get("replace_mask", 0.0), settings.get("replace_random", 0.0)
        if min(mask, random) < 0 or mask + random > 1 + 1e-9:
            raise ConfigError(
                f"replace_mask is {mask} and replace_random is {random}. "
                "Use probabilities that add up to at most 1, such as 0.8 and 0.1."
            )
        if self.target_length is not None and self.target_length < 1:
            raise ConfigError(
                f"target_length is {self.target_length}. Use at least 1, such as 512, or null."
            )

    def settings(self) -> dict[str, float]:
        """The settings that the scheme has."""
        given = {name: getattr(self, name) for name in _DEFAULTS[self.scheme]}
        return {
            name: default if given[name] is None else given[name]
            for name, default in _DEFAULTS[self.scheme].items()
        }

    def build(self, vocabulary: Vocabulary) -> Objective:
        if self.scheme == "spans":
            same = span_corruption.Config(
                layout=self.layout,
                target_length=self.target_length,
                z_loss=self.z_loss,
                **self.settings(),
            )
            return same.build(vocabulary)
        match self.scheme:
            case "drop":
                return DroppedTokens(self, vocabulary)
            case "replace_spans":
                return ReplacedRuns(self, vocabulary)
            case "ul2":
                return MixtureOfDenoisers(self, vocabulary)
        return Reconstruction(self, vocabulary)


class Reconstruction(SelfSupervised):
    """Predicts a whole text from a corrupted one; see `TextToText` for the arrays.

    If the source is `a M c </s>`, the target is `a b c </s>`. The mask M is the tokenizer's [MASK],
    or its first sentinel, <extra_id_0>.

    Raises:
        ConfigError: the vocabulary lacks a token for the mask, an ordinary token or a full stop, if
            the scheme needs it, or lacks what `TextToText` needs.
    """

    config: Config

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self._settings = config.settings()
        mask = vocabulary.mask
        if mask is None and vocabulary.sentinels:
            mask = vocabulary.sentinels[0]
        if mask is None and config.scheme in ("bert", "mass", "infill", "bart"):
            raise ConfigError(
                f"scheme is {config.scheme}, which needs [MASK] or <extra_id_0>, and this "
                "tokenizer has neither. Use one made for T5 or BART."
            )
        self._mask = mask or 0
        self._full_stops = vocabulary.full_stops
        if not self._full_stops and config.scheme in ("permute_sentences", "bart"):
            raise ConfigError(
                f"scheme is {config.scheme}, which ends sentences at full stops, and this "
                "tokenizer has no token for one. Use scheme infill, or train a tokenizer on text "
                "with punctuation."
            )
        ids = np.arange(vocabulary.size, dtype=np.int32)
        self._ordinary = ids[~np.isin(ids, vocabulary.special)]

    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        # Infilling has at most one mask for each masked token, so no source exceeds its text.
        target = source = length + 1
        if self.config.scheme == "delete":
            source = source - self._count(length)
        return (source if self._has_encoder else source + target - 1), target

    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        """Makes one pair of each text."""
        corrupted = self._corrupted(texts, key)
        source = self._ended(corrupted.tokens, corrupted.length + 1)
        return np.arange(key.size), source, self._ended(texts.tokens, texts.length + 1)

    def _count(self, length: Int64) -> Int64:
        return noise.noise_count(length, self._settings["noise_density"])

    def _corrupted(self, texts: Ragged, key: U64) -> Ragged:
        match self.config.scheme:
            case "deshuffle":
                return noise.shuffle(texts, key)
            case "rotate":
                return noise.rotate(texts, key)
            case "permute_sentences":
                return noise.permute_sentences(texts, key, self._full_stops)
            case "bart" | "infill" as scheme:
                if scheme == "bart":
                    texts = noise.permute_sentences(texts, key, self._full_stops)
                mean, count = self._settings["mean_span_length"], self._count(texts.length)
                return noise.infill(texts, key, count, mean, self._mask)
        count = self._count(texts.length)
        chosen = noise.choose(texts.length, count, key)
        if self.config.scheme == "delete":
            return Ragged(texts.tokens[~chosen], texts.length - count)
        mask = self._settings.get("replace_mask", 1.0)
        random = self._settings.get("replace_random", 0.0)
        return noise.replace(texts, key, chosen, self._mask, self._ordinary, mask, random)


class DroppedTokens(SelfSupervised):
    """Predicts the tokens that are missing in a text, in their order.

    If `b` and `d` of the text `a b c d` are dropped, the source is `a c </s>` and the target
    `b d </s>`. A text of one token is kept.
    """

    config: Config

    def _count(self, length: Int64) -> Int64:
        return noise.noise_count(length, self.config.settings()["noise_density"])

    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        count = self._count(length)
        source, target = length - count + 1, count + 1
        return (source if self._has_encoder else source + target - 1), target

    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        """Makes one pair of each text."""
        count = self._count(texts.length)
        chosen = noise.choose(texts.length, count, key)
        source = self._ended(texts.tokens[~chosen], texts.length - count + 1)
        return np.arange(key.size), source, self._ended(texts.tokens[chosen], count + 1)


class ReplacedRuns(span_corruption.SentinelPairs):
    """Random tokens are corrupted, and each run of them is replaced by a sentinel.

    T5's baseline (Raffel et al. 2020, section 3.1.4). Unlike under `spans`, the lengths of runs are
    not set: at 15 %, most have one token.
    """

    config: Config
    fewer_spans = "a smaller noise_density"

    def _count(self, length: Int64) -> Int64:
        return noise.noise_count(length, self.config.settings()["noise_density"])

    def most_spans(self, length: Int64) -> Int64:
        # Each token a run of its own, if there are enough kept tokens to separate them.
        count = self._count(length)
        spans: Int64 = np.minimum(count, length - count + 1)
        return spans

    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        count, spans = self._count(length), self.most_spans(length)
        source, target = length - count + spans + 1, count + spans + 1
        return (source if self._has_encoder else source + target - 1), target

    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        """Makes one pair of each text."""
        chosen = noise.choose(texts.length, self._count(texts.length), key)
        source, target = self.replaced(texts, *noise.runs(chosen, texts.length))
        return np.arange(key.size), source, target


class MixtureOfDenoisers(span_corruption.SentinelPairs):
    """UL2's seven denoisers, of which a hash of a text's key chooses one (Tay et al. 2022).

    A source begins with the token of its mode: R for regular spans, X for extreme ones, S for
    sequences, whose only span is the end of the text. These tokens are the tokenizer's last
    sentinels: R the last one, S and X the two before it; the others replace spans.

    The S-denoiser's span has any length up to half of the text, so a quarter on average.

    Raises:
        ConfigError: the vocabulary has fewer than four sentinels.
    """

    config: Config
    fewer_spans = "scheme spans"

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        if self._sentinels.size < 4:
            raise ConfigError(
                f"scheme ul2 needs 4 sentinels, three of them for modes, and this tokenizer has "
                f"{self._sentinels.size}. Use one with 100, as T5's."
            )
        self._modes, self._sentinels = self._sentinels[-3:], self._sentinels[:-3]

    def most_spans(self, length: Int64) -> Int64:
        spans: Int64 = self._counts(length)[1].max(axis=1)
        return spans

    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        count, spans = self._counts(length)
        # The mode's token, kept tokens, sentinels and </s>; corrupted tokens, sentinels and </s>.
        sources, targets = 2 + length[:, None] - count + spans, 1 + count + spans
        # The shortest suffix of an S-denoiser, one token, leaves the longest source.
        source = np.maximum(sources.max(axis=1), length + 2)
        joined = (sources + targets - 1).max(axis=1)
        return (source if self._has_encoder else joined), targets.max(axis=1)

    def _counts(self, length: Int64) -> tuple[Int64, Int64]:
        """Corrupted tokens and spans of each text under each denoiser, S at most: int64 [Q, 7]."""
        text = length[:, None]
        count = noise.noise_count(text, _DENSITIES)
        spans = noise.span_count(text, count, _MEANS)
        return np.hstack((count, text // 2)), np.hstack((spans, np.minimum(text // 2, 1)))

    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        """Makes one pair of each text."""
        text = np.arange(key.size)
        # The remainder of a 64-bit hash by 7 is uniform to within 1e-18.
        denoiser = (combine(key, _DENOISER) % np.uint64(_MODES.size)).astype(np.int64)
        mode = _MODES[denoiser]
        counts, spans = (each[text, denoiser] for each in self._counts(texts.length))
        # `counts` of S is the longest suffix; the others are exact.
        suffix = 1 + np.floor(uniform(combine(key, _SUFFIX)) * counts).astype(np.int64)
        count = np.where((mode == _S) & (counts > 0), suffix, counts)
        begin, corrupted = noise.random_spans(texts.length, count, spans, key)
        source, target = self.replaced(texts, spans, begin, corrupted)
        first = np.cumsum(source.length) - source.length
        tokens = np.insert(source.tokens, first, self._modes[-mode])
        return text, Ragged(tokens, source.length + 1), target
