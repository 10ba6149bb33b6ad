"""Tables of texts, or pairs of them, with a number, as the similarities of STS-B."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord, TaskSource
from data_pipeline.sources.columns import brief, column, number, row_of
from data_pipeline.sources.table import TableSource
from data_pipeline.sources.templates import TemplateConfig, columns_of, write
from trainer.errors import ConfigError
from trainer.examples import TaskRow
from trainer.tasks import TaskKind


@dataclass(frozen=True, kw_only=True)
class Config(TemplateConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        texts: the texts, in their order in the sequence: columns, in whose names dots reach into
            nested objects, or templates, as "{passage} {question}".
        label: the column of the number.
    """

    texts: tuple[str, ...] = ("text",)
    label: str = "score"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.texts:
            raise ConfigError("texts is empty; name the columns of the texts")
        columns_of(self.texts)

    def build(self) -> Regression:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or a file cannot be used.
            MissingExtra: what reads them is not installed.
        """
        found = self.find()
        return Regression(found.files, (self.label,), found.first_heldout, found.parts, self)


@dataclass(frozen=True)
class Regression(TableSource, TaskSource):
    """Reads the columns of texts and that of the number."""

    kind: ClassVar[TaskKind] = "regression"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return (*columns_of(self.config.texts), self.config.label)

    def text_name(self, index: int) -> str:
        return self.config.texts[index]

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        texts = tuple(write(row, template, self.config.words) for template in self.config.texts)
        value = column(row, self.config.label)
        label = math.nan if isinstance(value, bool) else number(value)
        if not math.isfinite(label):
            raise BadRecord(f"{self.config.label} {brief(value)} is not a finite number")
        return TaskRow(texts, label)
