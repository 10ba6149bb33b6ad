"""Rows of retrieval: a query, passages that answer it, passages that do not, and perhaps scores.

Rows hold the texts of their passages, or the ids of passages that are in other files, as in the
layout of BEIR (Thakur et al. 2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data_pipeline.sources import BadRecord, Record, TaskSource, checked_text
from data_pipeline.sources.beir import Folder, document, judged
from data_pipeline.sources.columns import (
    Row,
    brief,
    check_no_python_list,
    items,
    label_text,
    listed,
    nested,
    number,
    row_of,
    text,
)
from data_pipeline.sources.table import TableConfig, TableSource
from samestep.errors import ConfigError
from samestep.examples import TaskRow
from samestep.tasks import TaskKind

_NEGATIVES = ("negatives", "negative")
_SCORES = "scores"
_COLUMNS = ("query", "positive", "negatives", "scores")


@dataclass(frozen=True)
class RetrievalRow(TaskRow):
    """A row; its only text is the query.

    Attributes:
        positives, negatives: texts of the passages, or their ids if the source has a `corpus`.
        scores: a teacher's scores of the positives, then of the negatives; empty without a teacher.
        numbers: the number of each passage in the dataset, in that order; filled in by the build.
    """

    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def passages(self) -> tuple[str, ...]:
        """Positives and negatives."""
        return (*self.positives, *self.negatives)


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        beir: a folder in the layout of BEIR instead of files.
        query: column of the query.
        positive: column of the passage that answers it, or of a list of several.
        negatives: columns of passages that do not, each with one or a list. The usual columns may
            be missing; columns that you name may not.
        scores: column of a teacher's scores: a list with a number for each positive, then for each
            negative. All rows have it, or none; null ignores it.
        passages: files of passages, whose ids `positive` and `negatives` hold then: `_id`, `text`
            and perhaps `title`, as BEIR's corpus.jsonl.
        query_prompt: text before each query, such as "query: ".
        passage_prompt: text before each passage, such as "passage: ".
    """

    beir: Folder | None = None
    query: str = "query"
    positive: str = "positive"
    negatives: tuple[str, ...] = _NEGATIVES
    scores: str | None = _SCORES
    passages: tuple[str, ...] = ()
    query_prompt: str = ""
    passage_prompt: str = ""

    def __post_init__(self) -> None:
        if self.beir is None:
            super().__post_init__()
        elif self.paths or self.heldout or self.dataset or self.header or self.passages:
            raise ConfigError(
                f"beir is {self.beir.path}, which has rows and passages. Leave paths, heldout, "
                "dataset, header and passages out."
            )
        elif any(getattr(self, name) != getattr(Config, name) for name in _COLUMNS):
            raise ConfigError(
                f"beir is {self.beir.path}, whose rows have columns of their own. Leave "
                f"{listed(_COLUMNS)} out."
            )

    def build(self) -> Retrieval:
        """Finds the files."""
        if self.beir is None:
            found, behind = self.find(), tuple[str, ...]()
            if not self.passages:
                return Retrieval(**found, labels=(), config=self)
            patterns = self.passages
        else:
            found, behind = self.beir.find(), (self.beir.queries(),)
            patterns = (self.beir.corpus(),)
        corpus = Corpus(**TableConfig(patterns, encoding=self.encoding).find())
        # Files of rows or judgments, of passages, and BEIR's queries, which no record is read from.
        found["files"] = (*found["files"], *corpus.files, *behind)
        return Retrieval(**found, labels=(), config=self, corpus=corpus)


@dataclass(frozen=True)
class Corpus(TableSource):
    """Passages with ids."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ("_id", "text")

    @property
    def optional(self) -> tuple[str, ...]:
        return ("title",)


@dataclass(frozen=True)
class Retrieval(TableSource, TaskSource):
    """Reads the query of each row and its passages.

    Attributes:
        corpus: the passages that rows name by ids; None if rows hold their texts. Its files follow
            the files of rows in `files`.
    """

    kind: ClassVar[TaskKind] = "retrieval"
    config: Config
    corpus: Corpus | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        config = self.config
        # A missing usual column is no error, a missing one that the settings name is.
        named = () if config.negatives == _NEGATIVES else config.negatives
        scores = () if config.scores in (None, _SCORES) else (config.scores,)
        return (config.query, config.positive, *named, *filter(None, scores))

    @property
    def optional(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.config.negatives, self.config.scores)))

    @property
    def _row_files(self) -> int:
        beside = 0 if self.corpus is None else len(self.corpus.files)
        return len(self.files) - beside - (self.config.beir is not None)

    def records(self) -> Iterator[Record]:
        if self.config.beir is not None:
            return judged(self.files, self._row_files)
        if self.corpus is None:
            return super().records()
        # The files of passages come behind, in an order of their own.
        files = self.files[: self._row_files]
        return dataclasses.replace(self, files=files, corpus=None).records()

    def passages(self) -> Iterator[Record]:
        if self.corpus is not None:
            for record in self.corpus.records():
                yield record._replace(file=self._row_files + record.file)

    def is_passage(self, record: Record) -> bool:
        """Whether a record is of `passages`."""
        last = len(self.files) - (self.config.beir is not None)
        return self._row_files <= record.file < last

    def parse(self, record: Record) -> str:
        if self.is_passage(record):
            return self.parse_passage(record)[1]
        row = self.parse_row(record)
        # Ids of passages are no text to look for tokens or contamination in.
        return "\n".join(row.texts if self.corpus is not None else (*row.texts, *row.passages))

    def parse_passage(self, record: Record) -> tuple[str, str]:
        """Returns the id of a passage and its text, with a title in front and the prompt.

        Raises:
            BadRecord: one of them is missing or blank.
        """
        name, content = document(record.content())
        return name, self.config.passage_prompt + checked_text(content, "passage")

    def parse_row(self, record: Record) -> RetrievalRow:
        return self.decode_row(record.content())

    def decode_row(self, data: bytes) -> RetrievalRow:
        config, row = self.config, row_of(data)
        query = checked_text(text(row, config.query), config.query)
        positives = self._passages(row, config.positive)
        if not positives:
            raise BadRecord(f"no {config.positive}")
        named = (name for name in config.negatives if name in self.columns or name in row)
        negatives = [each for name in named for each in self._passages(row, name)]
        _check_distinct(positives, negatives)
        scores = self._scores(row, len(positives) + len(negatives))
        return RetrievalRow(
            (config.query_prompt + query,),
            positives=tuple(positives),
            negatives=tuple(negatives),
            scores=scores,
        )

    def text_name(self, index: int) -> str:
        return self.config.query

    def _passages(self, row: Row, name: str) -> list[str]:
        value = nested(row, name)
        check_no_python_list(value, name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        found = []
        for index, each in enumerate(values):
            where = f"{name}[{index}]" if isinstance(value, list) else name
            if self.corpus is not None and isinstance(each, int):
                each = label_text(each)
            if not isinstance(each, str):
                raise BadRecord(f"{name} holds what is not text: {brief(each)}")
            prompt = self.config.passage_prompt if self.corpus is None else ""
            found.append(prompt + checked_text(each, where))
        return found

    def _scores(self, row: Row, passages: int) -> tuple[float, ...]:
        name = self.config.scores
        if name is None or (name not in self.columns and row.get(name) is None):
            return ()
        values = items(row, name)
        if len(values) != passages:
            raise BadRecord(f"{name} has not a number for each passage: {len(values)}, {passages}")
        with np.errstate(over="ignore"):
            scores = np.array(
                [number(None if isinstance(each, bool) else each) for each in values], np.float32
            )
        if not np.isfinite(scores).all():
            raise BadRecord(f"{name} holds what is no finite number: {brief(values)}")
        return tuple(scores.tolist())


def _check_distinct(positives: list[str], negatives: list[str]) -> None:
    if both := set(positives) & set(negatives):
        raise BadRecord(f"a negative equals a positive: {brief(min(both))}")
    for name, side in (("positive", positives), ("negative", negatives)):
        if len(set(side)) < len(side):
            again = next(each for index, each in enumerate(side) if each in side[:index])
            raise BadRecord(f"a {name} comes twice: {brief(again)}")
