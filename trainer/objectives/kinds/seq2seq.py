"""Sequence to sequence: predicts targets from given sources, as in translation or summarization.

This is how T5 is fine-tuned (Raffel et al. 2020, section 2.4): every task is text to text, with a
prefix that names it, and the loss is the cross-entropy of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.errors import ConfigError
from samestep.examples import Examples, PackSpec, Sides, Vocabulary
from trainer.objectives import Objective
from trainer.objectives.rows import Int64
from trainer.objectives.text_to_text import Layout, LayoutConfig, Ragged, TextToText, alternating


@dataclass(frozen=True)
class Config(LayoutConfig):
    """Sequence to sequence; needs a dataset of pairs of texts.

    `data.sequence_length` is the length of sources, or of a decoder alone, which gets each source
    and its target in one row.

    Attributes:
        target_length: maximum length of targets, with the end token.
        truncate_sources: cuts off the end of a source that is too long, instead of rejecting it.
        truncate_targets: cuts off the end of a target that is too long. The model then learns to
            stop there; generated texts are scored against whole targets.
    """

    target_length: int = 128
    truncate_sources: bool = False
    truncate_targets: bool = False
    layout: Layout = "encoder_decoder"
    z_loss: float = 0.0

    writes_text = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_length < 2:
            raise ConfigError(
                f"target_length is {self.target_length}. Use at least 2, for example 128."
            )

    def build(self, vocabulary: Vocabulary) -> Objective:
        return SequenceToSequence(self, vocabulary)


class SequenceToSequence(TextToText):
    """Predicts targets from sources; see `TextToText` for the arrays. `</s>` ends both."""

    config: Config

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """Pairs of texts.

        Raises:
            ConfigError: there is no room for a source.
        """
        # A token and </s> for the source; a decoder alone has the first target token there, too.
        least = 2 if self._has_encoder else 3
        if sequence_length < least:
            raise ConfigError(
                f"sequence_length is {sequence_length}. Use at least {least}, for example 128."
            )
        sides = Sides(self._size(sequence_length), cost=(), joined=not self._has_encoder)
        return PackSpec(
            sequence_length,
            prefix=0,
            suffix=0,
            sides=sides,
            text_pairs=True,
            truncate_sources=self.config.truncate_sources,
            truncate_targets=self.config.truncate_targets,
        )

    def _size(self, sequence_length: int) -> tuple[int, int]:
        return sequence_length, self.config.target_length

    def predictions(self, sequence_length: int) -> int:
        return self.config.target_length

    def sources_and_targets(self, examples: Examples) -> tuple[Int64, Ragged, Ragged]:
        # The chunks are sources and targets in turn.
        source_length, target_length = examples.length[::2], examples.length[1::2]
        is_source = alternating(source_length, target_length)
        source = self._ended(examples.tokens[is_source], source_length + 1)
        target = self._ended(examples.tokens[~is_source], target_length + 1)
        return examples.row[::2], source, target
