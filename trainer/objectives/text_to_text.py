"""Text to text: sources and targets in rows, for an encoder and a decoder or for a decoder alone.

The layouts are the three architectures that Raffel et al. 2020, section 3.2, compare. An encoder-decoder reads the
sources and predicts the targets. A decoder alone gets both in one row and predicts the targets in it: as a prefix LM it
sees all of a source from each of its cells, as a language model only what is before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Sides, Vocabulary
from trainer.hashing import U64, combine
from trainer.models import Outputs
from trainer.objectives import Loss, Objective
from trainer.objectives.rows import language_model_loss

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Layout: TypeAlias = Literal["encoder_decoder", "prefix_lm", "language_model"]

OUTPUTS: dict[Layout, str] = {
    "encoder_decoder": "target_tokens",
    "prefix_lm": "prefixed_tokens",
    "language_model": "next_tokens",
}
"""The model output that holds the logits of the targets, by layout."""

_MOST_TOKENS = 65_536  # of a text, so that positions fit into 16 bits


def layouts_for(offers: Outputs, layouts: Sequence[Layout]) -> tuple[str, ...]:
    """Settings, as key=value, that choose a layout for what a model offers."""
    return tuple(f"objective.layout={layout}" for layout in layouts if OUTPUTS[layout] in offers)


class Ragged(NamedTuple):
    """Sequences of different lengths.

    Attributes:
        tokens: int32 [sum of length], of all sequences end to end.
        length: int64 [Q], tokens of each.
    """

    tokens: Int32
    length: Int64


class Pairs(NamedTuple):
    """Sources with their targets, each with the token that ends it.

    Attributes:
        text: int64 [Q], the text that a pair is made from; ascending.
        source: Q sequences.
        target: Q sequences.
    """

    text: Int64
    source: Ragged
    target: Ragged


class TextToText(Objective):
    """An objective whose examples hold pairs of sources and targets; see `trainer.objectives.Objective`.

    The batch of B examples has, with S cells of sources and T of targets in an example (`pack_spec(S).sides.size`):
        tokens: int32 [B, S], the sources.
        segments: int32 [B, S], 0 for padding, else the number from 1 of the pair within its row.
        positions: int32 [B, S], cells since the source's first; 0 for padding.
        target_tokens: int32 [B, T], the targets shifted to the right: before each stands the padding token.
        target_segments, target_positions: int32 [B, T], as for the sources.
        labels: int64 [B, T], the targets.
        weights: float32 [B, T], 1 for a prediction that counts, 0 for padding and examples of weight 0.
    For a decoder alone, with S cells and P = T predictions in an example:
        tokens: int32 [B, S], each source and then its target without the token that ends it.
        segments, positions: int32 [B, S], as above.
        prefix: bool [B, S], the cells of sources; for a prefix LM only.
        predicted: int64 [B, P], the cells before each token of a target; unused entries, at the end of a row, are 0.
        labels: int64 [B, P], the targets.
        weights: float32 [B, P], as above.

    Args:
        vocabulary: of the tokenizer.
        layout: for which kind of model.
        z_loss: as for `rows.language_model_loss`.

    Raises:
        ConfigError: the vocabulary has no token that ends a text, or none for padding.
    """

    def __init__(self, vocabulary: Vocabulary, layout: Layout, z_loss: float) -> None:
        if vocabulary.eos is None or vocabulary.pad is None:
            missing = "</s>" if vocabulary.eos is None else "<pad>"
            raise ConfigError(
                f"text-to-text objectives need </s> and <pad>, and this tokenizer has no {missing}; use one made for T5"
            )
        self._eos, self._pad = np.int32(vocabulary.eos), np.int32(vocabulary.pad)
        self._layout, self._z_loss = layout, z_loss
        self.predicts = OUTPUTS[layout]
        self.needs = frozenset({self.predicts})

    @abstractmethod
    def pack_spec(self, sequence_length: int) -> PackSpec:
        """The cells of an example of both sides, of which `sequence_length` are the encoder's, or a decoder's alone."""

    @abstractmethod
    def predictions(self, sequence_length: int) -> int:
        """T, or for a decoder alone P."""

    @abstractmethod
    def sources_and_targets(self, examples: Examples) -> tuple[Int64, Ragged, Ragged]:
        """The row of each pair, ascending, and the pairs, each text with the token that ends it."""

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays pairs out; see the class for the arrays.

        Args:
            examples: raw text.
            sequence_length: that of the `PackSpec`.
        """
        row, source, target = self.sources_and_targets(examples)
        lay_out = self._for_both if self._layout == "encoder_decoder" else self._for_decoder
        batch, used = lay_out(
            row, source, target, (examples.key.size, *self._size(sequence_length))
        )
        return {**batch, "weights": used * examples.weight[:, None]}

    @abstractmethod
    def _size(self, sequence_length: int) -> tuple[int, int]:
        """Cells of the sides, S and T (or P), by the `sequence_length` of the `PackSpec`."""

    def _for_both(
        self, row: Int64, source: Ragged, target: Ragged, shape: tuple[int, int, int]
    ) -> tuple[Batch, Bools]:
        """The arrays of sources for an encoder and targets for a decoder, and what is predicted; `shape` is B, S, T."""
        rows, width, target_width = shape
        sources, targets = (
            _Grid(row, source.length, (rows, width)),
            _Grid(row, target.length, (rows, target_width)),
        )
        shifted = np.roll(target.tokens, 1)
        shifted[targets.start] = self._pad
        return {
            "tokens": sources.place(source.tokens, self._pad),
            "segments": sources.segments(),
            "positions": sources.place(sources.position),
            "target_tokens": targets.place(shifted, self._pad),
            "target_segments": targets.segments(),
            "target_positions": targets.place(targets.position),
            "labels": targets.place(target.tokens).astype(np.int64),
        }, targets.filled

    def _for_decoder(
        self, row: Int64, source: Ragged, target: Ragged, shape: tuple[int, int, int]
    ) -> tuple[Batch, Bools]:
        """The same with each source and its target in one row; `shape` is B, S, P."""
        rows, width, predictions = shape
        joined = _Grid(row, source.length + target.length - 1, (rows, width))
        targets = _Grid(row, target.length, (rows, predictions))
        lengths = np.stack((source.length, target.length - 1), axis=1)
        in_source = np.repeat(np.tile([True, False], row.size), lengths.reshape(-1))
        is_input = np.ones(target.tokens.size, dtype=np.bool_)
        is_input[targets.start + target.length - 1] = False
        tokens = np.empty(in_source.size, dtype=np.int32)
        tokens[in_source], tokens[~in_source] = source.tokens, target.tokens[is_input]
        last_of_source = joined.column + source.length - 1
        batch: Batch = {
            "tokens": joined.place(tokens, self._pad),
            "segments": joined.segments(),
            "positions": joined.place(joined.position),
            "predicted": targets.place(np.repeat(last_of_source, target.length) + targets.position),
            "labels": targets.place(target.tokens).astype(np.int64),
        }
        if self._layout == "prefix_lm":
            batch["prefix"] = joined.place(in_source)
        return batch, targets.filled

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of predictions that count."""
        return {"lm": float(batch["weights"].sum())}

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """As `rows.language_model_loss`."""
        return language_model_loss(model, self.predicts, batch, totals, self._z_loss)

    def _joined(
        self, text: Int32, length: Int64, cell: npt.ArrayLike = (), token: npt.ArrayLike = ()
    ) -> Ragged:
        """Sequences of the lengths: `token` in each `cell`, counted through all of them, the end token, and text."""
        tokens = np.empty(length.sum(), dtype=np.int32)
        is_text = np.ones(tokens.size, dtype=np.bool_)
        for cells, special in (
            (np.asarray(cell, dtype=np.int64), token),
            (np.cumsum(length) - 1, self._eos),
        ):
            tokens[cells] = special
            is_text[cells] = False
        tokens[is_text] = text
        return Ragged(tokens, length)


class SelfSupervised(TextToText):
    """Makes plain text into pairs of sources and targets.

    Under an isolating packing each piece of a document is a text, else each row; documents in a row follow each other
    without a separator, as in T5's own pipeline, so that all rows hold equally many tokens.

    Args:
        vocabulary, layout, z_loss: as for `TextToText`.
        target_length: T, or for a decoder alone P; None is what a row of a single text needs.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        layout: Layout,
        z_loss: float,
        target_length: int | None = None,
    ) -> None:
        super().__init__(vocabulary, layout, z_loss)
        self._target_length = target_length

    @abstractmethod
    def cells(self, length: Int64) -> tuple[Int64, Int64]:
        """The most cells that a text of each length takes on the sides of an example; they grow with the length."""

    @abstractmethod
    def pairs(self, texts: Ragged, key: U64) -> Pairs:
        """Makes pairs of texts, each from its tokens and its key, uint64 [Q], alone."""

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As much text as fits into `sequence_length` cells: of the encoder, or of the decoder where it is alone.

        Raises:
            ConfigError: none does, or more than positions can be hashed for; or `target_length` is too short for it.
        """
        cost = np.stack(self.cells(np.arange(1, _MOST_TOKENS + 1)), axis=1)
        least, longest = cost[0, 0], cost[-1, 0]
        if not least <= sequence_length <= longest:
            raise ConfigError(
                f"sequence_length is {sequence_length}; use {least} to {longest}, for example 512"
            )
        most = int(np.searchsorted(cost[:, 0], sequence_length, side="right"))
        size = self._size(most)
        if size[1] < cost[most - 1, 1]:
            raise ConfigError(
                f"target_length is {size[1]}, and the {most} tokens of text that fit into {sequence_length} cells "
                f"give targets of {cost[most - 1, 1]}; set it to at least that, or to null"
            )
        sides = Sides(
            size,
            tuple((a, b) for a, b in cost[:most].tolist()),
            joined=self._layout != "encoder_decoder",
        )
        return PackSpec(most, prefix=0, suffix=0, sides=sides)

    def _size(self, text_length: int) -> tuple[int, int]:
        """Cells of the sides of an example with room for so much text, S and T (or P)."""
        source, target = self.cells(np.array([text_length]))
        return int(source[0]), self._target_length or int(target[0])

    def predictions(self, sequence_length: int) -> int:
        """T, or for a decoder alone P."""
        return self._size(self.pack_spec(sequence_length).sequence_length)[1]

    def sources_and_targets(self, examples: Examples) -> tuple[Int64, Ragged, Ragged]:
        """The `pairs` of the texts."""
        if examples.isolated:
            row, length = examples.row, examples.length
        else:
            filled = np.bincount(examples.row, examples.length, examples.key.size).astype(np.int64)
            row = np.flatnonzero(filled)
            length = filled[row]
        number = np.arange(row.size) - np.searchsorted(row, row)
        text, source, target = self.pairs(
            Ragged(examples.tokens, length), combine(examples.key[row], number)
        )
        return row[text], source, target


class _Grid:
    """Sequences in rows, one after another from the first cell on.

    Attributes:
        filled: bool [B, W], the cells of sequences.
        start: int64 [Q], the first token of each sequence, counted through all of them.
        column: int64 [Q], the first cell of each sequence in its row.
        position: int32 [tokens of all], of each token in its sequence.

    Args:
        row: int64 [Q], the row of each sequence; ascending.
        length: int64 [Q], its tokens.
        shape: B and W.
    """

    def __init__(self, row: Int64, length: Int64, shape: tuple[int, int]) -> None:
        self.filled = np.arange(shape[1]) < np.bincount(row, length, shape[0])[:, None]
        self.start = np.cumsum(length) - length
        first = np.searchsorted(row, row)
        self.column = self.start - self.start[first]
        self.position = np.arange(length.sum(), dtype=np.int32) - np.repeat(
            self.start.astype(np.int32), length
        )
        self._length = length
        self._number = (np.arange(1, row.size + 1) - first).astype(np.int32)

    def place(self, values: npt.NDArray[Any], padding: npt.ArrayLike = 0) -> npt.NDArray[Any]:
        """Puts a value into each filled cell: [B, W]."""
        if self.filled.all():
            return values.reshape(self.filled.shape)
        cells = np.full(self.filled.shape, padding, dtype=values.dtype)
        cells[self.filled] = values
        return cells

    def segments(self) -> Int32:
        """The number of each cell's sequence in its row, from 1; 0 for padding: int32 [B, W]."""
        return self.place(np.repeat(self._number, self._length))
