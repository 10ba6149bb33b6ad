"""Text to text: sources and targets, for an encoder and a decoder or for a decoder alone.

The layouts are the three architectures that Raffel et al. 2020, section 3.2, compare. An
encoder-decoder reads the sources and predicts the targets. A decoder alone gets both in one row and
predicts the targets in it: as a prefix LM, each position of a source sees the whole source; as a
language model, only what is before it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, PackSpec, Sides, Vocabulary
from samestep.hashing import U64, combine
from trainer.models import Outputs
from trainer.objectives.rows import Bools, Int32, Int64, TokenObjective, ZLossConfig

Layout: TypeAlias = Literal["encoder_decoder", "prefix_lm", "language_model"]

OUTPUTS: dict[Layout, str] = {
    "encoder_decoder": "target_tokens",
    "prefix_lm": "prefixed_tokens",
    "language_model": "next_tokens",
}
"""The model output that holds the logits of the targets, by layout."""

_MAX_TOKENS = 65_536  # of a text, as positions are hashed in 16 bits


class LayoutConfig(ZLossConfig):
    """Settings of a text-to-text objective.

    Attributes:
        layout: encoder_decoder; or prefix_lm or language_model, for a decoder that gets sources and
            targets in one row.
        layouts: the layouts that the objective supports.
    """

    layout: Layout
    layouts: tuple[Layout, ...] = get_args(Layout)

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        offered = [layout for layout in self.layouts if OUTPUTS[layout] in offers]
        return tuple(f"objective.layout={layout}" for layout in offered)


class Ragged(NamedTuple):
    """Sequences of different lengths.

    Attributes:
        tokens: int32 [sum of lengths], all sequences end to end.
        length: int64 [Q], number of tokens of each.
    """

    tokens: Int32
    length: Int64


class TextToText(TokenObjective):
    """An objective whose examples hold pairs of sources and targets.

    The batch of B examples has, with S positions for sources and T for targets:
        tokens: int32 [B, S], the sources.
        segments: int32 [B, S], the number of the pair in its row, from 1; 0 for padding.
        positions: int32 [B, S], counted from 0 in each source; 0 for padding.
        target_tokens: int32 [B, T], the targets shifted to the right: each begins with the padding
            token.
        target_segments, target_positions: int32 [B, T], likewise.
        labels: int64 [B, T], the targets.
        weights: float32 [B, T], 1 for a prediction that counts, 0 for padding and examples of
            weight 0.
    For a decoder alone, with S positions and P = T predictions in an example:
        tokens: int32 [B, S], each source and then its target without the end token.
        segments, positions: int32 [B, S], as above.
        prefix: bool [B, S], the positions of sources; for a prefix LM only.
        predicted: int64 [B, P], the position before each token of a target; unused entries, at the
            end of a row, are 0.
        labels: int64 [B, P], the targets.
        weights: float32 [B, P], as above.

    Example of the source a b </s> with the target c d </s>:

        encoder-decoder   tokens         a b </s>
                          target_tokens  <pad> c d
                          labels         c d </s>
        decoder alone     tokens         a b </s> c d
                          prefix         1 1 1 0 0
                          predicted      2 3 4
                          labels         c d </s>

    Raises:
        ConfigError: the vocabulary has no token that ends a text, or none for padding.
    """

    denominator = "lm"

    def __init__(self, config: LayoutConfig, vocabulary: Vocabulary) -> None:
        if vocabulary.eos is None or vocabulary.pad is None:
            missing = "</s>" if vocabulary.eos is None else "<pad>"
            raise ConfigError(
                "text-to-text objectives need </s> and <pad>, and this tokenizer has no "
                f"{missing}. Use one made for T5."
            )
        self.config, self.z_loss = config, config.z_loss
        self._eos, self._pad = np.int32(vocabulary.eos), np.int32(vocabulary.pad)
        self._has_encoder = config.layout == "encoder_decoder"
        self.predicts = OUTPUTS[config.layout]
        self.needs = frozenset({self.predicts})

    @abstractmethod
    def pack_spec(self, sequence_length: int) -> PackSpec: ...

    @abstractmethod
    def sources_and_targets(self, examples: Examples) -> tuple[Int64, Ragged, Ragged]:
        """The row of each pair, ascending; the sources; the targets. </s> ends each of these."""

    @abstractmethod
    def _size(self, sequence_length: int) -> tuple[int, int]:
        """S and T (or P) for the `sequence_length` of the `PackSpec`."""

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        row, source, target = self.sources_and_targets(examples)
        rows, (width, target_width) = examples.key.size, self._size(sequence_length)
        targets = _Grid(row, target.length, (rows, target_width))
        if self._has_encoder:
            sources = _Grid(row, source.length, (rows, width))
            shifted = np.roll(target.tokens, 1)
            shifted[targets.start] = self._pad
            batch: Batch = {
                "tokens": sources.place(source.tokens, self._pad),
                "segments": sources.segments(),
                "positions": sources.place(sources.position),
                "target_tokens": targets.place(shifted, self._pad),
                "target_segments": targets.segments(),
                "target_positions": targets.place(targets.position),
            }
        else:
            inputs = target.length - 1  # without the end token, which is predicted only
            joined = _Grid(row, source.length + inputs, (rows, width))
            in_source = alternating(source.length, inputs)
            tokens = np.empty(in_source.size, dtype=np.int32)
            tokens[in_source] = source.tokens
            tokens[~in_source] = target.tokens[alternating(inputs, np.ones_like(inputs))]
            # The last position of a source predicts its target's first token.
            first_predicted = joined.column + source.length - 1
            predicted = np.repeat(first_predicted, target.length) + targets.position
            batch = {
                "tokens": joined.place(tokens, self._pad),
                "segments": joined.segments(),
                "positions": joined.place(joined.position),
                "predicted": targets.place(predicted),
            }
            if self.config.layout == "prefix_lm":
                batch["prefix"] = joined.place(in_source)
        batch["labels"] = targets.place(target.tokens).astype(np.int64)
        batch["weights"] = targets.filled * examples.weight[:, None]
        return batch

    def _ended(
        self,
        text: Int32,
        length: Int64,
        specials: tuple[Int64, Int32] | None = None,
    ) -> Ragged:
        """Builds sequences of text that </s> ends: of a b c and the lengths 3 2, a b </s> c </s>.

        Args:
            text: of all sequences.
            length: of each sequence, with its special tokens.
            specials: positions, counted through all sequences, and special tokens to put there.
        """
        tokens = np.empty(length.sum(), dtype=np.int32)
        is_text = np.ones(tokens.size, dtype=np.bool_)
        ends = np.cumsum(length) - 1
        tokens[ends], is_text[ends] = self._eos, False
        if specials is not None:
            tokens[specials[0]], is_text[specials[0]] = specials[1], False
        tokens[is_text] = text
        return Ragged(tokens, length)


class SelfSupervised(TextToText):
    """Makes sources and targets out of plain text.

    Under an isolating packing, each chunk of a document is a text. Otherwise each row is one, in
    which documents follow each other without a separator, as in T5's own pipeline, so that all rows
    hold equally many tokens.

    `config.target_length` is T (or P); None is what a row of a single text needs.
    """

    @abstractmethod
    def sizes(self, length: Int64) -> tuple[Int64, Int64]:
        """Maximum positions on each side of texts of the given lengths; they grow with the length.

        For a decoder alone, the first side holds the source and the target without its end token.
        """

    @abstractmethod
    def pairs(self, texts: Ragged, key: U64) -> tuple[Int64, Ragged, Ragged]:
        """Makes pairs of texts: the index of each pair's text, ascending; sources; targets.

        A pair depends only on the tokens and the key, uint64 [Q], of its text.
        """

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As much text as fits into `sequence_length` positions of the encoder, or lone decoder.

        Raises:
            ConfigError: no text fits, or more than positions can be hashed for; or `target_length`
                is too short for it.
        """
        cost = np.stack(self.sizes(np.arange(1, _MAX_TOKENS + 1)), axis=1)
        least, longest = cost[0, 0], cost[-1, 0]
        if not least <= sequence_length <= longest:
            raise ConfigError(
                f"sequence_length is {sequence_length}. Use {least} to {longest}, for example 512."
            )
        # T5 calls this the `tokens_length` that gives sources of `sequence_length`: 568 for 512.
        text_length = int(np.searchsorted(cost[:, 0], sequence_length, side="right"))
        size, needed = self._size(text_length), cost[text_length - 1, 1]
        if size[1] < needed:
            raise ConfigError(
                f"target_length is {size[1]}, and the {text_length} tokens of text for "
                f"sequence_length {sequence_length} give targets of {needed}. "
                f"Set target_length to at least {needed}, or to null."
            )
        costs = tuple((source, target) for source, target in cost[:text_length].tolist())
        sides = Sides(size, costs, joined=not self._has_encoder)
        return PackSpec(text_length, prefix=0, suffix=0, sides=sides)

    def _size(self, sequence_length: int) -> tuple[int, int]:
        source, target = self.sizes(np.array([sequence_length]))
        return int(source[0]), self.config.target_length or int(target[0])

    def predictions(self, sequence_length: int) -> int:
        return self._size(self.pack_spec(sequence_length).sequence_length)[1]

    def sources_and_targets(self, examples: Examples) -> tuple[Int64, Ragged, Ragged]:
        if examples.isolated:
            row, length = examples.row, examples.length
        else:
            filled = np.bincount(examples.row, examples.length, examples.key.size).astype(np.int64)
            row = np.flatnonzero(filled)
            length = filled[row]
        # The key of a text is a hash of its row's key and its index in the row.
        number = np.arange(row.size) - np.searchsorted(row, row)
        key = combine(examples.key[row], number)
        text, source, target = self.pairs(Ragged(examples.tokens, length), key)
        return row[text], source, target


def alternating(first: Int64, second: Int64) -> Bools:
    """first[0] times true, second[0] times false, first[1] times true, and so on."""
    lengths = np.stack((first, second), axis=1).reshape(-1)
    return np.repeat(np.tile([True, False], first.size), lengths)


class _Grid:
    """Sequences in rows, one after another from the first position on.

    Attributes:
        filled: bool [B, W], the positions of sequences.
        start: int64 [Q], the first token of each sequence, counted through all of them.
        column: int64 [Q], the first position of each sequence in its row.
        position: int32 [number of tokens], of each token in its sequence.

    Args:
        row: int64 [Q], the row of each sequence; ascending.
        length: int64 [Q], number of tokens of each sequence.
        shape: B and W.
    """

    def __init__(self, row: Int64, length: Int64, shape: tuple[int, int]) -> None:
        # Example: sequences of 2, 3 and 4 tokens in the rows 0, 0 and 1, of width 6:
        #
        #     segments   1 1 2 2 2 0     start      0 2 5
        #                1 1 1 1 0 0     column     0 2 0
        #                                position   0 1 0 1 2 0 1 2 3
        self.filled = np.arange(shape[1]) < np.bincount(row, length, shape[0])[:, None]
        self.start = np.cumsum(length) - length
        first = np.searchsorted(row, row)  # the first sequence of each sequence's row
        self.column = self.start - self.start[first]
        starts = np.repeat(self.start.astype(np.int32), length)
        self.position = np.arange(length.sum(), dtype=np.int32) - starts
        self._length = length
        self._number = (np.arange(1, row.size + 1) - first).astype(np.int32)

    def place(self, values: npt.NDArray[Any], padding: npt.ArrayLike = 0) -> npt.NDArray[Any]:
        """Puts one value for each token at the filled positions: [B, W]."""
        if self.filled.all():
            return values.reshape(self.filled.shape)
        placed = np.full(self.filled.shape, padding, dtype=values.dtype)
        placed[self.filled] = values
        return placed

    def segments(self) -> Int32:
        """The number of each position's sequence in its row, from 1; 0 for padding: [B, W]."""
        return self.place(np.repeat(self._number, self._length))
