"""Rows of text between special tokens, and scores of predicted tokens: what the language-modelling objectives share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Examples, PackSpec, Vocabulary
from trainer.models import Inputs
from trainer.objectives import Loss
from trainer.objectives.cross_entropy import cross_entropy_

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]


def pack_spec(sequence_length: int) -> PackSpec:
    """One cell before a sequence, as for [CLS], and one after each piece, as for [SEP].

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
        positions: int32 [B, S], cells since the sequence's first; 0 for padding.
        token_types: int32 [B, S], of pairs only: 1 in segment B and its [SEP], else 0.

    Args:
        begin: id of the token before a sequence.
        end: id of the token after each piece.
        pad: id of the token in cells of padding.
    """

    def __init__(self, begin: int, end: int, pad: int) -> None:
        self.begin, self.end, self.pad = np.int32(begin), np.int32(end), np.int32(pad)

    @classmethod
    def between_specials(cls, vocabulary: Vocabulary) -> Rows:
        """Rows as BERT's: [CLS] text [SEP], and [PAD].

        Raises:
            ConfigError: the vocabulary has no [CLS], [SEP] or [PAD].
        """
        needed = {"[CLS]": vocabulary.cls, "[SEP]": vocabulary.sep, "[PAD]": vocabulary.pad}
        missing = [name for name, token in needed.items() if token is None]
        if missing:
            raise ConfigError(
                f"the objective needs {', '.join(needed)}, and this tokenizer has no {', '.join(missing)}; use one "
                "made for BERT or RoBERTa"
            )
        return cls(*(token for token in needed.values() if token is not None))

    def lay_out(self, examples: Examples, width: int) -> dict[str, Int32]:
        """The rows of a micro-batch, S = `width`."""
        row, shape = examples.row, (examples.key.size, width)
        first = row * width + examples.column  # cells are numbered through the batch, row by row
        after = first + examples.length
        cells = examples.key.size * width
        if examples.isolated:  # every piece is a sequence
            begin, end = first - 1, after + 1
            number = np.arange(1, row.size + 1) - np.searchsorted(row, row)
            segments = paint(begin, end, number.astype(np.int32), cells)
            positions = (
                np.arange(cells, dtype=np.int32) - paint(begin, end, begin.astype(np.int32), cells)
            ) * (segments > 0)
        else:  # every row is one
            last = np.flatnonzero(np.diff(row, append=-1))
            begin, column = row[last] * width, np.arange(width, dtype=np.int32)
            filled = np.zeros((examples.key.size, 1), dtype=np.int32)
            filled[row[last], 0] = after[last] + 1 - begin
            segments = (column < filled).astype(np.int32)
            positions = column * segments

        tokens = np.full(cells, self.pad, dtype=np.int32)
        is_text = segments.reshape(-1) > 0
        for cell, token in ((begin, self.begin), (after, self.end)):
            tokens[cell] = token
            is_text[cell] = False
        tokens[is_text] = examples.tokens
        rows = {"tokens": tokens, "segments": segments, "positions": positions}
        if examples.random is not None:
            rows["token_types"] = paint(first[1::2], after[1::2] + 1, np.int32(1), cells)
        return {name: array.reshape(shape) for name, array in rows.items()}


def paint(begin: Int64, end: Int64, value: npt.ArrayLike, cells: int) -> npt.NDArray[Any]:
    """A line of `cells` zeros with value[i] in the cells begin[i] up to end[i]; spans ascend and do not overlap."""
    edges = np.empty(2 * begin.size + 2, dtype=np.int64)
    edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, begin, end, cells
    values = np.zeros(edges.size - 1, dtype=np.result_type(value))
    values[1::2] = value
    return np.repeat(values, edges[1:] - edges[:-1])


def logits(model: nn.Module, batch: Mapping[str, Tensor], output: str) -> Tensor:
    """Runs a model for one of its outputs."""
    found: dict[str, Tensor] = model(Inputs.of(batch), frozenset({output}))
    return found[output]


class TokenScore(NamedTuple):
    """Sums over the predictions of a micro-batch, scalars.

    Attributes:
        nll: of the cross-entropies, in float32.
        correct: of the hits.
        weight: of the predictions that count.
        log_z_squared: of the squared logarithms of the softmax's denominators.
    """

    nll: Tensor
    correct: Tensor
    weight: Tensor
    log_z_squared: Tensor


def score_tokens(scores: Tensor, batch: Mapping[str, Tensor]) -> TokenScore:
    """Compares logits [B, P, V] with the labels."""
    labels, weights = batch["labels"].flatten(), batch["weights"].flatten()
    nll, log_z, correct = cross_entropy_(scores.flatten(0, 1), labels)
    return TokenScore(
        (nll * weights).sum(),
        (correct * weights).sum(),
        weights.sum(),
        (log_z.square() * weights).sum(),
    )


def language_model_loss(
    model: nn.Module,
    output: str,
    batch: Mapping[str, Tensor],
    totals: Mapping[str, Tensor],
    z_loss: float,
) -> Loss:
    """Cross-entropy in float32, over the step's number of predictions, totals["lm"].

    Args:
        model: scores the vocabulary.
        output: the name of the logits.
        batch: with labels and weights.
        totals: of the step.
        z_loss: coefficient of log(Z)^2, Z the denominator of a prediction's softmax, which keeps logits from drifting
            away from 0 (Mesh TensorFlow; 1e-4 in T5 v1.1). It is a metric of its own and no part of the metric "loss".
    """
    score = score_tokens(logits(model, batch, output), batch)
    metrics = {
        "loss": (score.nll.detach(), score.weight),
        "accuracy": (score.correct, score.weight),
    }
    total = score.nll
    if z_loss:
        penalty = z_loss * score.log_z_squared
        metrics["z_loss"] = (penalty.detach(), score.weight)
        total = total + penalty
    return Loss(total / totals["lm"], metrics)


def check_z_loss(z_loss: float) -> None:
    """Refuses a coefficient below 0."""
    if z_loss < 0:
        raise ConfigError(
            f"z_loss is {z_loss}; use 0 to go without, or a small coefficient, as 1e-4"
        )
