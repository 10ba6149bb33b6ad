"""Tables of texts, or pairs of texts, for a model to label.

The texts are read as for `classification`; all other columns are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord, Record
from data_pipeline.sources.columns import (
    brief,
    check_no_python_list,
    column,
    nested,
    repeated,
    row_of,
)
from data_pipeline.sources.templates import TextsConfig, TextsSource
from samestep.examples import TaskRow
from samestep.tasks import TaskKind

PASSAGES = ("query", "positive", "negatives")
"""Columns of a query and of its passages, each of these with a text or a list of texts."""


@dataclass(frozen=True)
class Unlabeled(TextsSource):
    """Reads the texts of each row; the bytes of a record hold all columns."""

    kind: ClassVar[TaskKind] = "classification"

    @classmethod
    def open(
        cls,
        path: str,
        texts: tuple[str, ...],
        words: dict[str, dict[str, str]],
    ) -> Unlabeled:
        """Finds the files of a path, glob pattern or URL; `texts` and `words` as in `TextsConfig`.

        Raises:
            ConfigError: nothing matches, a format is unknown, or a template is invalid.
            MissingExtra: a package that reads the files is not installed.
        """
        config = TextsConfig((path,), texts=texts, words=words)
        return cls(**config.find(), labels=(), config=config)

    def rows(self, record: Record) -> list[TaskRow]:
        """The rows to label of a record.

        Raises:
            BadRecord: it does not hold them.
        """
        return [self.parse_row(record)]

    def decode_row(self, data: bytes) -> TaskRow:
        """Decodes the texts of a row, with a label that stands for none."""
        return TaskRow(self.texts(row_of(data)), 0.0)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        # Rejects a table without the columns of the texts; the others go to the labeled file.
        super()._chosen(names)
        if twice := repeated(names):
            raise BadRecord(f"two columns are named {twice!r}")
        return list(names)


@dataclass(frozen=True)
class Passages(Unlabeled):
    """Reads the query of each row and its passages; `texts` are their columns."""

    def rows(self, record: Record) -> list[TaskRow]:
        query, *passages = self.parse_row(record).texts
        return [TaskRow((query, passage), 0.0) for passage in passages]

    def text_name(self, index: int) -> str:
        return f"text {index}, counted from the query"

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        query, *names = self.config.texts
        texts = [column(row, query)]
        for name in names:
            # As the source `retrieval` reads it: a cell of CSV holds a list as JSON.
            value = nested(row, name)
            check_no_python_list(value, name)
            texts += value if isinstance(value, list) else [value]
        for text in texts:
            if not isinstance(text, str):
                raise BadRecord(f"a query or passage is not text: {brief(text)}")
        return TaskRow(tuple(map(str, texts)))
