"""Tables of questions whose answers are spans of a context, as SQuAD, also in SQuAD's own JSON.

SQuAD counts `answer_start` in characters. Other tools count bytes of UTF-8 (C, Go, Rust) or UTF-16
code units (JavaScript, Java), which are larger numbers after any character beyond ASCII or beyond
16 bits. All rows of a file count alike, so the unit is the one that most answers of the file fit.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from data_pipeline.sources import BadRecord, Record, TaskSource
from data_pipeline.sources.columns import Row, brief, column, nested, row_of, text, whole
from data_pipeline.sources.kinds.jsonl import encoded
from data_pipeline.sources.table import TableConfig, TableSource
from samestep.examples import TaskRow
from samestep.storage import shown
from samestep.tasks import TaskKind

logger = logging.getLogger(__name__)

# Encoding -> bytes of a unit and its name. Of units that fit equally many answers the first counts.
_UNITS = {
    "": (1, "characters"),
    "utf-16-le": (2, "UTF-16 code units"),
    "utf-8": (1, "bytes of UTF-8"),
}
_UNIT = "(unit of answer_start)"  # an extra column, for workers, which see no other row of the file
# Published starts are off by one or two characters, and by a few more if a context was stripped
# afterwards. Farther away is another occurrence.
_SLACK = 4


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
            answer_start: []}. An empty list means that there is no answer. answer_start counts
            characters, or in a whole file UTF-16 code units or bytes of UTF-8, and may be off by 4;
            without it, an answer is its first occurrence.
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

    def records(self) -> Iterator[Record]:
        units = self._units()
        for record in super().records():
            if not units[record.file] or record.problem is not None:
                yield record
                continue
            try:
                data = encoded({**row_of(record.data), _UNIT: units[record.file]})
            except BadRecord:  # whoever parses the record gets the reason
                data = record.data
            yield Record.of(record.file, record.line, data, record.read)

    def _units(self) -> list[str]:
        """Returns the unit of `answer_start` in each file.

        In this unit most answers are near their stated starts. An answer that is exactly there
        counts twice: after a few accents, starts in characters are near in bytes, too.
        """
        votes = [Counter[str]() for _ in self.files]
        for record in super().records():
            try:
                context, answers = self._context_and_answers(row_of(record.content()))
            except BadRecord:
                continue
            if context.isascii():  # all units agree
                continue
            for unit, (answer, stated) in itertools.product(_UNITS, answers):
                start = _characters(context, stated, unit)
                with contextlib.suppress(BadRecord):
                    is_exact = _find(context, answer, start) == start
                    votes[record.file][unit] += 2 if is_exact else 1
        units = list[str]()
        for file, counts in zip(self.files, votes, strict=True):
            unit = max(_UNITS, key=counts.__getitem__)
            if unit:
                logger.info("%s counts answer_start in %s", shown(file), _UNITS[unit][1])
            units.append(unit)
        return units

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        context, found = self._context_and_answers(row)
        if found and row.get("is_impossible") is True:
            raise BadRecord("is_impossible is true, and there are answers")
        spans, answers = list[tuple[int, int, int]](), list[str]()
        for answer, stated in found:
            begin = _find(context, answer, _characters(context, stated, str(row.get(_UNIT, ""))))
            spans.append((begin, begin + len(answer), 0))
            answers.append(answer)
        texts = (text(row, self.config.question), context)
        return TaskRow(texts, spans=tuple(spans), answers=tuple(answers), group=self._group(row))

    def _context_and_answers(self, row: Row) -> tuple[str, list[tuple[str, int | None]]]:
        name = self.config.answers
        return text(row, self.config.context), _answers(nested(row, name), name)

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


def _answers(value: Any, name: str) -> list[tuple[str, int | None]]:
    """Returns each answer with its stated start; None if none is stated."""
    # Hugging Face has columns of a list, {"text": ["a", "b"], "answer_start": [3, 7]}, and SQuAD a
    # list of objects, [{"text": "a", "answer_start": 3}, ...].
    try:
        if isinstance(value, dict):
            texts = value["text"]
            starts = value.get("answer_start") or [None] * len(texts)
            # A text, too, can be iterated over: its letters would be the answers.
            if not isinstance(texts, list) or not isinstance(starts, list):
                raise TypeError
            pairs = list(zip(texts, starts, strict=True))
        else:
            pairs = [(answer["text"], answer.get("answer_start")) for answer in value]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadRecord(f"column {name!r} holds no answers, as [{{text, answer_start}}]") from None
    found = list[tuple[str, int | None]]()
    for answer, start in pairs:
        begin = None if start is None else whole(start)
        if not isinstance(answer, str) or (begin is None and start is not None):
            raise BadRecord(
                f"an item of {name} is not a text and where it begins: {brief((answer, start))}"
            )
        if not answer.strip():
            raise BadRecord("empty answer")
        found.append((answer, begin))
    return found


def _characters(context: str, start: int | None, unit: str) -> int | None:
    """Converts a start in units of an encoding to characters.

    A start inside a character becomes the start of this character. A negative one, the usual mark
    of an unknown start, becomes None.
    """
    if start is None or start < 0:
        return None
    if not unit:
        return start
    size, _ = _UNITS[unit]
    content = context.encode(unit, "surrogatepass")
    if start * size > len(content):
        return start  # behind the end in every unit
    # In "né 2", "2" begins at character 3 and at byte 4.
    return len(content[: start * size].decode(unit, "ignore"))


def _find(context: str, answer: str, start: int | None) -> int:
    """Returns where an answer begins: at its stated start, or at the only occurrence near it.

    Raises:
        BadRecord: there is none, or there are several, any of which might be meant.
    """
    first = context.find(answer)
    if first < 0:
        raise BadRecord(f"an answer is not in the context: {brief(answer)}")
    if start is None:
        return first
    if context.startswith(answer, start):
        return start
    # In "a bee, a bee", "bee" stated at 4 is at 2, and stated at 6 it may be at 2 or at 9.
    near = [
        begin
        for begin in range(max(0, start - _SLACK), start + _SLACK + 1)
        if context.startswith(answer, begin)
    ]
    if len(near) == 1:
        return near[0]
    times = "more than once" if near else "not"
    raise BadRecord(
        f"an answer is {times} within {_SLACK} characters of answer_start: {brief(answer)}"
    )
