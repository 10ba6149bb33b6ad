"""Layout of the rows of fine-tuning tasks, and what the objectives of tasks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Labels, PackSpec, Parts, TaskRow, Vocabulary
from samestep.tasks import TaskKind
from trainer.metrics import labels as metrics
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives import Loss, ObjectiveConfig, Predictions, Task, Tensors, rows
from trainer.objectives.class_weights import ClassLoss
from trainer.objectives.rows import Float32, Int64, Rows, fill_spans

Pooled: TypeAlias = Literal["first", "last"]
"""The pooled position of a sequence: the one that a head reads to score it as a whole."""


class RowTask(Task):
    """An objective whose examples are rows of a task.

    For an encoder, as in BERT: [CLS] first text [SEP] second text [SEP]. The pooled position is the
    first.

    For a decoder, as in T5 and GPT-2: first text </s> second text </s>. Only the last position has
    seen the whole sequence, so that is the pooled one. If the tokenizer has a token of its own to
    begin texts with, it comes first, as in GPT-1 (Radford et al. 2018, section 3.3: start,
    delimiter and extract tokens).

    For B examples of k sequences (choices) of S positions each:
        tokens: int32 [B, k S], the texts with their special tokens.
        segments: int32 [B, k S], 1 in a sequence, 0 for padding.
        positions: int32 [B, k S], counted from 0 in each sequence; 0 for padding.
        token_types: int32 [B, k S], 1 from a sequence's second text to its end, else 0. Absent for
            decoders, and for tokenizers with more than one [SEP] between two texts: by these
            RoBERTa, which has one token type, tells the texts apart.

    Attributes:
        kind: of the task.
        pooled: the pooled position.

    Raises:
        ConfigError: the vocabulary has no [CLS], [SEP] or [PAD]; or, if the last position is the
            pooled one, no token that ends a text.
    """

    kind: TaskKind
    denominator = "examples"

    def __init__(
        self,
        config: ObjectiveConfig,
        vocabulary: Vocabulary,
        pooled: Pooled | None = None,
    ) -> None:
        self.config = config
        self.score_names = config.metrics
        self.pooled = _usual_position(vocabulary) if pooled is None else pooled
        if self.pooled == "first":
            self._rows, self._prefix, between = Rows.for_encoder(vocabulary), 1, vocabulary.between
        else:
            self._rows, between = Rows.for_decoder(vocabulary), 1
            self._prefix = int(self._rows.begin != self._rows.end)
        self._parts = Parts(self.kind, between)

    def pack_spec(self, sequence_length: int) -> PackSpec:
        spec = rows.pack_spec(sequence_length)
        return replace(spec, prefix=self._prefix, parts=self._parts)

    def predictions(self, sequence_length: int) -> int:
        return sequence_length

    def lay_out(self, examples: Examples, width: int) -> Batch:
        """The rows of a micro-batch, S = `width`; see the class for the arrays."""
        choices = self._parts.choices
        # Sequences and positions are numbered through the batch: with 2 choices of 8 positions, the
        # chunk at column 9 of row 1 begins at 25, which is column 1 of sequence 3.
        count = examples.key.size * choices
        first = examples.row * (choices * width) + examples.column
        sequence, column = np.divmod(first, width)
        last = np.flatnonzero(np.diff(sequence, append=-1))
        # No sequence may be all padding, even without any text: attention to nothing is NaN.
        end = np.full((count, 1), self._prefix + 1)
        end[sequence[last], 0] = column[last] + examples.length[last] + 1

        position = np.arange(width, dtype=np.int32)
        used = position < end
        tokens = np.where(used, self._rows.end, self._rows.pad)
        tokens[:, : self._prefix] = self._rows.begin
        is_text = fill_spans(first, first + examples.length, True, count * width)
        tokens.reshape(-1)[is_text] = examples.tokens
        arrays = {"tokens": tokens, "segments": used.astype(np.int32), "positions": position * used}
        if self.pooled == "first" and self._parts.between == 1:
            # The first chunk of each sequence that does not begin right after the prefix.
            later = np.flatnonzero(column > self._prefix)
            later = later[np.diff(sequence[later], prepend=-1) > 0]
            second = np.full((count, 1), width)
            second[sequence[later], 0] = column[later]
            arrays["token_types"] = (used & (position >= second)).astype(np.int32)
        return {name: array.reshape(-1, choices * width) for name, array in arrays.items()}

    def pooled_positions(self, batch: Batch) -> Int64:
        """The pooled position in each sequence of a batch of `lay_out`: int64 [B, k]."""
        segments = batch["segments"]
        segments = segments.reshape(len(segments), self._parts.choices, -1)
        last: Int64 = segments.sum(axis=2, dtype=np.int64) - 1
        return np.zeros_like(last) if self.pooled == "first" else last

    def pooled_after(self, column: Int64, length: Int64) -> Int64:
        """The same for sequences whose last chunks begin in `column` and have `length` tokens."""
        last: Int64 = np.maximum(column + length, self._prefix)
        return np.zeros_like(last) if self.pooled == "first" else last

    def windows(self, predictions: Predictions) -> Iterator[RowWindows]:
        """The windows of each row; a partial evaluation has only some of them."""
        order = np.lexsort((predictions.begin, predictions.document))
        numbers = np.arange(len(predictions.rows) + 1)
        edges = np.searchsorted(predictions.document[order], numbers).tolist()
        for number, row in enumerate(predictions.rows):
            example = order[edges[number] : edges[number + 1]]
            begin, column = predictions.begin[example], predictions.column[example]
            if example.size:
                # `begin` counts the tokens of the first text, too, which are to be subtracted. They
                # stand before the window, unless the text was cut to `most` tokens. Then the row's
                # first window tells: it begins at the last text's first token.
                before = max(0, int(column[0]) - self._prefix - self._parts.between)
                is_whole = self._parts.most is None or before < self._parts.most
                begin = begin - (before if is_whole else begin[0])
            yield RowWindows(row, example, begin, column, predictions.length[example])


class RowWindows(NamedTuple):
    """The W windows of a row, in the order of its text.

    Attributes:
        row: of the task.
        example: int64 [W], indices of the examples.
        begin: int64 [W], their first tokens, counted through the row's last text.
        column, length: int64 [W], the position of that token, and the number of tokens.
    """

    row: TaskRow
    example: Int64
    begin: Int64
    column: Int64
    length: Int64


class PooledConfig(ObjectiveConfig):
    """Settings of an objective that scores sequences as a whole.

    Attributes:
        reads: the pooled position of a sequence: `first` ([CLS]) for encoders, `last` for decoders.
            null goes by the tokenizer: first for tokenizers of BERT and RoBERTa, which a GPT may
            also have, else last.
    """

    reads: Pooled | None

    @property
    def pooled(self) -> Pooled | None:
        """The pooled position; None goes by the tokenizer."""
        return self.reads

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        settings = {f"{each}_position": f"objective.reads={each}" for each in get_args(Pooled)}
        if missing.isdisjoint(settings):
            return ()
        return tuple(setting for position, setting in settings.items() if position in offers)


class PairConfig(PooledConfig):
    """Settings of an objective that scores texts or pairs of texts.

    Attributes:
        both_orders: scores two texts in both orders, each in a sequence of its own, and adds the
            outputs.
        stride: cuts a text that is too long into windows, which start this many tokens apart; None
            truncates it.
    """

    both_orders: bool
    stride: int | None

    def check_arrangement(self) -> None:
        """Rejects a stride of no tokens, or beside `both_orders`."""
        if self.stride is not None and (self.stride < 1 or self.both_orders):
            beside = " beside both_orders" if self.both_orders else ""
            raise ConfigError(
                f"stride is {self.stride}{beside}. Use 1 or more, without both_orders, or null."
            )


class PooledTask(RowTask):
    """A task whose sequences are scored as a whole.

    A row of a batch holds k sequences of S positions side by side. The model gets each of them as a
    row of its own; so with k > 1 `dropout_key` is int32 [B, k].

    To the rows of `RowTask` it adds, for B examples of k sequences:
        predicted: int64 [B, k], the pooled position of each sequence.
        labels: int64 [B], the class, or float32 [B], the number.
        weights: float32 [B], the weight of the example.
    """

    def __init__(self, config: PooledConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary, config.pooled)
        self.needs = frozenset({self.predicts, f"{self.pooled}_position"})

    def predictions(self, sequence_length: int) -> int:
        return self._parts.choices

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = self.lay_out(examples, sequence_length)
        batch["predicted"] = self.pooled_positions(batch)
        return {**batch, **self.targets(examples), "weights": examples.weight}

    def sequence_outputs(self, model: nn.Module, batch: Tensors) -> Tensor:
        """The outputs of each sequence, [B, k, C]."""
        choices, count = self._parts.choices, len(batch["tokens"])
        inputs = Inputs.of(batch)
        if choices > 1:
            key, extra = batch.get("dropout_key"), dict(inputs.extra)
            if "step_key" in extra:  # one for each row of the model
                extra["step_key"] = extra["step_key"].repeat_interleave(choices)
            inputs = replace(
                inputs.map(lambda column: column.view(count * choices, -1)),
                dropout_key=None if key is None else key.view(count * choices),
                extra=extra,
            )
        found: Tensor = model(inputs, frozenset({self.predicts}))[self.predicts]
        return found.reshape(count, choices, -1)

    def targets(self, examples: Examples) -> Batch:
        """The labels, which are classes."""
        return {"labels": single_labels(examples).astype(np.int64)}

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """Metrics of predicted classes; the outputs are logits, float32 [N, C]."""
        of_rows, logits = scored_rows(predictions)
        true = np.array([int(label_of(row)) for row in of_rows])
        groups = [row.group for row in of_rows]
        certainty = logits[:, 1] - logits[:, 0]
        return metrics.scores(self.score_names, logits.argmax(-1), true, groups, certainty)


class PairTask(PooledTask):
    """A task of texts or pairs of texts; with `both_orders`, k is 2.

    With `stride`, a row may be several examples, its windows, which together have the weight 1. The
    outputs of a row are their mean.
    """

    def __init__(self, config: PairConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        if config.both_orders:
            self._parts = replace(self._parts, choices=2, arrangement="both_orders")
        elif config.stride is not None:
            self._parts = replace(self._parts, arrangement="windows", stride=config.stride)

    def pack_spec(self, sequence_length: int) -> PackSpec:
        spec = super().pack_spec(sequence_length)
        if self._parts.stride is None:
            return spec
        # The first text is cut where a window would have fewer tokens than its stride.
        room = sequence_length - spec.prefix - spec.suffix - self._parts.between
        most = max(1, room - self._parts.stride)
        return replace(spec, parts=replace(self._parts, most=most))

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = super().collate(examples, sequence_length)
        if self._parts.layout == "windows":
            windows = labels_of(examples).examples
            batch["weights"] = batch["weights"] / windows.astype(np.float32)
        return batch

    def row_outputs(self, model: nn.Module, batch: Tensors) -> Tensor:
        """The outputs of each row, [B, C]: of one sequence, or the sum of both."""
        return self.sequence_outputs(model, batch).sum(1)


def _usual_position(vocabulary: Vocabulary) -> Pooled:
    """First if [CLS] is a token of its own; the tokenizers of T5 and GPT-2 have none."""
    if vocabulary.end is None:
        return "first"  # `Rows.for_encoder` then names what is missing
    has_own = vocabulary.cls not in (None, vocabulary.end)
    # SentencePiece models for decoders may begin texts with a token, too; RoBERTa's has a mask.
    is_encoders = vocabulary.eos is None or vocabulary.mask is not None
    return "first" if has_own and is_encoders else "last"


def labels_of(examples: Examples) -> Labels:
    """The labels of examples that are rows of a task."""
    assert examples.labels is not None, "the examples are no rows of a task"
    return examples.labels


def single_labels(examples: Examples) -> Float32:
    """float32 [B], where each row has one number; may be memory-mapped and read-only."""
    labels = labels_of(examples)
    assert (labels.count == 1).all(), "a row has no number, or several"
    return labels.values


def last_chunks(examples: Examples) -> tuple[Int64, Int64]:
    """First position and length of each example's last chunk, int64 [B]; 0 where it has none."""
    last = np.flatnonzero(np.diff(examples.row, append=-1))
    column, length = np.zeros((2, examples.key.size), dtype=np.int64)
    column[examples.row[last]] = examples.column[last]
    length[examples.row[last]] = examples.length[last]
    return column, length


def class_loss(
    logits: Tensor,
    target: Tensor,
    weights: Tensor,
    total: Tensor,
    of_classes: ClassLoss | None = None,
) -> Loss:
    """Cross-entropy in float32, and accuracy.

    Args:
        logits: [B, C].
        target: int64 [B], the class; or float32 [B, C], the probability of each.
        weights: float32 [B].
        total: scalar, the step's sum of the rows' weights, each times its class's weight.
        of_classes: None weights and smoothes nothing.
    """
    logits = logits.float()
    if of_classes is None:
        nll, of_rows = F.cross_entropy(logits, target, reduction="none"), weights
    else:
        nll, of_rows = of_classes(logits, target), of_classes.weights(target, weights)
    nll = (nll * weights).sum()
    label = target.argmax(-1) if target.is_floating_point() else target
    correct = ((logits.detach().argmax(-1) == label) * weights).sum()
    scores = {"loss": (nll.detach(), of_rows.sum()), "accuracy": (correct, weights.sum())}
    return Loss(nll / total, scores, logits.detach())


def label_of(row: TaskRow) -> float:
    """A row's label, or its most probable class."""
    label = int(np.argmax(row.probabilities)) if row.probabilities else row.label
    assert label is not None, "the row has no label"
    return label


class ScoredRows(NamedTuple):
    """Rows and their outputs, float32 [R, C]: of a row of several windows, the mean."""

    rows: list[TaskRow]
    outputs: Float32


def scored_rows(predictions: Predictions) -> ScoredRows:
    """The rows that have outputs, in order."""
    numbers, row = np.unique(predictions.document, return_inverse=True)
    rows = [predictions.rows[number] for number in numbers.tolist()]
    return ScoredRows(rows, means_of_rows(predictions.outputs, row))


def means_of_rows(outputs: Float32, row: Int64) -> Float32:
    """The mean output of each row.

    Args:
        outputs: of N examples, [N, C].
        row: of each example, numbered from 0; each row has examples.
    """
    count = np.bincount(row)
    if (count == 1).all():
        return outputs[np.argsort(row)]
    sums = np.zeros((len(count), outputs.shape[1]))
    np.add.at(sums, row, outputs)
    means: Float32 = (sums / count[:, None]).astype(np.float32)
    return means


def rows_with_outputs(predictions: Predictions) -> Iterator[tuple[TaskRow, Float32]]:
    """Each row with its outputs, in the order of the rows."""
    return zip(predictions.rows, scored_rows(predictions).outputs, strict=True)


def number_scores(names: tuple[str, ...], predictions: Predictions) -> dict[str, float]:
    """Metrics of predicted numbers; the outputs are float32 [N, 1]."""
    of_rows, outputs = scored_rows(predictions)
    true = np.array([label_of(row) for row in of_rows], dtype=np.float64)
    return metrics.scores(names, outputs[:, 0].astype(np.float64), true)


def number_predictions(predictions: Predictions) -> Iterator[dict[str, object]]:
    """The label and the predicted number of each row."""
    for row, output in rows_with_outputs(predictions):
        yield {"label": label_of(row), "prediction": float(output[0])}


def class_predictions(predictions: Predictions, names: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """For each row: its group, if any, the names of label and prediction, and probabilities.

    Args:
        predictions: their outputs are logits, float32 [N, C].
        names: of the C classes.
    """
    for row, logits in rows_with_outputs(predictions):
        yield {
            **({"group": row.group} if row.group else {}),
            "label": names[int(label_of(row))],
            "prediction": names[int(logits.argmax())],
            "probabilities": torch.from_numpy(logits).double().softmax(0).tolist(),
        }
