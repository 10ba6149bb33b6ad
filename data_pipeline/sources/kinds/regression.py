"""Tables of texts, or pairs of texts, each with a number, as the similarities of STS-B."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord
from data_pipeline.sources.columns import brief, column, number, row_of
from data_pipeline.sources.templates import TextsConfig, TextsSource
from samestep.examples import TaskRow
from samestep.tasks import TaskKind


@dataclass(frozen=True, kw_only=True)
class Config(TextsConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        label: column of the number.
    """

    label: str = "score"

    def build(self) -> Regression:
        """Finds the files."""
        return Regression(**self.find(), labels=(self.label,), config=self)


@dataclass(frozen=True)
class Regression(TextsSource):
    """Reads the texts and the number of each row."""

    kind: ClassVar[TaskKind] = "regression"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return (*super().columns, self.config.label)

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        texts = self.texts(row)
        value = column(row, self.config.label)
        # To Python, JSON's true is the number 1.
        label = math.nan if isinstance(value, bool) else number(value)
        if not math.isfinite(label):
            raise BadRecord(f"{self.config.label} is not a finite number: {brief(value)}")
        return TaskRow(texts, label)
