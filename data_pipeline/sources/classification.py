"""Tables of texts, or pairs of them, of one of several classes, as CoLA, SST-2, MRPC and MNLI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.sources import BadRecord, Record
from data_pipeline.sources.columns import brief, check_labels, column, index_of, label_text, nested, row_of, text
from data_pipeline.sources.table import TableConfig, TableSource
from trainer.errors import ConfigError
from trainer.examples import TaskRow

_SLACK = 1e-3  # by which the sum of probabilities may miss 1


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        texts: the columns of the texts, in their order in the sequence; dots reach into nested objects.
        label: the column of the class: one of `labels`, or where these are no numbers its index among them, or a list
            of a probability for each of them, as of a teacher.
        labels: the classes.
        group: a column that rows share which are scored together, such as a question whose answers they are.
        ignore: what stands in `label` of rows that are left out, such as the "-" of SNLI.
    """

    texts: tuple[str, ...] = ("text",)
    label: str = "label"
    labels: tuple[str, ...]
    group: str | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.texts:
            raise ConfigError("texts is empty; name the columns of the texts")
        check_labels(self.labels, 2)
        if both := [label for label in self.ignore if label in self.labels]:
            raise ConfigError(f"{both[0]!r} is in labels and in ignore; leave it out of one of them")

    def build(self) -> Classification:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or a file cannot be used.
            MissingExtra: what reads them is not installed.
        """
        found = self.find()
        return Classification(found.files, "class", self.labels, found.first_heldout, found.parts, self)


@dataclass(frozen=True)
class Classification(TableSource):
    """Reads the columns of texts and that of the class."""

    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        group = () if self.config.group is None else (self.config.group,)
        return (*self.config.texts, self.config.label, *group)

    def records(self) -> Iterator[Record]:
        every = super().records()
        return (record for record in every if not self._is_ignored(record)) if self.config.ignore else every

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        texts = tuple(text(row, name) for name in self.config.texts)
        label = nested(row, self.config.label)
        if isinstance(label, list):
            return TaskRow(texts, probabilities=self._probabilities(label))
        group = "" if self.config.group is None else label_text(column(row, self.config.group))
        return TaskRow(texts, float(index_of(label, self.labels, self.config.label)), group=group)

    def _is_ignored(self, record: Record) -> bool:
        try:
            return label_text(column(row_of(record.data), self.config.label)) in self.config.ignore
        except BadRecord:  # which whoever parses it is told
            return False

    def _probabilities(self, values: list[Any]) -> tuple[float, ...]:
        name = self.config.label
        if len(values) != len(self.labels):
            raise BadRecord(f"{name} has {len(values)} probabilities for {len(self.labels)} labels")
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 for value in values):
            raise BadRecord(f"{name} {brief(values)} holds what is no probability")
        if not abs(sum(values) - 1) <= _SLACK:
            raise BadRecord(f"probabilities of {name} sum to {sum(values):.6g} and not to 1")
        return tuple(map(float, values))
