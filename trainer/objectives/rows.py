"""Rows of text between special tokens, and scores of predicted tokens: what the language-modelling objectives share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer.errors import ConfigError
from trainer.examples import Examples, PackSpec, Vocabulary
from trainer.objectives.cross_entropy import cross_entropy_

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]


def pack_spec(sequence_length: int) -> PackSpec:
    """One cell for [CLS] before a sequence and one for [SEP] after each piece.

    Raises:
        ConfigError: no room for a token between them, or more cells than positions can be hashed for.
    """
    if not 3 <= sequence_length <= 65_536:
        raise ConfigError(
            f"sequence_length is {sequence_length}; use 3 ([CLS], a token, [SEP]) to 65536, for example 128"
        )
    return PackSpec(sequence_length, prefix=1, suffix=1)


class Rows:
    """Lays the pieces of examples out in rows.

    For B examples of S cells:
        tokens: int32 [B, S], the text with its special tokens.
        segments: int32 [B, S], 0 for padding, else the number from 1 of the sequence within its row.
        positions: int32 [B, S], cells since the sequence's [CLS]; 0 for padding.
        token_types: int32 [B, S], of pairs only: 1 in segment B and its [SEP], else 0.

    Raises:
        ConfigError: the vocabulary has no [CLS], [SEP] or [PAD].
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        needed = {"[CLS]": vocabulary.cls, "[SEP]": vocabulary.sep, "[PAD]": vocabulary.pad}
        missing = [name for name, token in needed.items() if token is None]
        if missing:
            raise ConfigError(
                f"the objective needs {', '.join(needed)}, and this tokenizer has no {', '.join(missing)}; use one "
                "made for BERT or RoBERTa"
            )
        self._cls, self._sep, self._pad = (np.int32(token) for token in needed.values() if token is not None)

    def lay_out(self, examples: Examples, width: int) -> dict[str, Int32]:
        """The rows of a micro-batch, S = `width`."""
        row, shape = examples.row, (examples.key.size, width)
        first = row * width + examples.column  # cells are numbered through the batch, row by row
        after = first + examples.length
        cells = examples.key.size * width
        if examples.isolated:  # every piece is a sequence
            begin, end = first - 1, after + 1
            number = np.arange(1, row.size + 1) - np.searchsorted(row, row)
            segments = _paint(begin, end, number.astype(np.int32), cells)
            positions = (np.arange(cells, dtype=np.int32) - _paint(begin, end, begin.astype(np.int32), cells)) * (
                segments > 0
            )
        else:  # every row is one
            last = np.flatnonzero(np.diff(row, append=-1))
            begin, column = row[last] * width, np.arange(width, dtype=np.int32)
            filled = np.zeros((examples.key.size, 1), dtype=np.int32)
            filled[row[last], 0] = after[last] + 1 - begin
            segments = (column < filled).astype(np.int32)
            positions = column * segments

        tokens = np.full(cells, self._pad, dtype=np.int32)
        is_text = segments.reshape(-1) > 0
        for cell, token in ((begin, self._cls), (after, self._sep)):
            tokens[cell] = token
            is_text[cell] = False
        tokens[is_text] = examples.tokens
        rows = {"tokens": tokens, "segments": segments, "positions": positions}
        if examples.random is not None:
            rows["token_types"] = _paint(first[1::2], after[1::2] + 1, np.int32(1), cells)
        return {name: array.reshape(shape) for name, array in rows.items()}


def _paint(begin: Int64, end: Int64, value: npt.ArrayLike, cells: int) -> npt.NDArray[Any]:
    """A line of `cells` zeros with value[i] in the cells begin[i] up to end[i]; spans ascend and do not overlap."""
    edges = np.empty(2 * begin.size + 2, dtype=np.int64)
    edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, begin, end, cells
    values = np.zeros(edges.size - 1, dtype=np.result_type(value))
    values[1::2] = value
    return np.repeat(values, edges[1:] - edges[:-1])


def inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """What a model needs of a batch."""
    types = {"token_types": batch["token_types"]} if "token_types" in batch else {}
    return types | {name: batch.get(name) for name in ("tokens", "segments", "positions", "predicted", "dropout_key")}


class TokenScore(NamedTuple):
    """Sums over the predictions of a micro-batch, scalars: cross-entropy in float32, hits, and their weight."""

    nll: Tensor
    correct: Tensor
    weight: Tensor


def score_tokens(logits: Tensor, batch: Mapping[str, Tensor]) -> TokenScore:
    """Compares logits [B, P, V] with the labels."""
    logits, labels, weights = logits.flatten(0, 1), batch["labels"].flatten(), batch["weights"].flatten()
    nll, correct = cross_entropy_(logits, labels)
    return TokenScore((nll * weights).sum(), (correct * weights).sum(), weights.sum())
