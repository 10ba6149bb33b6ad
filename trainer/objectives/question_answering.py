"""Answers that are spans of a text (SQuAD), as in Devlin et al. 2019, sections 4.2 and 4.3, and BERT's run_squad.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Parts, TaskRow, Vocabulary
from trainer.metrics import squad
from trainer.objectives import Loss, ObjectiveConfig, Predictions, Task
from trainer.objectives.rows import logits
from trainer.objectives.task_rows import (
    Int64,
    RowWindows,
    TaskRows,
    count_examples,
    labels_of,
    last_pieces,
)
from trainer.tasks import TASKS

_ALWAYS = ("exact_match", "f1")  # scores, whether or not some questions have no answer


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Question answering: the first text is the question, the second one holds the answer.

    Attributes:
        stride: tokens from the begin of one window of a text to that of the next; in transformers' `doc_stride` it is
            how many two windows share.
        question_length: tokens of a question, the rest of which is cut off.
        answer_length: the most tokens of an answer.
        n_best: the best begins and ends of a window, and the best answers, that are looked at.
        impossible: whether some questions have no answer in the text (SQuAD 2.0).
        threshold: how much better no answer must be than the best one to be given, where it is `impossible`; null takes
            what is best for the F1 of the split that is scored, as the official script's `best_f1` does: that score has
            seen the split's answers.
    """

    stride: int = 128
    question_length: int = 64
    answer_length: int = 30
    n_best: int = 20
    impossible: bool = False
    threshold: float | None = None

    def __post_init__(self) -> None:
        for name in ("stride", "question_length", "answer_length", "n_best"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.threshold is not None and not self.impossible:
            raise ConfigError(
                f"threshold is {self.threshold}, and impossible is false, so that every question has an answer; set "
                "impossible to true, or threshold to null"
            )

    def build(self, vocabulary: Vocabulary) -> Task:
        return QuestionAnswering(self, vocabulary)


@dataclass(frozen=True)
class Answer:
    """A span of a text.

    Attributes:
        text: of the span.
        begin, end: its characters, from and to.
        score: the logits of its begin and its end, added up.
    """

    text: str
    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Answers:
    """What may answer a question.

    Attributes:
        best: the best answers, no two with the same text, the best one first; nothing where the text has none.
        no_answer: the score of there being none: the lowest of all windows.
    """

    best: tuple[Answer, ...]
    no_answer: float

    @property
    def text(self) -> str:
        """The best answer, or "" where there is none."""
        return self.best[0].text if self.best else ""

    @property
    def doubt(self) -> float:
        """How much better no answer is than the best one; what `Config.threshold` is compared with."""
        return self.no_answer - self.best[0].score if self.best else math.inf


class QuestionAnswering(Task):
    """The question-answering objective; see `trainer.objectives.Task`.

    To the rows of `TaskRows` it adds, for B examples of S cells:
        labels: int64 [B, 2], the cells of the answer's first and last token; cell 0, that of [CLS], twice where the
            window does not hold all of an answer. With a tokenizer without [CLS], as T5's, that of the last </s> stands
            for no answer.
        weights: float32 [B], the weight of the example.

    The outputs are the logits of begins and ends, float32 [B, S, 2].

    Raises:
        ConfigError: as for `TaskRows`.
    """

    predicts = "question_answering"
    needs = frozenset({"question_answering"})

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self.config = config
        self._rows = TaskRows(vocabulary)

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """A text in windows that overlap, behind the question.

        Raises:
            ConfigError: between two windows there would be text that is in neither.
        """
        config, between = self.config, self._rows.between
        parts = Parts(
            "question_answering", between, stride=config.stride, most=config.question_length
        )
        spec = self._rows.pack_spec(sequence_length, parts)
        room = sequence_length - spec.prefix - spec.suffix - between - config.question_length
        if room < 1:
            raise ConfigError(
                f"sequence_length {sequence_length} has no room for text behind a question of question_length "
                f"{config.question_length}; use a longer sequence, as 384, or shorter questions"
            )
        if room < config.stride:
            raise ConfigError(
                f"stride is {config.stride}, and behind a question of question_length {config.question_length} "
                f"sequence_length {sequence_length} has room for {room} tokens of text; use a stride of at most {room}"
            )
        return spec

    def predictions(self, sequence_length: int) -> int:
        """All cells."""
        return sequence_length

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the texts out; see the class for the arrays."""
        batch = self._rows.lay_out(examples, sequence_length)
        labels, (column, length) = labels_of(examples), last_pieces(examples)
        token = np.full((examples.key.size, 2), -1, dtype=np.int64)  # of the window
        answered = labels.count == 2
        first = (np.cumsum(labels.count) - labels.count)[answered]
        token[answered] = labels.values[first[:, None] + [0, 1]] - labels.begin[answered, None]
        held = np.all((token >= 0) & (token < length[:, None]), axis=1, keepdims=True)
        return {
            **batch,
            "labels": np.where(held, token + column[:, None], self._rows.read_cells(batch)),
            "weights": examples.weight,
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of examples that count."""
        return count_examples(batch)

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """The mean of the cross-entropies of begin and end over the cells that are no padding, in float32.

        It is over the step's number of examples, totals["examples"].
        """
        outputs = logits(model, batch, self.predicts).float()
        weights, segments = batch["weights"], batch.get("segments")
        scores = outputs
        if segments is not None:
            scores = outputs.masked_fill((segments == 0)[..., None], -math.inf)
        nll = F.cross_entropy(
            scores.transpose(1, 2).flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        nll = (nll.view(-1, 2).mean(dim=1) * weights).sum()
        return Loss(
            nll / totals["examples"], {"loss": (nll.detach(), weights.sum())}, outputs.detach()
        )

    def answers(self, predictions: Predictions) -> list[Answers]:
        """What may answer the question of each row.

        Begins and ends are the `n_best` of each window's text. Of the windows that hold a token, only that one may give
        it as a begin in which it has most text around it.
        """
        every = self._rows.windows(predictions, self.config.question_length)
        return [self._answers(of_row, predictions.outputs) for of_row in every]

    def _answers(self, of_row: RowWindows, outputs: npt.NDArray[np.float32]) -> Answers:
        """What may answer the question of a row; `outputs` are those of the whole split."""
        row, config = of_row.row, self.config
        owner = max_context(of_row.begin, of_row.length, len(row.offsets))
        scores, spans = [np.empty(0)], [np.empty((0, 2), dtype=np.int64)]
        for window, (example, at, column, length) in enumerate(
            zip(*(a.tolist() for a in of_row[1:]), strict=True)
        ):
            logits = outputs[example, column : column + length].astype(np.float64)
            best = np.argsort(-logits, axis=0, kind="stable")[: config.n_best]
            first, last = best[:, 0][owner[at + best[:, 0]] == window], best[:, 1]
            more = last - first[:, None]
            i, j = np.nonzero((more >= 0) & (more < config.answer_length))
            scores.append(logits[first[i], 0] + logits[last[j], 1])
            spans.append(at + np.stack((first[i], last[j]), axis=1))
        score, span = np.concatenate(scores), np.concatenate(spans)
        found: dict[str, Answer] = {}
        for i in np.argsort(-score, kind="stable").tolist():
            begin, end = row.offsets[span[i, 0]][0], row.offsets[span[i, 1]][1]
            text = row.texts[-1][begin:end]
            if text and text not in found:
                found[text] = Answer(text, begin, end, float(score[i]))
            if len(found) == config.n_best:
                break
        of_none = outputs[
            of_row.example, self._rows.cell_after(of_row.column, of_row.length)
        ].astype(np.float64)
        return Answers(tuple(found.values()), float(of_none.sum(axis=-1).min(initial=math.inf)))

    @property
    def score_names(self) -> tuple[str, ...]:
        """SQuAD's, and more where questions may have no answer."""
        metrics = TASKS["question_answering"].metrics
        return tuple(name for name in metrics if self.config.impossible or name in _ALWAYS)

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """SQuAD's exact_match and f1; where questions may have no answer, for a threshold, which is among the scores.

        Then there are what is right of those with and without (has_answer_exact_match, has_answer_f1,
        no_answer_accuracy), and what exact_match and f1 would be with the best threshold for each.
        """
        answers = self.answers(predictions)
        scores = _scores(answers, predictions.rows)
        if not self.config.impossible:
            return scores.means()
        doubt = _doubts(answers)
        best_f1, threshold = squad.best_threshold(scores.f1, scores, doubt)
        if self.config.threshold is not None:
            threshold = self.config.threshold
        return {
            **scores.without(doubt > threshold).means_by_kind(),
            "best_exact_match": squad.best_threshold(scores.exact, scores, doubt)[0],
            "best_f1": best_f1,
            "threshold": threshold,
        }

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """The id and the right answers of each question, the answer that is given, and the best ones, as `n_best`.

        Their probabilities are a softmax over their scores. Where questions may have no answer, that is one of them, ""
        from 0 to 0; `null_odds` is how much better it is than the best of the others, and "" is given above the
        threshold.
        """
        every = self.answers(predictions)
        threshold = self._threshold(every, predictions.rows)
        for row, answers in zip(predictions.rows, every, strict=True):
            n_best, null_odds = list(answers.best), {}
            if self.config.impossible:
                n_best = sorted(
                    [*n_best, Answer("", 0, 0, answers.no_answer)], key=lambda answer: -answer.score
                )
                # An answer that is not there has the score 0, as in run_squad.py: JSON knows no infinite number.
                null_odds = {"null_odds": answers.doubt if answers.best else answers.no_answer}
            probabilities = (
                torch.tensor([answer.score for answer in n_best], dtype=torch.float64)
                .softmax(0)
                .tolist()
            )
            yield {
                **({"id": row.group} if row.group else {}),
                "answers": list(row.answers),
                "prediction": "" if answers.doubt > threshold else answers.text,
                **null_odds,
                "n_best": [
                    {**asdict(answer), "probability": probability}
                    for answer, probability in zip(n_best, probabilities, strict=True)
                ],
            }

    def _threshold(self, answers: Sequence[Answers], rows: Sequence[TaskRow]) -> float:
        """How great the doubt may be for an answer to be given."""
        if not self.config.impossible:
            return math.inf
        if self.config.threshold is not None:
            return self.config.threshold
        scores = _scores(answers, rows)
        return squad.best_threshold(scores.f1, scores, _doubts(answers))[1]


def _scores(answers: Sequence[Answers], rows: Sequence[TaskRow]) -> squad.Scores:
    """Those of the best answer to each question."""
    return squad.raw_scores([each.text for each in answers], [row.answers for row in rows])


def _doubts(answers: Sequence[Answers]) -> npt.NDArray[np.float64]:
    """float64 [R], that of each question."""
    return np.array([each.doubt for each in answers])


def max_context(begin: Int64, length: Int64, tokens: int) -> Int64:
    """The window in which each token of a text has most text around it: int64 [tokens].

    The less of what is before it and after it counts, and of two equal windows the longer one, then the first.

    Args:
        begin, length: int64 [W], of the windows, W at least 1 where there are tokens.
        tokens: how many the text has.
    """
    if not begin.size:
        return np.zeros(tokens, dtype=np.int64)
    token = np.arange(tokens)
    least = np.minimum(token - begin[:, None], (begin + length)[:, None] - 1 - token)
    context = np.where(least < 0, -np.inf, least + 0.01 * length[:, None])  # as in run_squad.py
    best: Int64 = context.argmax(axis=0)
    return best
