"""Multi-task pre-training: self-supervision on plain text beside tasks that are text to text.

In place of pre-training followed by fine-tuning, Raffel et al. 2020, section 3.5.3, train on a
mixture of both; `data.sources` names the datasets and their weights. A dataset that was built from
pairs of texts is read as pairs, any other as plain text. Both make the same arrays, so a batch has
rows of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from samestep.config import Kinds, kind_name
from samestep.errors import ConfigError
from samestep.examples import Examples, PackSpec, Vocabulary
from trainer.models import Outputs
from trainer.objectives import Objective, ObjectiveConfig, adapted_inside
from trainer.objectives.kinds import seq2seq
from trainer.objectives.rows import Bools, Int64
from trainer.objectives.text_to_text import Layout, Ragged, SelfSupervised, TextToText

_KINDS = ("span_corruption", "denoising", "prefix_lm")


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Plain text and pairs of texts in one mixture.

    Pairs have the layout, the z-loss and the lengths of the objective of plain text:
    `data.sequence_length` and its `target_length`.

    Attributes:
        of: the objective of datasets of plain text, with its settings: span_corruption, denoising
            or prefix_lm.
        truncate_sources: cuts off the end of a pair's source that is too long, instead of rejecting
            it.
        truncate_targets: likewise, of targets.
    """

    of: Annotated[Any, Kinds("trainer.objectives.kinds")]
    truncate_sources: bool = False
    truncate_targets: bool = False

    def __post_init__(self) -> None:
        kind = kind_name(self.of)
        if kind not in _KINDS:
            raise ConfigError(
                f"of is {kind}, which makes no pairs of texts out of plain text. Use one of "
                f"{', '.join(_KINDS)}."
            )

    @property
    def layout(self) -> Layout:
        """See `LayoutConfig`."""
        own: Layout = self.of.layout
        return own

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        return adapted_inside(self.of, missing, offers)

    def build(self, vocabulary: Vocabulary) -> Objective:
        return MultiTask(self, vocabulary)


class MultiTask(TextToText):
    """Rows of plain text and rows of pairs; see `TextToText` for the arrays."""

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config.of, vocabulary)
        self._texts: SelfSupervised = config.of.build(vocabulary)
        self._vocabulary = vocabulary
        self._of_pairs = seq2seq.Config(
            truncate_sources=config.truncate_sources,
            truncate_targets=config.truncate_targets,
            layout=config.layout,
        )
        self._pairs = seq2seq.SequenceToSequence(self._of_pairs, vocabulary)

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """The layout of plain text, with the layout of pairs, on two sides of equal sizes."""
        spec = self._texts.pack_spec(sequence_length)
        width, target_width = self._size(spec.sequence_length)
        pairs = replace(self._of_pairs, target_length=target_width).build(self._vocabulary)
        return replace(spec, of_pairs=pairs.pack_spec(width))

    def predictions(self, sequence_length: int) -> int:
        return self._texts.predictions(sequence_length)

    def _size(self, sequence_length: int) -> tuple[int, int]:
        return self._texts._size(sequence_length)

    def sources_and_targets(self, examples: Examples) -> tuple[Int64, Ragged, Ragged]:
        paired = examples.paired
        if paired is None:
            return self._texts.sources_and_targets(examples)
        if paired.all() or not paired.any():
            only = self._pairs if paired.all() else self._texts
            return only.sources_and_targets(examples)
        of_texts = self._texts.sources_and_targets(_rows(examples, ~paired))
        of_pairs = self._pairs.sources_and_targets(_rows(examples, paired))
        row = np.concatenate([of_texts[0], of_pairs[0]])
        order = np.argsort(row, kind="stable")
        sources, targets = (
            _ordered(texts, pairs, order)
            for texts, pairs in zip(of_texts[1:], of_pairs[1:], strict=True)
        )
        return row[order], sources, targets


def _rows(examples: Examples, chosen: Bools) -> Examples:
    """Some rows, bool [B], with their chunks; rows keep their numbers."""
    chunks = chosen[examples.row]
    return replace(
        examples,
        tokens=examples.tokens[np.repeat(chunks, examples.length)],
        row=examples.row[chunks],
        column=examples.column[chunks],
        length=examples.length[chunks],
    )


def _ordered(first: Ragged, second: Ragged, order: Int64) -> Ragged:
    """Sequences of two lists in another order.

    Of the lists (a b) and (c, d e f) and the order 1 2 0: c, d e f, a b.
    """
    tokens = np.concatenate([first.tokens, second.tokens])
    length = np.concatenate([first.length, second.length])
    begin = (np.cumsum(length) - length)[order]
    length = length[order]
    # Token j of a sequence that begins at b, and at p in the new list: the token j - p + b.
    moved = np.repeat(begin - (np.cumsum(length) - length), length)
    return Ragged(tokens[np.arange(tokens.size) + moved], length)
