"""Layout of language-modeling batches, and the loss over predicted tokens."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Examples, PackSpec, Vocabulary
from trainer.models import scores_of
from trainer.models.inputs import Inputs
from trainer.models.token_scores import Target, TokenScore, score_logits
from trainer.objectives import Loss, Objective, ObjectiveConfig, Tensors

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Float32: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]

COLUMN_BITS = np.uint64(0xFFFF)
"""The bits of a hash that are replaced by a column; rows have at most 65,536."""
NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""Sorts after every hash."""


def pack_spec(sequence_length: int) -> PackSpec:
    """Reserves a position before each sequence ([CLS]) and one after each chunk ([SEP]).

    Raises:
        ConfigError: there is no room for a token between them, or there are more positions than
            the 16 bits that masks are hashed with.
    """
    if not 3 <= sequence_length <= 65_536:
        raise ConfigError(
            f"sequence_length is {sequence_length}. Use 3 ([CLS], a token, [SEP]) to 65536, "
            "for example 128."
        )
    return PackSpec(sequence_length, prefix=1, suffix=1)


class Rows:
    """Lays out the chunks of packed examples in rows.

    For B examples of S positions:
        tokens: int32 [B, S], the chunks with their special tokens.
        segments: int32 [B, S], the number of the sequence in its row, from 1; 0 for padding.
        positions: int32 [B, S], counted from 0 in each sequence; 0 for padding.
        token_types: int32 [B, S], of pairs only: 1 in segment B and its [SEP], else 0.

    Args:
        begin: id of the token before a sequence.
        end: id of the token after each chunk.
        pad: id of the padding token.
    """

    def __init__(self, begin: int, end: int, pad: int) -> None:
        self.begin, self.end, self.pad = np.int32(begin), np.int32(end), np.int32(pad)

    @classmethod
    def for_encoder(cls, vocabulary: Vocabulary) -> Rows:
        """Rows of BERT: [CLS] chunk [SEP], padded with [PAD].

        Raises:
            ConfigError: the vocabulary has no [CLS], [SEP] or [PAD].
        """
        begin, end, pad = vocabulary.cls, vocabulary.sep, vocabulary.pad
        if begin is None or end is None or pad is None:
            needed = {"[CLS]": begin, "[SEP]": end, "[PAD]": pad}
            missing = [name for name, token in needed.items() if token is None]
            raise ConfigError(
                f"the objective needs {', '.join(needed)}, and this tokenizer has no "
                f"{', '.join(missing)}. Use one made for BERT or RoBERTa, or add them by samestep "
                "data extend."
            )
        return cls(begin, end, pad)

    @classmethod
    def for_decoder(cls, vocabulary: Vocabulary) -> Rows:
        """Rows of a GPT: chunks between [CLS] and [SEP], or between tokens that end texts.

        GPT-2's tokenizer has only <|endoftext|>, which begins, ends and pads.

        Raises:
            ConfigError: the vocabulary has no token that ends a text.
        """
        end = vocabulary.end
        if end is None:
            raise ConfigError(
                "the objective needs a token to end texts with, [SEP], </s> or <|endoftext|>, and "
                "this tokenizer has none. Use one made for BERT, RoBERTa, GPT-2 or T5."
            )
        begin = end if vocabulary.cls is None else vocabulary.cls
        return cls(begin, end, end if vocabulary.pad is None else vocabulary.pad)

    def lay_out(self, examples: Examples, width: int) -> dict[str, Int32]:
        """The rows of a micro-batch by name, int32 [B, S], where S is `width`."""
        # Example with width 9, of the chunks a b c and d e in one row:
        #
        #     isolated        tokens     [CLS] a b c [SEP] [CLS] d e [SEP]
        #                     segments   1     1 1 1 1     2     2 2 2
        #                     positions  0     1 2 3 4     0     1 2 3
        #     not isolated    tokens     [CLS] a b c [SEP] d e [SEP] [PAD]
        #                     segments   1     1 1 1 1     1 1 1     0
        #                     positions  0     1 2 3 4     5 6 7     0
        #
        row, shape = examples.row, (examples.key.size, width)
        # Here, positions are numbered through the batch, row by row: column 2 of row 1 is 9 + 2.
        first = row * width + examples.column
        after = first + examples.length
        size = examples.key.size * width
        if examples.isolated:  # every chunk is a sequence
            begin, end = first - 1, after + 1
            # A chunk's index minus the index of its row's first chunk counts from 0 in each row.
            number = np.arange(1, row.size + 1) - np.searchsorted(row, row)
        else:  # every row is a sequence, from column 0 to the token after its last chunk
            last = np.flatnonzero(np.diff(row, append=-1))
            begin, end, number = row[last] * width, after[last] + 1, np.ones_like(last)
        segments = fill_spans(begin, end, number.astype(np.int32), size)
        starts = fill_spans(begin, end, begin.astype(np.int32), size)
        positions = (np.arange(size, dtype=np.int32) - starts) * (segments > 0)

        tokens = np.full(size, self.pad, dtype=np.int32)
        is_text = segments > 0
        for special_positions, special_token in ((begin, self.begin), (after, self.end)):
            tokens[special_positions] = special_token
            is_text[special_positions] = False
        tokens[is_text] = examples.tokens  # which are in the order of rows, then columns
        rows = {"tokens": tokens, "segments": segments, "positions": positions}
        if examples.random is not None:  # pairs: every second chunk is a segment B
            rows["token_types"] = fill_spans(first[1::2], after[1::2] + 1, np.int32(1), size)
        return {name: array.reshape(shape) for name, array in rows.items()}


def fill_spans(begin: Int64, end: Int64, value: npt.ArrayLike, size: int) -> npt.NDArray[Any]:
    """An array of `size` zeros with value[i] in [begin[i], end[i]).

    Spans are in ascending order and do not overlap.
    """
    # The result is a sequence of runs: gap, span, gap, ..., whose lengths are the differences of
    # `edges`. Example: the spans [1, 3) and [3, 4) of 6 have the edges 0 1 3 3 4 6, which repeat
    # the values 0 v0 0 v1 0 1, 2, 0, 1 and 2 times.
    edges = np.empty(2 * begin.size + 2, dtype=np.int64)
    edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, begin, end, size
    values = np.zeros(edges.size - 1, dtype=np.result_type(value))
    values[1::2] = value
    return np.repeat(values, edges[1:] - edges[:-1])


def logits(model: nn.Module, batch: Tensors, output: str) -> Tensor:
    """Runs a model for one of its outputs."""
    found: dict[str, Tensor] = model(Inputs.of(batch), frozenset({output}))
    return found[output]


def token_target(batch: Tensors, z_loss: float = 0.0) -> Target:
    """The `labels` and `weights` [B, P] of a batch."""
    return Target(batch["labels"], batch["weights"], z_loss)


def score_output(outputs: Tensors, name: str, target: Target) -> TokenScore:
    """The scores of an output, which may overwrite its logits.

    The model has computed them if the output was among its `Inputs.targets` and the logits would
    have been large; otherwise it returned the logits.
    """
    if (scores := outputs.get(scores_of(name))) is not None:
        return TokenScore.unpack(scores)
    return score_logits(outputs[name], target)


class TokenObjective(Objective):
    """An objective whose loss is the mean cross-entropy of predicted tokens.

    Attributes:
        z_loss: coefficient of log(Z)^2, Z the denominator of a prediction's softmax, which keeps
            logits from drifting away from 0 (Mesh TensorFlow; 1e-4 in T5 v1.1).
    """

    z_loss = 0.0

    def pack_spec(self, sequence_length: int) -> PackSpec:
        return pack_spec(sequence_length)

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Cross-entropy in float32, over the step's number of predictions.

        The metric "z_loss" holds the term of that name; the metric "loss" does not include it.
        """
        target = token_target(batch, self.z_loss)
        inputs = Inputs.of(batch, {self.predicts: target})
        outputs = model(inputs, frozenset({self.predicts}))
        score = score_output(outputs, self.predicts, target)
        metrics = {
            "loss": (score.nll, score.weight),
            "accuracy": (score.correct, score.weight),
        }
        if self.z_loss:
            metrics["z_loss"] = (self.z_loss * score.log_z_squared, score.weight)
        return Loss(score.loss / totals[self.denominator], metrics)


class ZLossConfig(ObjectiveConfig):
    """Settings with a z-loss.

    Attributes:
        z_loss: coefficient of log(Z)^2 in the loss, where Z is the softmax's denominator; 1e-4 in
            T5 v1.1.
    """

    z_loss: float

    def __post_init__(self) -> None:
        if self.z_loss < 0:
            raise ConfigError(
                f"z_loss is {self.z_loss}. Use 0 to disable it, or a small coefficient, such as "
                "1e-4.",
            )


def columns_of(chosen: Bools, slots: int) -> tuple[Int64, Bools]:
    """The columns of the chosen positions, ascending and then 0, and which entries are in use.

    Args:
        chosen: bool [B, S], at most `slots` in a row.
        slots: P, number of entries of a row of the result.

    Returns:
        int64 and bool [B, P].
    """
    count = np.count_nonzero(chosen, axis=1)
    used = np.arange(slots) < count[:, None]
    columns = np.zeros(used.shape, dtype=np.int64)
    columns[used] = np.nonzero(chosen)[1]
    return columns, used
