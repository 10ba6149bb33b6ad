"""Sequence to sequence: targets are predicted from given sources, as in translation or summarisation.

This is how T5 is fine-tuned (Raffel et al. 2020, section 2.4): every task is text to text, with a prefix that names it,
and the loss is the cross-entropy of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from trainer.errors import ConfigError
from trainer.examples import Examples, PackSpec, Sides, Vocabulary
from trainer.models import Outputs
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.rows import check_z_loss
from trainer.objectives.text_to_text import Int64, Layout, Ragged, TextToText, layouts_for


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Sequence to sequence; needs a dataset of pairs of texts.

    `data.sequence_length` is that of the sources, or of a decoder alone, which gets them and the targets in one row.

    Attributes:
        target_length: cells of targets, each with the token that ends it.
        truncate_sources: leaves out the end of a source that is too long, instead of refusing it.
        truncate_targets: leaves out the end of a target that is too long, where a model then learns to stop; generated
            texts are scored against whole targets.
        layout: encoder_decoder; or prefix_lm or language_model, for a decoder that gets sources and targets in one row.
        z_loss: coefficient of log(Z)^2, where Z is the softmax's denominator, in the loss; 1e-4 in T5 v1.1.
    """

    target_length: int = 128
    truncate_sources: bool = False
    truncate_targets: bool = False
    layout: Layout = "encoder_decoder"
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.target_length < 2:
            raise ConfigError(
                f"target_length is {self.target_length}; use at least 2 cells, as 128"
            )
        check_z_loss(self.z_loss)

    @property
    def writes_text(self) -> bool:
        return True

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        return layouts_for(offers, get_args(Layout))

    def build(self, vocabulary: Vocabulary) -> Objective:
        return SequenceToSequence(self, vocabulary)


class SequenceToSequence(TextToText):
    """Predicts targets from sources; see `TextToText` for the arrays. `</s>` ends both."""

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary, config.layout, config.z_loss)
        self.config = config

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """Pairs of texts.

        Raises:
            ConfigError: there is no room for a source.
        """
        joined = self._layout != "encoder_decoder"
        least = 3 if joined else 2  # a token of each text, and the token that ends the source
        if sequence_length < least:
            raise ConfigError(
                f"sequence_length is {sequence_length}; use at least {least}, for example 128"
            )
        return PackSpec(
            sequence_length,
            prefix=0,
            suffix=0,
            sides=Sides(self._size(sequence_length), cost=(), joined=joined),
            text_pairs=True,
            truncate_sources=self.config.truncate_sources,
            truncate_targets=self.config.truncate_targets,
        )

    def _size(self, sequence_length: int) -> tuple[int, int]:
        return sequence_length, self.config.target_length

    def predictions(self, sequence_length: int) -> int:
        """T, or for a decoder alone P."""
        return self.config.target_length

    def sources_and_targets(self, examples: Examples) -> tuple[Int64, Ragged, Ragged]:
        """The texts, which are sources and targets in turn."""
        is_source = np.repeat(np.arange(examples.length.size) % 2 == 0, examples.length)
        source, target = (
            self._joined(examples.tokens[chosen], examples.length[side::2] + 1)
            for side, chosen in enumerate((is_source, ~is_source))
        )
        return examples.row[::2], source, target
