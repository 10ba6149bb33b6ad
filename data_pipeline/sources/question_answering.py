"""Tables of questions whose answers are spans of a context, as SQuAD, also in SQuAD's own JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from data_pipeline.sources import BadRecord, TaskSource
from data_pipeline.sources.columns import Row, brief, column, nested, row_of, text, whole
from data_pipeline.sources.table import TableConfig, TableSource
from trainer.examples import TaskRow
from trainer.tasks import TaskKind


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        paths: files, glob patterns or URLs of the rows to train on: .jsonl, .json, which may be
            SQuAD's own, of nested articles, .csv, .tsv (both with a header line; .tsv without
            quoting) or .parquet; `.gz`, `.bz2`, `.xz` and `.zst` are decompressed.
        question: column of the question; dots reach into nested objects.
        context: column of the text that answers are spans of.
        answers: column of the answers: a list of {text, answer_start}, or both lists, {text: [],
            answer_start: []}; answer_start counts characters. An empty list means that there is no
            answer.
        id: column that names the question, if there is one.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    id: str = "id"

    def build(self) -> QuestionAnswering:
        """Finds the files."""
        return QuestionAnswering(**self.find(), labels=(), config=self)


@dataclass(frozen=True)
class QuestionAnswering(TableSource, TaskSource):
    """Reads a question, its context, and the spans of the answers in it."""

    kind: ClassVar[TaskKind] = "question_answering"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.config.question, self.config.context, self.config.answers)

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.config.id,)

    def rows_of(self, value: object) -> Iterable[object] | None:
        # {"version": ..., "data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [...]}]}]}
        match value:
            case {"data": [{"paragraphs": _}, *_] as articles}:
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

    def _group(self, row: Row) -> str:
        # Optional: without a name, the texts of a row choose its split.
        try:
            name = column(row, self.config.id)
        except BadRecord:
            return ""
        return "" if name is None else str(name)


def _questions(articles: list[Any]) -> Iterable[Row]:
    """Yields a row for each question of SQuAD's articles."""
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {
                        "id": question["id"],
                        "question": question["question"],
                        "context": paragraph["context"],
                        **{k: question[k] for k in ("answers", "is_impossible") if k in question},
                    }
    except KeyError as error:
        raise BadRecord(f"not in the format of SQuAD: no {error}") from None
    except TypeError:
        raise BadRecord("not in the format of SQuAD") from None


def _answers(value: Any, name: str) -> list[tuple[str, int]]:
    """Returns each answer with its stated start; 0 if none is stated."""
    # Hugging Face has columns of a list, {"text": ["a", "b"], "answer_start": [3, 7]}, and SQuAD a
    # list of objects, [{"text": "a", "answer_start": 3}, ...].
    try:
        if isinstance(value, dict):
            texts = value["text"]
            starts = value.get("answer_start") or [0] * len(texts)
            # A text, too, can be iterated over: its letters would be the answers.
            if not isinstance(texts, list) or not isinstance(starts, list):
                raise TypeError
            pairs = list(zip(texts, starts, strict=True))
        else:
            pairs = [(answer["text"], answer.get("answer_start", 0)) for answer in value]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadRecord(f"column {name!r} holds no answers, as [{{text, answer_start}}]") from None
    found = []
    for answer, start in pairs:
        begin = whole(start)
        if not isinstance(answer, str) or begin is None:
            raise BadRecord(
                f"an item of {name} is not a text and where it begins: {brief((answer, start))}"
            )
        if not answer.strip():
            raise BadRecord("empty answer")
        found.append((answer, begin))
    return found


def _nearest(
    context: str,
    answer: str,
    start: int,
) -> int:
    """Returns the start of the occurrence of an answer that is nearest to its stated start.

    Stated starts are often off by a few characters, as when a text was stripped afterwards.
    """
    start = max(0, start)
    # The last occurrence that begins at or before `start`, and the first one at or after it. In
    # "a bee, a bee", "bee" stated at 6 is at 2 or 9: 9 is nearer.
    around = (context.rfind(answer, 0, start + len(answer)), context.find(answer, start))
    found = [begin for begin in around if begin >= 0]
    if not found:
        raise BadRecord(f"an answer is not in the context: {brief(answer)}")
    return min(found, key=lambda begin: abs(begin - start))
