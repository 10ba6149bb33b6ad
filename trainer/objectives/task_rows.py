"""Rows of fine-tuning tasks between special tokens, and what the objectives of tasks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.examples import Batch, Examples, Labels, PackSpec, Parts, TaskRow, Vocabulary
from trainer.models import Outputs
from trainer.objectives import Loss, Predictions, rows
from trainer.objectives.rows import Rows, paint

Int64: TypeAlias = npt.NDArray[np.int64]
Float32: TypeAlias = npt.NDArray[np.float32]
Cell: TypeAlias = Literal["first", "last"]


class TaskRows:
    """Lays the texts of a task's rows out in sequences.

    For an encoder, as in BERT: [CLS] first text [SEP] second text [SEP]. A head reads the first cell.

    As in T5 and GPT-2, whose decoders have seen all at the last cell only, which a head reads: first text </s> second
    text </s>. With a tokenizer that has a token to begin texts with, and another to end them, the former comes before
    them, as in GPT-1 (Radford et al. 2018, section 3.3: start, delimiter and extract tokens).

    For B examples of k sequences of S cells each:
        tokens: int32 [B, k S], the texts with their special tokens.
        segments: int32 [B, k S], 1 in a sequence, 0 for padding.
        positions: int32 [B, k S], cells since the sequence's first; 0 for padding.
        token_types: int32 [B, k S], 1 from a sequence's second text to its end, else 0. Not there for decoders, or a
            tokenizer with more than one [SEP] between two texts: that is RoBERTa's way to tell them apart, which has
            one token type.

    Attributes:
        reads: the cell of a sequence that a head reads which scores it as a whole.
        between: special tokens between two texts.

    Args:
        vocabulary: of the tokenizer.
        reads: None goes by the tokenizer: the first cell if it is BERT's or RoBERTa's, else the last.

    Raises:
        ConfigError: it has no [CLS], [SEP] or [PAD], or where the last cell is read no token that ends a text.
    """

    def __init__(self, vocabulary: Vocabulary, reads: Cell | None = None) -> None:
        end, begin = vocabulary.end, vocabulary.cls
        self.reads = _usual_cell(vocabulary) if reads is None else reads
        self.between = vocabulary.between if self.reads == "first" else 1
        if self.reads == "first" or end is None:
            self._rows, self._prefix = Rows.between_specials(vocabulary), 1
        else:
            self._prefix = int(begin is not None and begin != end)
            self._rows = Rows(
                end if begin is None else begin,
                end,
                end if vocabulary.pad is None else vocabulary.pad,
            )

    def pack_spec(self, sequence_length: int, parts: Parts) -> PackSpec:
        """A cell for the special token that comes before a sequence, if one does, and one for that after it.

        Raises:
            ConfigError: as for `rows.pack_spec`.
        """
        return replace(rows.pack_spec(sequence_length), prefix=self._prefix, parts=parts)

    def lay_out(self, examples: Examples, width: int, choices: int = 1) -> Batch:
        """The rows of a micro-batch, S = `width`, k = `choices`; see the class for the arrays."""
        count = examples.key.size * choices
        first = (
            examples.row * (choices * width) + examples.column
        )  # cells are numbered through the batch
        sequence, column = np.divmod(first, width)
        last = np.flatnonzero(np.diff(sequence, append=-1))
        end = np.full(
            (count, 1), self._prefix + 1
        )  # the special tokens, where a sequence has no text at all
        end[sequence[last], 0] = column[last] + examples.length[last] + 1

        cell = np.arange(width, dtype=np.int32)
        used = cell < end
        tokens = np.where(used, self._rows.end, self._rows.pad)
        tokens[:, : self._prefix] = self._rows.begin
        tokens.reshape(-1)[paint(first, first + examples.length, True, count * width)] = (
            examples.tokens
        )
        arrays = {"tokens": tokens, "segments": used.astype(np.int32), "positions": cell * used}
        if self.reads == "first" and self.between == 1:
            later = np.flatnonzero(
                column > self._prefix
            )  # pieces of a second text, or of one after it
            later = later[np.diff(sequence[later], prepend=-1) > 0]
            second = np.full((count, 1), width)
            second[sequence[later], 0] = column[later]
            arrays["token_types"] = (used & (cell >= second)).astype(np.int32)
        return {name: array.reshape(-1, choices * width) for name, array in arrays.items()}

    def read_cells(self, batch: Batch, choices: int = 1) -> Int64:
        """The cell of each sequence that a head reads, counted in the sequence: int64 [B, k], for what `lay_out` gave.

        A sequence's last cell is that of the token after its last text.
        """
        segments = batch["segments"]
        if self.reads == "first":
            return np.zeros((len(segments), choices), dtype=np.int64)
        last: Int64 = segments.reshape(len(segments), choices, -1).sum(axis=2, dtype=np.int64) - 1
        return last

    def cell_after(self, column: Int64, length: Int64) -> Int64:
        """As `read_cells`, of sequences whose last pieces begin in `column` and have `length` tokens; int64 each."""
        return (
            np.zeros_like(column)
            if self.reads == "first"
            else np.maximum(column + length, self._prefix)
        )

    def windows(self, predictions: Predictions, most: int | None) -> Iterator[RowWindows]:
        """The windows of each row of a split; of an evaluation of some batches only, there may be others.

        Args:
            predictions: for the split.
            most: of the `Parts`.
        """
        order = np.lexsort((predictions.begin, predictions.document))
        edges = np.searchsorted(
            predictions.document[order], np.arange(len(predictions.rows) + 1)
        ).tolist()
        for number, row in enumerate(predictions.rows):
            example = order[edges[number] : edges[number + 1]]
            begin, column = predictions.begin[example], predictions.column[example]
            if example.size:
                # Tokens are counted through all texts. The first one's stand before the window, but for what was cut
                # off, and then the row's first window tells.
                before = max(0, int(column[0]) - self._prefix - self.between)
                begin = begin - (before if most is None or before < most else begin[0])
            yield RowWindows(row, example, begin, column, predictions.length[example])


def _usual_cell(vocabulary: Vocabulary) -> Cell:
    """The first where [CLS] is a token of its own; T5's tokenizers have none, nor has GPT-2's."""
    if vocabulary.end is None:
        return "first"  # which says what is missing
    has_own = vocabulary.cls not in (None, vocabulary.end)
    # SentencePiece may begin texts with a token, too, as for decoders; but RoBERTa's has masks.
    return (
        "first" if has_own and (vocabulary.eos is None or vocabulary.mask is not None) else "last"
    )


def reads_for(missing: Outputs, offers: Outputs) -> tuple[str, ...]:
    """Settings, as key=value, that choose the position that a model's head reads."""
    cells: tuple[Cell, ...] = ("first", "last")
    positions = {f"{cell}_position": f"objective.reads={cell}" for cell in cells}
    if missing.isdisjoint(positions):
        return ()
    return tuple(setting for position, setting in positions.items() if position in offers)


def labels_of(examples: Examples) -> Labels:
    """The labels of examples that are rows of a task."""
    assert examples.labels is not None, "the examples are no rows of a task"
    return examples.labels


def single_labels(examples: Examples) -> Float32:
    """float32 [B], where each row has one number."""
    labels = labels_of(examples)
    assert (labels.count == 1).all(), "a row has no number, or several"
    return labels.values.copy()  # they may be those of a file that is mapped for reading alone


def last_pieces(examples: Examples) -> tuple[Int64, Int64]:
    """The first cell and the length of each example's last piece, int64 [B] each; 0 and 0 where it has none."""
    last = np.flatnonzero(np.diff(examples.row, append=-1))
    column, length = np.zeros((2, examples.key.size), dtype=np.int64)
    column[examples.row[last]], length[examples.row[last]] = (
        examples.column[last],
        examples.length[last],
    )
    return column, length


def count_examples(batch: Mapping[str, Any]) -> dict[str, float]:
    """The number of examples that count, as a denominator."""
    return {"examples": float(batch["weights"].sum())}


def class_loss(
    logits: Tensor, target: Tensor, weights: Tensor, total: Tensor, label_smoothing: float = 0.0
) -> Loss:
    """Cross-entropy in float32, and the share of rows whose class has the highest score.

    Args:
        logits: [B, C].
        target: int64 [B], the class; or float32 [B, C], the probability of each.
        weights: float32 [B].
        total: scalar, the step's sum of weights.
        label_smoothing: so much of the probability is spread evenly over all classes.
    """
    logits = logits.float()
    nll = F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)
    nll = (nll * weights).sum()
    label = target.argmax(-1) if target.is_floating_point() else target
    correct = ((logits.detach().argmax(-1) == label) * weights).sum()
    weight = weights.sum()
    return Loss(
        nll / total,
        {"loss": (nll.detach(), weight), "accuracy": (correct, weight)},
        logits.detach(),
    )


class Scored(NamedTuple):
    """The examples of a split, M of them, with the labels of their rows.

    Attributes:
        outputs: float32 [M, ...].
        labels: float64 [M].
        groups: of their rows.
    """

    outputs: Float32
    labels: npt.NDArray[np.float64]
    groups: list[str]


def labelled(predictions: Predictions) -> Scored:
    """What is scored: each row's label, or its most probable class."""
    rows = [predictions.rows[number] for number in predictions.document.tolist()]
    labels = np.array([_label(row) for row in rows], dtype=np.float64)
    return Scored(predictions.outputs, labels, [row.group for row in rows])


def _label(row: TaskRow) -> float:
    """A row's label, or its most probable class."""
    label = int(np.argmax(row.probabilities)) if row.probabilities else row.label
    assert label is not None, "the row has no label"
    return label


def labels_and_outputs(predictions: Predictions) -> Iterator[tuple[float, Float32]]:
    """The label and the outputs [...] of each row, in the order of the rows, each of which is one example."""
    outputs = predictions.outputs[np.argsort(predictions.document)]
    return ((_label(row), output) for row, output in zip(predictions.rows, outputs, strict=True))


def class_predictions(predictions: Predictions, names: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Of each row the name of its class, of the predicted one, and the probability of each; its group, if it has one.

    Args:
        predictions: whose outputs are logits, float32 [N, C].
        names: of classes, C of them.
    """
    for row, (label, logits) in zip(predictions.rows, labels_and_outputs(predictions), strict=True):
        yield {
            **({"group": row.group} if row.group else {}),
            "label": names[int(label)],
            "prediction": names[int(logits.argmax())],
            "probabilities": torch.from_numpy(logits).double().softmax(0).tolist(),
        }


class RowWindows(NamedTuple):
    """The windows of a row, W of them, in the order of its text.

    Attributes:
        row: that they are of.
        example: int64 [W], which examples they are.
        begin: int64 [W], their first tokens, counted through the row's last text.
        column, length: int64 [W], the cell where that stands, and how many tokens of the text they hold.
    """

    row: TaskRow
    example: Int64
    begin: Int64
    column: Int64
    length: Int64
