"""Tables of texts, or pairs of texts, for a model to label.

The texts are read as for `classification`; all other columns are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord
from data_pipeline.sources.columns import repeated, row_of
from data_pipeline.sources.templates import TextsConfig, TextsSource
from samestep.examples import TaskRow
from samestep.tasks import TaskKind


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

    def decode_row(self, data: bytes) -> TaskRow:
        """Decodes the texts of a row, with a label that stands for none."""
        return TaskRow(self.texts(row_of(data)), 0.0)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        # Rejects a table without the columns of the texts; the others go to the labeled file.
        super()._chosen(names)
        if twice := repeated(names):
            raise BadRecord(f"two columns are named {twice!r}")
        return list(names)
