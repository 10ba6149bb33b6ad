"""Extractive question answering (SQuAD): answers are spans of a text.

As in Devlin et al. 2019, sections 4.2 and 4.3, and BERT's run_squad.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, PackSpec, Vocabulary
from samestep.tasks import TASKS
from trainer.metrics import squad
from trainer.metrics.squad import Float64
from trainer.objectives import Loss, ObjectiveConfig, Predictions, Task, Tensors
from trainer.objectives.rows import Float32, Int64, logits
from trainer.objectives.task_rows import RowTask, RowWindows, labels_of, last_chunks

_ALWAYS = ("exact_match", "f1")  # scores, whether or not some questions have no answer


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Question answering: the first text is the question, the second one holds the answer.

    Attributes:
        stride: number of tokens from the beginning of one window of a text to the beginning of the
            next. (`doc_stride` of transformers is the number that two windows share.)
        question_length: maximum tokens of a question; the rest is cut off.
        answer_length: maximum tokens of an answer.
        n_best: number of best begins and ends of a window, and of best answers, to consider.
        impossible: whether some questions have no answer in the text (SQuAD 2.0).
        threshold: with `impossible`, how much better no answer must score than the best answer to
            be predicted. null takes the threshold with the best F1 on the scored split, as the
            official script's `best_f1` does; that score has then seen the split's answers.
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
                raise ConfigError(f"{name} is {getattr(self, name)}. Use at least 1.")
        if self.threshold is not None and not self.impossible:
            raise ConfigError(
                f"threshold is {self.threshold} and impossible is false, so every question has an "
                "answer. Set impossible to true, or threshold to null."
            )

    def build(self, vocabulary: Vocabulary) -> Task:
        return QuestionAnswering(self, vocabulary)


@dataclass(frozen=True)
class Answer:
    """A span of a text.

    Attributes:
        text: of the span.
        begin, end: its characters, [begin, end).
        score: the sum of the logits of its begin and its end.
    """

    text: str
    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Answers:
    """Candidate answers to a question.

    Attributes:
        best: the best answers with different texts, best first; empty if there are none.
        no_answer: the score of "no answer": the lowest of all windows.
    """

    best: tuple[Answer, ...]
    no_answer: float

    @property
    def text(self) -> str:
        """The best answer, or ""."""
        return self.best[0].text if self.best else ""

    @property
    def doubt(self) -> float:
        """How much better "no answer" scores than the best one; see `Config.threshold`."""
        return self.no_answer - self.best[0].score if self.best else math.inf


class QuestionAnswering(RowTask):
    """The question-answering objective; see `RowTask`.

    To the rows of `RowTask` it adds, for B examples of S positions:
        labels: int64 [B, 2], the positions of the answer's first and last token; the pooled
            position twice if the window does not hold the whole answer: [CLS], or for a tokenizer
            without it, as T5's, the last </s>.
        weights: float32 [B], the weight of the example.

    The outputs are the logits of begins and ends, float32 [B, S, 2].
    """

    kind = "question_answering"
    predicts = "question_answering"
    needs = frozenset({"question_answering"})
    config: Config

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self._parts = replace(self._parts, stride=config.stride, most=config.question_length)
        self.score_names = TASKS[self.kind].metrics if config.impossible else _ALWAYS

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """Overlapping windows of a text, each after the question.

        Raises:
            ConfigError: there would be text between two windows that is in neither.
        """
        config, spec = self.config, super().pack_spec(sequence_length)
        special = spec.prefix + spec.suffix + self._parts.between
        room = sequence_length - special - config.question_length
        # Example: windows of 60 tokens that begin 61 tokens apart leave one token between them.
        if room < config.stride:
            raise ConfigError(
                f"stride is {config.stride}, and after a question of question_length "
                f"{config.question_length}, sequence_length {sequence_length} has room for {room} "
                f"tokens of text. Use a stride of at most {max(room, 1)}, a longer sequence, such "
                "as 384, or shorter questions."
            )
        return spec

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = self.lay_out(examples, sequence_length)
        labels, (column, length) = labels_of(examples), last_chunks(examples)
        # First and last token of the answer, counted from the begin of the window. Its labels are
        # the two values of a row; a question without an answer has none.
        token = np.full((examples.key.size, 2), -1, dtype=np.int64)
        answered = labels.count == 2
        first = (np.cumsum(labels.count) - labels.count)[answered]
        ends = labels.values[first[:, None] + [0, 1]]
        token[answered] = ends - labels.begin[answered, None]
        is_held = np.all((token >= 0) & (token < length[:, None]), axis=1, keepdims=True)
        return {
            **batch,
            "labels": np.where(is_held, token + column[:, None], self.pooled_positions(batch)),
            "weights": examples.weight,
        }

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Mean cross-entropy of begin and end in float32, over totals["examples"].

        The softmax is over the positions that are not padding.
        """
        outputs = logits(model, batch, self.predicts).float()
        weights, segments = batch["weights"], batch.get("segments")
        scores = outputs
        if segments is not None:
            scores = outputs.masked_fill((segments == 0)[..., None], -math.inf)
        scores = scores.transpose(1, 2).flatten(0, 1)
        nll = F.cross_entropy(scores, batch["labels"].flatten(), reduction="none")
        nll = (nll.view(-1, 2).mean(dim=1) * weights).sum()
        means = {"loss": (nll.detach(), weights.sum())}
        return Loss(nll / totals["examples"], means, outputs.detach())

    def answers(self, predictions: Predictions) -> list[Answers]:
        """The candidate answers of each row."""
        return [self._answers(row, predictions.outputs) for row in self.windows(predictions)]

    def _answers(self, windows: RowWindows, outputs: Float32) -> Answers:
        """The candidate answers of a row; `outputs` are of the whole split."""
        row, config = windows.row, self.config
        # Windows overlap. Only the window with the most context around a token may begin an answer
        # there, or the same span would be scored several times.
        owner = max_context(windows.begin, windows.length, len(row.offsets))
        scores, spans = [np.empty(0)], [np.empty((0, 2), dtype=np.int64)]
        each_window = zip(*(array.tolist() for array in windows[1:]), strict=True)
        for number, (example, at, column, length) in enumerate(each_window):
            logits = outputs[example, column : column + length].astype(np.float64)
            best = np.argsort(-logits, axis=0, kind="stable")[: config.n_best]
            first, last = best[:, 0], best[:, 1]
            first = first[owner[at + first] == number]
            # All pairs [begins, ends] of the best begins and ends that form a short enough span.
            more = last - first[:, None]
            i, j = np.nonzero((more >= 0) & (more < config.answer_length))
            begin, end = first[i], last[j]
            scores.append(logits[begin, 0] + logits[end, 1])
            spans.append(at + np.stack((begin, end), axis=1))
        score, span = np.concatenate(scores), np.concatenate(spans)
        # Spans with the same text count once, with their best score: "Ann" may come twice.
        found: dict[str, Answer] = {}
        for i in np.argsort(-score, kind="stable").tolist():
            first_token, last_token = span[i]
            begin, end = row.offsets[first_token][0], row.offsets[last_token][1]
            text = row.texts[-1][begin:end]
            if text and text not in found:
                found[text] = Answer(text, begin, end, float(score[i]))
            if len(found) == config.n_best:
                break
        pooled = self.pooled_after(windows.column, windows.length)
        no_answer = outputs[windows.example, pooled].astype(np.float64).sum(axis=-1)
        return Answers(tuple(found.values()), float(no_answer.min(initial=math.inf)))

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """SQuAD's exact_match and f1.

        With `impossible`, they are for the threshold, which is among the scores, as are the means
        of questions with and without an answer (has_answer_exact_match, has_answer_f1,
        no_answer_accuracy) and the best exact_match and f1 of any threshold.
        """
        _, scores, doubt, threshold = self._scored(predictions)
        if not self.config.impossible:
            return scores.means()
        return {
            **scores.without(doubt > threshold).means_by_kind(),
            "best_exact_match": squad.best_threshold(scores.exact, scores, doubt)[0],
            "best_f1": squad.best_threshold(scores.f1, scores, doubt)[0],
            "threshold": threshold,
        }

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """For each question: its id, the right answers, the prediction, and the best answers.

        The probabilities of `n_best` are a softmax over their scores. With `impossible`, "no
        answer" is one of them, "" from 0 to 0; `null_odds` is how much better it scores than the
        best other, and "" is predicted if that is above the threshold.
        """
        answers, _, _, threshold = self._scored(predictions)
        for row, of_row in zip(predictions.rows, answers, strict=True):
            line: dict[str, object] = {"id": row.group} if row.group else {}
            line["answers"] = list(row.answers)
            line["prediction"] = "" if of_row.doubt > threshold else of_row.text
            n_best = list(of_row.best)
            if self.config.impossible:
                n_best.append(Answer("", 0, 0, of_row.no_answer))
                n_best.sort(key=lambda answer: -answer.score)
                # With no other answer, its score counts as 0, as in run_squad.py: JSON has no
                # infinity.
                line["null_odds"] = of_row.doubt if of_row.best else of_row.no_answer
            scores = torch.tensor([answer.score for answer in n_best], dtype=torch.float64)
            probabilities = scores.softmax(0).tolist()
            line["n_best"] = [
                {**asdict(answer), "probability": probability}
                for answer, probability in zip(n_best, probabilities, strict=True)
            ]
            yield line

    def _scored(
        self, predictions: Predictions
    ) -> tuple[list[Answers], squad.Scores, Float64, float]:
        """Candidate answers; scores and doubts of the best; the doubt above which none is given."""
        answers = self.answers(predictions)
        right = [row.answers for row in predictions.rows]
        scores = squad.raw_scores([each.text for each in answers], right)
        doubt = np.array([each.doubt for each in answers])
        threshold = math.inf
        if self.config.threshold is not None:
            threshold = self.config.threshold
        elif self.config.impossible:
            threshold = squad.best_threshold(scores.f1, scores, doubt)[1]
        return answers, scores, doubt, threshold


def max_context(begin: Int64, length: Int64, tokens: int) -> Int64:
    """The window with the most context around each token of a text: int64 [tokens].

    A token's context is the smaller number of tokens before and after it in the window; of two
    equal ones the longer window wins, then the first.

    Args:
        begin, length: int64 [W], of the windows, which lie within the text.
        tokens: number of tokens of the text.
    """
    # Example: the windows [0, 5) and [3, 8) share the tokens 3 and 4. Token 3 has 1 token after it
    # in the first and 0 before it in the second, so the first owns it; token 4 has 0 and 1.
    owner = np.zeros(tokens, dtype=np.int64)
    most = np.full(tokens, -np.inf)
    # One window at a time: an array of [windows, tokens] would grow with the square of the text.
    for window, (first, size) in enumerate(zip(begin.tolist(), length.tolist(), strict=True)):
        place = np.arange(size)
        context = np.minimum(place, size - 1 - place) + 0.01 * size  # as in run_squad.py
        own = slice(first, first + size)
        better = context > most[own]
        most[own][better] = context[better]
        owner[own][better] = window
    return owner
