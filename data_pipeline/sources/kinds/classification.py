"""Tables of texts, or pairs of texts, each of one of several classes, as CoLA, SST-2 and MNLI."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord, Record
from data_pipeline.sources.columns import (
    Row,
    brief,
    check_labels,
    column,
    index_of,
    items,
    label_text,
    listed,
    number,
    row_of,
    whole,
)
from data_pipeline.sources.kinds.jsonl import encoded
from data_pipeline.sources.templates import TextsConfig, TextsSource, columns_of, value_of, write
from samestep.errors import ConfigError
from samestep.examples import TaskRow
from samestep.tasks import TaskKind

_SLACK = 1e-3  # accepted difference of a sum of probabilities from 1


@dataclass(frozen=True, kw_only=True)
class Config(TextsConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        label: column of the class: one of `labels`, or, if no label is a number, its index among
            them, or a probability for each of them, as a teacher predicts: an object by label, or a
            list in the order of `labels`.
        labels: the classes.
        group: column or template shared by rows that are scored together, such as the question that
            they answer.
        each: column with a list. Each of its items makes a row, with the item in place of the list.
            The row is of the second of two `labels` if the item is in the list of the column
            `label`, else of the first.
        ignore: values of `label` whose rows are skipped, such as the "-" of SNLI.
    """

    label: str = "label"
    labels: tuple[str, ...]
    group: str | None = None
    each: str | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        columns_of((self.group or "",))
        if self.each is not None and len(self.labels) != 2:
            raise ConfigError(
                f"each is {self.each!r} and labels names {len(self.labels)}. Name two: one for "
                f"items that are not in the list of column {self.label!r}, one for items that are."
            )
        check_labels(self.labels)
        if both := set(self.ignore).intersection(self.labels):
            raise ConfigError(
                f"{min(both)!r} is in labels and in ignore. Leave it out of one of them."
            )

    def build(self) -> Classification:
        """Finds the files."""
        return Classification(**self.find(), labels=self.labels, config=self)


@dataclass(frozen=True)
class Classification(TextsSource):
    """Reads the texts and the class of each row."""

    kind: ClassVar[TaskKind] = "classification"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        config = self.config
        made_of = columns_of((*config.texts, config.group or ""))
        return tuple(filter(None, (*made_of, config.label, config.each)))

    @property
    def numbered(self) -> Mapping[str, tuple[str, ...]]:
        config = self.config
        # These settings name values of the column, which may be numbers.
        by_value = config.label in config.words or any(
            whole(each) is not None for each in config.ignore
        )
        return {} if config.each is not None or by_value else {config.label: self.labels}

    def records(self) -> Iterator[Record]:
        records = super().records()
        if self.config.each is not None:
            records = itertools.chain.from_iterable(map(self._items, records))
        # Decoding every record here, in the coordinator, would slow down a build for nothing.
        return itertools.filterfalse(self._is_ignored, records) if self.config.ignore else records

    def decode_row(self, data: bytes) -> TaskRow:
        row, config = row_of(data), self.config
        texts = self.texts(row)
        # One of both is set: a class, or the distribution that a teacher predicts.
        label, probabilities = None, tuple[float, ...]()
        if config.each is not None:
            label = float(column(row, config.each) in items(row, config.label))
        elif isinstance(value := value_of(row, config.label, config.words), list | dict):
            probabilities = self._probabilities(value)
        else:
            label = float(index_of(value, self.labels, config.label))
        return TaskRow(texts, label, group=self._group(row), probabilities=probabilities)

    def _group(self, row: Row) -> str:
        name = self.config.group
        if name is None:
            return ""
        # A column may hold a number, as the id of a question, which is no text for `write`.
        return write(row, name, self.config.words) if "{" in name else label_text(column(row, name))

    def _items(self, record: Record) -> Iterator[Record]:
        """Yields a record for each item of the list in the column `each`."""
        name = self.config.each or ""
        try:
            row = row_of(record.content())
            found = items(row, name)
        except BadRecord as error:
            yield record._replace(data=b"", problem=str(error))
            return
        if not found:
            yield record._replace(data=b"", problem=f"no item in {name}")
        # {"q": "_ is", "of": ["a", "b"]} with each "of" becomes {"q": "_ is", "of": "a"} and
        # {"q": "_ is", "of": "b"}, both with the line of the original.
        for item in found:
            yield record._replace(data=encoded({**row, name: item}))

    def _is_ignored(self, record: Record) -> bool:
        try:
            label = column(row_of(record.content()), self.config.label)
        except BadRecord:  # whoever parses the record gets the reason
            return False
        return label_text(label) in self.config.ignore

    def _probabilities(self, values: list[object] | dict[str, object]) -> tuple[float, ...]:
        name = self.config.label
        if isinstance(values, dict):
            if sorted(values) != sorted(self.labels):
                raise BadRecord(f"{name} has probabilities of other labels: {listed(values)}")
            values = [values[label] for label in self.labels]
        if len(values) != len(self.labels):
            raise BadRecord(f"{name} has {len(values)} probabilities for {len(self.labels)} labels")
        numbers: list[float] = []
        for value in values:
            probability = math.nan if isinstance(value, (bool, str)) else number(value)
            # `not ... >= 0` rejects NaN, too, which also stands for an integer beyond all floats.
            if not probability >= 0:
                raise BadRecord(f"{name} holds what is no probability: {brief(values)}")
            numbers.append(probability)
        # Not renormalized: a sum far from 1 means that the numbers are something else.
        if not abs(sum(numbers) - 1) <= _SLACK:
            raise BadRecord(f"probabilities of {name} do not sum to 1: {sum(numbers):.6g}")
        return tuple(numbers)
