"""Tables of texts, or pairs of them, of one of several classes, as CoLA, SST-2, MRPC and MNLI."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord, Record, TaskSource
from data_pipeline.sources.columns import (
    Row,
    brief,
    check_labels,
    column,
    index_of,
    items,
    label_text,
    row_of,
)
from data_pipeline.sources.table import TableSource, encoded
from data_pipeline.sources.templates import TemplateConfig, columns_of, value_of, write
from trainer.errors import ConfigError
from trainer.examples import TaskRow
from trainer.tasks import TaskKind

_SLACK = 1e-3  # by which the sum of probabilities may miss 1


@dataclass(frozen=True, kw_only=True)
class Config(TemplateConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        texts: the texts, in their order in the sequence: columns, in whose names dots reach into
            nested objects, or templates, as "{passage} {question}".
        label: the column of the class: one of `labels`, or where these are no numbers its index
            among them, or a list of a probability for each of them, as of a teacher.
        labels: the classes.
        group: a column, or a template, of what rows share that are scored together, such as the
            question whose answers they are.
        each: a column with a list, each item of which makes a row that has it in the list's place.
            The row is of the second of two `labels` where the item is in the list of the column
            `label`, else of the first.
        ignore: what stands in `label` of rows that are left out, such as the "-" of SNLI.
    """

    texts: tuple[str, ...] = ("text",)
    label: str = "label"
    labels: tuple[str, ...]
    group: str | None = None
    each: str | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.texts:
            raise ConfigError("texts is empty; name the columns of the texts")
        columns_of((*self.texts, self.group or ""))
        if self.each is not None and len(self.labels) != 2:
            raise ConfigError(
                f"each is {self.each!r} and labels names {len(self.labels)}; name two, of items "
                "that are not in the "
                "list of label and of those that are"
            )
        check_labels(self.labels, 2)
        if both := [label for label in self.ignore if label in self.labels]:
            raise ConfigError(
                f"{both[0]!r} is in labels and in ignore; leave it out of one of them"
            )

    def build(self) -> Classification:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or a file cannot be used.
            MissingExtra: what reads them is not installed.
        """
        found = self.find()
        return Classification(found.files, self.labels, found.first_heldout, found.parts, self)


@dataclass(frozen=True)
class Classification(TableSource, TaskSource):
    """Reads the columns of texts and that of the class."""

    kind: ClassVar[TaskKind] = "classification"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        config = self.config
        group = () if config.group is None else (config.group,)
        each = () if config.each is None else (config.each,)
        return (*columns_of((*config.texts, *group)), config.label, *each)

    def text_name(self, index: int) -> str:
        return self.config.texts[index]

    def records(self) -> Iterator[Record]:
        every: Iterable[Record] = super().records()
        if self.config.each is not None:
            every = itertools.chain.from_iterable(
                self._items(record, self.config.each) for record in every
            )
        return (
            (record for record in every if not self._is_ignored(record))
            if self.config.ignore
            else iter(every)
        )

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        config = self.config
        texts = tuple(write(row, template, config.words) for template in config.texts)
        if config.each is not None:
            return TaskRow(texts, self._is_right(row, config.each), group=self._group(row))
        label = value_of(row, config.label, config.words)
        if isinstance(label, list):
            return TaskRow(texts, probabilities=self._probabilities(label), group=self._group(row))
        return TaskRow(
            texts, float(index_of(label, self.labels, config.label)), group=self._group(row)
        )

    def _group(self, row: Row) -> str:
        name = self.config.group
        if name is None:
            return ""
        return write(row, name, self.config.words) if "{" in name else label_text(column(row, name))

    def _items(self, record: Record, name: str) -> Iterator[Record]:
        """A record for each item of a list."""
        if record.problem is not None:
            yield record
            return
        try:
            row = row_of(record.data)
            found = items(row, name)
        except BadRecord as error:
            yield record._replace(data=b"", problem=str(error))
            return
        if not found:
            yield record._replace(data=b"", problem=f"no item in {name}")
        for item in found:
            yield record._replace(data=encoded({**row, name: item}))

    def _is_right(self, row: Row, name: str) -> float:
        return float(column(row, name) in items(row, self.config.label))

    def _is_ignored(self, record: Record) -> bool:
        try:
            return label_text(column(row_of(record.data), self.config.label)) in self.config.ignore
        except BadRecord:  # which whoever parses it is told
            return False

    def _probabilities(self, values: list[object]) -> tuple[float, ...]:
        name = self.config.label
        if len(values) != len(self.labels):
            raise BadRecord(f"{name} has {len(values)} probabilities for {len(self.labels)} labels")
        numbers = [
            value
            for value in values
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if len(numbers) < len(values) or not all(number >= 0 for number in numbers):
            raise BadRecord(f"{name} {brief(values)} holds what is no probability")
        if not abs(sum(numbers) - 1) <= _SLACK:
            raise BadRecord(f"probabilities of {name} sum to {sum(numbers):.6g} and not to 1")
        return tuple(map(float, numbers))
