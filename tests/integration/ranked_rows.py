"""A source of rows of retrieval whose texts are stored with each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import TaskSource
from data_pipeline.sources.columns import row_of
from data_pipeline.sources.table import TableConfig, TableSource
from samestep.examples import TaskRow
from samestep.tasks import TaskKind


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are: query, positive, negatives and perhaps scores."""

    def build(self) -> Ranked:
        return Ranked(**self.find(), labels=())


@dataclass(frozen=True)
class Ranked(TableSource, TaskSource):
    """Reads the query, the positive and the negatives."""

    kind: ClassVar[TaskKind] = "retrieval"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("query", "positive", "negatives")

    def text_name(self, index: int) -> str:
        return f"text {index}"

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        negatives: list[str] = row["negatives"]
        labels = row.get("scores") or [1.0, *[0.0] * len(negatives)]
        texts = (row["query"], row["positive"], *negatives)
        return TaskRow(texts, probabilities=tuple(labels))
