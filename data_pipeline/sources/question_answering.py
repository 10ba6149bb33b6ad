"""Tables of questions whose answers are spans of a context, as SQuAD, in its own JSON as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from data_pipeline.sources import BadRecord, TaskSource
from data_pipeline.sources.columns import brief, column, nested, row_of, text, whole
from data_pipeline.sources.table import TableConfig, TableSource
from trainer.examples import TaskRow
from trainer.tasks import TaskKind


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        paths: files, glob patterns or URLs of the rows to train on: .jsonl, .json, which may be
            SQuAD's own, of nested articles, .csv, .tsv (both with a line of names; .tsv without
            quoting) or .parquet; `.gz` and `.zst` are decompressed.
        question: the column of the question; dots reach into nested objects.
        context: the column of the text that answers are spans of.
        answers: the column of the answers: a list of {text, answer_start}, or both lists, {text:
            [], answer_start: []}; answer_start counts characters. An empty list says that there is
            no answer.
        id: the column that names the question, if there is one.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    id: str = "id"

    def build(self) -> QuestionAnswering:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or a file cannot be used.
            MissingExtra: what reads them is not installed.
        """
        found = self.find()
        return QuestionAnswering(found.files, (), found.first_heldout, found.parts, self)


@dataclass(frozen=True)
class QuestionAnswering(TableSource, TaskSource):
    """Reads a question, its context, and where in it the answers stand."""

    kind: ClassVar[TaskKind] = "question_answering"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.config.question, self.config.context, self.config.answers)

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.config.id,)

    def rows_of(self, value: object) -> Iterable[object] | None:
        articles = value.get("data") if isinstance(value, dict) else None
        if (
            isinstance(articles, list)
            and articles
            and isinstance(articles[0], dict)
            and "paragraphs" in articles[0]
        ):
            return _questions(articles)
        return super().rows_of(value)

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        context = text(row, self.config.context)
        spans, answers = list[tuple[int, int, int]](), list[str]()
        for answer, start in _answers(nested(row, self.config.answers), self.config.answers):
            begin = _nearest(context, answer, start)
            spans.append((begin, begin + len(answer), 0))
            answers.append(answer)
        texts = (text(row, self.config.question), context)
        return TaskRow(texts, spans=tuple(spans), answers=tuple(answers), group=self._group(row))

    def _group(self, row: dict[str, object]) -> str:
        try:
            name = column(row, self.config.id)
        except BadRecord:
            return ""
        return "" if name is None else str(name)


def _questions(articles: list[Any]) -> Iterable[dict[str, object]]:
    """A row for each question of SQuAD's articles."""
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    kept = {
                        key: question[key]
                        for key in ("answers", "is_impossible")
                        if key in question
                    }
                    yield {
                        "id": question["id"],
                        "question": question["question"],
                        "context": paragraph["context"],
                        **kept,
                    }
    except KeyError as error:
        raise BadRecord(f"not in the format of SQuAD: no {error}") from None
    except TypeError:
        raise BadRecord("not in the format of SQuAD") from None


def _answers(value: Any, name: str) -> list[tuple[str, int]]:
    """Each answer with where it is said to begin; 0 where that is not said."""
    try:
        if isinstance(value, dict):
            texts = value["text"]
            pairs = list(zip(texts, value.get("answer_start") or [0] * len(texts), strict=True))
        else:
            pairs = [(answer["text"], answer.get("answer_start", 0)) for answer in value]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadRecord(f"column {name!r} holds no answers, as [{{text, answer_start}}]") from None
    found = []
    for answer, start in pairs:
        begin = whole(start)
        if not isinstance(answer, str) or begin is None:
            raise BadRecord(f"{name} {brief((answer, start))} is not a text and where it begins")
        if not answer.strip():
            raise BadRecord("empty answer")
        found.append((answer, begin))
    return found


def _nearest(context: str, answer: str, start: int) -> int:
    """Where the answer begins in the context, as near to `start` as there is one."""
    start = max(0, start)
    before, after = context.rfind(answer, 0, start + len(answer)), context.find(answer, start)
    if before < 0 and after < 0:
        raise BadRecord(f"answer {brief(answer)} is not in the context")
    if before < 0 or after < 0:
        return max(before, after)
    return before if start - before <= after - start else after
