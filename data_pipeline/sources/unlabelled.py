"""Tables of texts, or pairs of them, that a model is to label; read as those of `classification`, all columns kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.sources.columns import row_of, text
from data_pipeline.sources.table import TableConfig, TableSource
from trainer.examples import TaskRow


@dataclass(frozen=True)
class Unlabelled(TableSource):
    """Reads the columns of texts; the bytes of a record hold all columns.

    Attributes:
        texts: the columns of the texts, in their order in the sequence; dots reach into nested objects.
    """

    texts: tuple[str, ...]

    @classmethod
    def open(cls, path: str, texts: tuple[str, ...]) -> Unlabelled:
        """Finds the files of a path, glob pattern or URL.

        Raises:
            ConfigError: it matches nothing, or a file is of no known format.
            MissingExtra: what reads them is not installed.
        """
        found = TableConfig((path,)).find()
        return cls(found.files, "class", (), found.first_heldout, found.parts, texts)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.texts

    def decode_row(self, data: bytes) -> TaskRow:
        """The row, with a label that says nothing."""
        row = row_of(data)
        return TaskRow(tuple(text(row, name) for name in self.texts), 0.0)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        super()._chosen(names)  # refuses a table without the columns
        return list(names)
