"""Tables of documents: CSV, TSV, JSON Lines, JSON or Parquet files, or a dataset of the Hugging
Face Hub. One document per row, its text in one column.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_pipeline.sources.columns import row_of, text
from data_pipeline.sources.table import TableConfig, TableSource


@dataclass(frozen=True)
class Config(TableConfig):
    """Where the rows are.

    Attributes:
        field: column of the text; dots reach into nested objects, unless a column's name has them.
    """

    field: str = "text"

    def build(self) -> Table:
        """Finds the files."""
        return Table(**self.find(), field=self.field)


@dataclass(frozen=True)
class Table(TableSource):
    """Reads one column of each row."""

    field: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field,)

    def decode(self, data: bytes) -> str:
        return text(row_of(data), self.field)
