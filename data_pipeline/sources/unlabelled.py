"""Tables of texts, or pairs of them, that a model is to label.

Read as those of `classification`, all columns kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import TaskSource
from data_pipeline.sources.columns import row_of
from data_pipeline.sources.table import TableConfig, TableSource
from data_pipeline.sources.templates import Words, columns_of, write
from trainer.examples import TaskRow
from trainer.tasks import TaskKind


@dataclass(frozen=True)
class Unlabelled(TableSource, TaskSource):
    """Reads the columns of texts; the bytes of a record hold all columns.

    Attributes:
        texts: columns or templates, in their order in the sequence, as `classification` has them.
        words: what is written for the values of a column.
    """

    kind: ClassVar[TaskKind] = "classification"
    texts: tuple[str, ...]
    words: Words

    @classmethod
    def open(cls, path: str, texts: tuple[str, ...], words: Words) -> Unlabelled:
        """Finds the files of a path, glob pattern or URL.

        Raises:
            ConfigError: it matches nothing, a file is of no known format, or a text is no template.
            MissingExtra: what reads them is not installed.
        """
        found = TableConfig((path,)).find()
        columns_of(texts)
        return cls(found.files, (), found.first_heldout, found.parts, texts, words)

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of(self.texts)

    def text_name(self, index: int) -> str:
        return self.texts[index]

    def decode_row(self, data: bytes) -> TaskRow:
        """The row, with a label that says nothing."""
        row = row_of(data)
        return TaskRow(tuple(write(row, template, self.words) for template in self.texts), 0.0)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        super()._chosen(names)  # refuses a table without the columns
        return list(names)
