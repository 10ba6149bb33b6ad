"""Predictions of a fine-tuned model on texts: classes, numbers, tags of words, answers."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from data_pipeline.building import task_rows
from data_pipeline.building.task_rows import Encoded
from samestep.errors import ConfigError
from samestep.examples import TaskRow
from samestep.tasks import TaskKind
from trainer.inference.row_model import HEADS, RowLogits, RowModel
from trainer.models import Model
from trainer.objectives import Predictions
from trainer.objectives.kinds.question_answering import Answer, QuestionAnswering
from trainer.objectives.kinds.tagging import OUTSIDE, SequenceTagging, Tagging
from trainer.objectives.task_rows import last_chunks, means_of_rows
from trainer.training.weights.loading import Weights

logger = logging.getLogger(__name__)

Text: TypeAlias = str | Sequence[str]


@dataclass(frozen=True)
class ClassPrediction:
    """The class of a text or of a pair of texts.

    Attributes:
        label: the most probable class.
        probability: of that class.
        probabilities: of all classes, by name, in the order of the model's labels; their sum is 1.
    """

    label: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class NumberPrediction:
    """The number that a regression model predicts."""

    value: float


@dataclass(frozen=True)
class TagsPrediction:
    """The tags of the words of a text; all tuples have one entry for each word.

    Attributes:
        words: the words that were given, or those between white space of the text.
        labels: the most probable tag of each word, read at its first token; O without a token.
        probabilities: of these tags; 0 for a word without a token.
    """

    words: tuple[str, ...]
    labels: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class AnswerPrediction:
    """The answer to a question.

    Attributes:
        text: of the answer; "" if the model finds none, then begin and end are 0.
        begin, end: its characters in the second text, [begin, end).
        probability: among the model's best answers (`objective.n_best`), a softmax of their scores.
        score: the sum of the logits of begin and end.
    """

    text: str
    begin: int
    end: int
    probability: float
    score: float


Prediction: TypeAlias = ClassPrediction | NumberPrediction | TagsPrediction | AnswerPrediction


class Predictor:
    """A fine-tuned model that predicts for texts, on the best device available.

    Args:
        weights: of a model with a head for classes, numbers, tags or answers.
        path: names it in messages.
        model: of the weights, on the device.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: the model has another head, or scores sequences of tags.
    """

    def __init__(self, weights: Weights, path: str, model: Model) -> None:
        head = weights.config.head
        if head not in HEADS:
            raise ConfigError(
                f"{path} has the head {head}, and predictions are of {', '.join(HEADS)}. Name a "
                "run of such a task."
            )
        self._model = RowModel(weights, model=model)
        self._objective = self._model.objective
        if isinstance(self._objective, SequenceTagging):
            raise ConfigError(
                f"{path} scores sequences of tags (objective.crf), which have no probability for "
                "each tag. Use samestep evaluate --predictions."
            )
        self._kind: TaskKind = self._objective.kind

    def __call__(self, texts: Sequence[Text], batch_tokens: int = 8192) -> list[Prediction]:
        """Predicts for each of the texts, in their order; see `TrainedModel.predict`."""
        if isinstance(texts, str):
            raise ConfigError(f"texts is the single text {texts!r}. Pass a list of texts.")
        rows = [self._row(number, text) for number, text in enumerate(texts)]
        # All texts at once, as a tokenizer is faster on many.
        encoded: list[Encoded] = []
        for number, found in enumerate(task_rows.encode(rows, self._model.tokenizer, self._kind)):
            if isinstance(found, str):
                raise ConfigError(f"texts[{number}] cannot be read: {found}.")
            encoded.append(found)
        self._warn_of_truncation(encoded)
        # Batches come longest first, so predictions are put back in the order of the texts.
        predictions: dict[int, Prediction] = {}
        for batch in self._model.batches(encoded, batch_tokens):
            kept = [encoded[number].row for number in batch.numbers.tolist()]
            of_batch = self._predictions(batch, [row for row in kept if row is not None])
            predictions |= zip(batch.numbers.tolist(), of_batch, strict=True)
        return [predictions[number] for number in range(len(rows))]

    def _row(self, number: int, text: Text) -> TaskRow:
        if self._kind == "tagging":
            words = text.split() if isinstance(text, str) else text
            if not words or any(word.split() != [word] for word in words):
                raise ConfigError(
                    f"texts[{number}] is {text!r}. Pass a text, or a list of words without white "
                    "space."
                )
            # As in training, words are joined by spaces; a span's tag, 0, is not used.
            joined = " ".join(words)
            spans = tuple((*match.span(), 0) for match in re.finditer(r"\S+", joined))
            return TaskRow((joined,), spans=spans)
        parts = (text,) if isinstance(text, str) else tuple(text)
        if self._kind == "question_answering":
            if len(parts) != 2:
                raise ConfigError(
                    f"texts[{number}] has {len(parts)} texts. Pass a question and the text that "
                    "may answer it."
                )
            return TaskRow(parts)
        orders = self._model.spec.parts
        if orders is not None and orders.choices == 2 and len(parts) != 2:
            raise ConfigError(
                f"texts[{number}] has {len(parts)} texts, and the model reads pairs in both orders "
                "(objective.both_orders). Pass two."
            )
        return TaskRow(parts, 0.0)  # a label that stands for none

    def _warn_of_truncation(self, encoded: Sequence[Encoded]) -> None:
        spec = self._model.spec
        assert spec.parts is not None
        if spec.parts.layout == "windows":
            return
        # Positions that are left for the texts and what is between them.
        room = spec.sequence_length - spec.prefix - spec.suffix
        between = spec.parts.between
        cut = sum(len(row.tokens) + between * (len(row.parts) - 1) > room for row in encoded)
        if cut:
            logger.warning(
                "%d of %d rows are longer than the %d positions that the model reads; they are "
                "truncated as in training",
                *(cut, len(encoded), spec.sequence_length),
            )

    def _predictions(self, batch: RowLogits, rows: Sequence[TaskRow]) -> Iterator[Prediction]:
        """The predictions of the rows of a batch, in order."""
        labels = batch.examples.labels
        assert labels is not None
        if isinstance(self._objective, Tagging | QuestionAnswering):
            # What an evaluation gathers over all batches, here of the rows of one.
            column, length = last_chunks(batch.examples)
            of_batch = Predictions(
                outputs=batch.logits.numpy(),
                document=labels.document,
                begin=labels.begin,
                column=column,
                length=length,
                rows=rows,
                number=batch.numbers,
                labels=self._model.labels,
            )
            is_tagging = isinstance(self._objective, Tagging)
            yield from self._tags(of_batch) if is_tagging else self._answers(of_batch)
            return
        outputs = torch.from_numpy(means_of_rows(batch.logits.numpy(), labels.document))
        if self._kind == "regression":
            yield from map(NumberPrediction, outputs[:, 0].tolist())
            return
        for probabilities in _softmax(outputs).tolist():
            best = int(np.argmax(probabilities))
            by_name = dict(zip(self._model.labels, probabilities, strict=True))
            yield ClassPrediction(self._model.labels[best], probabilities[best], by_name)

    def _tags(self, of_batch: Predictions) -> Iterator[Prediction]:
        probability, tag = _softmax(torch.from_numpy(of_batch.outputs)).max(-1)
        names = (*of_batch.labels, OUTSIDE)
        positions = self._objective.first_positions(of_batch)
        for row, (example, position) in zip(of_batch.rows, positions, strict=True):
            has_token = example >= 0  # else -1 indexes the last entry, which is replaced below
            tags = np.where(has_token, tag.numpy()[example, position], len(names) - 1)
            certain = np.where(has_token, probability.numpy()[example, position], 0.0)
            words = tuple(row.texts[0][begin:end] for begin, end, _ in row.spans)
            labels = tuple(names[each] for each in tags.tolist())
            yield TagsPrediction(words, labels, tuple(certain.tolist()))

    def _answers(self, of_batch: Predictions) -> Iterator[Prediction]:
        config = self._objective.config
        # Without a threshold from labeled rows, the better of both scores counts.
        threshold = (config.threshold or 0.0) if config.impossible else math.inf
        for answers in self._objective.answers(of_batch):
            none = Answer("", 0, 0, answers.no_answer)
            # As in a file of predictions: "no answer" competes only if questions may have none.
            candidates = [*answers.best, *([none] if config.impossible else [])]
            chosen = none if answers.doubt > threshold or not answers.best else answers.best[0]
            shares = _softmax(torch.tensor([each.score for each in candidates])).tolist()
            texts = [each.text for each in candidates]
            of_text = dict(zip(texts, shares, strict=True))
            place = (chosen.text, chosen.begin, chosen.end)
            yield AnswerPrediction(*place, of_text.get(chosen.text, 0.0), chosen.score)


def _softmax(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)
