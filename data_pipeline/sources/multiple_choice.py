"""Tables of a text and several ways to go on with it, or answers to a question about it, as SWAG
and RACE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord, TaskSource
from data_pipeline.sources.columns import brief, column, items, row_of, whole
from data_pipeline.sources.table import TableSource
from data_pipeline.sources.templates import TemplateConfig, columns_of, write
from trainer.errors import ConfigError
from trainer.examples import TaskRow
from trainer.tasks import TaskKind


@dataclass(frozen=True, kw_only=True)
class Config(TemplateConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        context: the text that all choices share: a column, in whose name dots reach into nested
            objects, or a template, as "{first} {second}".
        question: a text that each choice begins with, such as SWAG's "sent2"; a blank stands
            between them.
        choices: the texts of the choices, or the column that holds a list of them.
        label: the column of the right choice: its number, or a letter from "A" on.
        first: the number of the first choice.
    """

    context: str = "context"
    question: str | None = None
    choices: tuple[str, ...] = ("choices",)
    label: str = "label"
    first: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.choices:
            raise ConfigError(
                "choices is empty; name the columns of the choices, or the one that holds a list "
                "of them"
            )
        columns_of(self._texts)
        if len(self.choices) == 1 and "{" in self.choices[0]:
            raise ConfigError(
                f"choices is {self.choices[0]!r} alone; name two or more, or the column with a "
                "list of them"
            )

    @property
    def _texts(self) -> tuple[str, ...]:
        return (self.context, *self.choices, *(() if self.question is None else (self.question,)))

    @property
    def columns(self) -> tuple[str, ...]:
        """What each row must have."""
        return (*columns_of(self._texts), self.label)

    def build(self) -> MultipleChoice:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or a file cannot be used.
            MissingExtra: what reads them is not installed.
        """
        found = self.find()
        return MultipleChoice(found.files, (), found.first_heldout, found.parts, self)


@dataclass(frozen=True)
class MultipleChoice(TableSource, TaskSource):
    """Reads a row's context, its choices, each with the question before it, and the index of the
    right one.
    """

    kind: ClassVar[TaskKind] = "multiple_choice"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return self.config.columns

    def text_name(self, index: int) -> str:
        if index == 0 or len(self.config.choices) > 1:
            return (self.config.context, *self.config.choices)[index]
        return f"{self.config.choices[0]}[{index - 1}]"

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        choices = self._choices(row)
        label = column(row, self.config.label)
        right = self._index(label)
        if right is None or not 0 <= right < len(choices):
            first, last = self.config.first, self.config.first + len(choices) - 1
            raise BadRecord(
                f"{self.config.label} {brief(label)} is not the number of a choice, {first} to "
                f"{last}, nor its letter"
            )
        question = (
            "" if self.config.question is None else self._write(row, self.config.question).rstrip()
        )
        # A blank choice stays blank, to be refused; a blank question, as in parts of HellaSwag, is
        # none.
        begun = (
            f"{question} {choice}" if question and choice.strip() else choice for choice in choices
        )
        return TaskRow((self._write(row, self.config.context), *begun), float(right))

    def _write(self, row: dict[str, object], template: str) -> str:
        return write(row, template, self.config.words)

    def _choices(self, row: dict[str, object]) -> list[str]:
        if len(self.config.choices) > 1:
            return [self._write(row, name) for name in self.config.choices]
        name = self.config.choices[0]
        choices = items(row, name)
        if len(choices) < 2:
            raise BadRecord(f"fewer than 2 {name}")
        texts = [choice for choice in choices if isinstance(choice, str)]
        if len(texts) < len(choices):
            raise BadRecord(f"{name} holds what is not text")
        return texts

    def _index(self, label: object) -> int | None:
        if isinstance(label, str) and len(label) == 1 and "A" <= label <= "Z":
            return ord(label) - ord("A")
        number = whole(label)
        return None if number is None else number - self.config.first
