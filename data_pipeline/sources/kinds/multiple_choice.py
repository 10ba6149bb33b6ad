"""Tables of a text and several continuations of it, or answers to a question, as SWAG and RACE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from data_pipeline.sources import BadRecord, TaskSource
from data_pipeline.sources.columns import Row, brief, column, items, row_of, whole
from data_pipeline.sources.table import TableSource
from data_pipeline.sources.templates import TemplateConfig, columns_of, write
from samestep.errors import ConfigError
from samestep.examples import TaskRow
from samestep.tasks import TaskKind


@dataclass(frozen=True, kw_only=True)
class Config(TemplateConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        context: the text that all choices share: a column, in whose name dots reach into nested
            objects, or a template, as "{first} {second}".
        question: a text that each choice begins with, such as SWAG's "sent2"; a space separates
            them.
        choices: the texts of the choices, or the column with a list of them.
        label: column of the right choice: its number, or a letter from "A" on.
        first: number of the first choice.
    """

    context: str = "context"
    question: str | None = None
    choices: tuple[str, ...] = ("choices",)
    label: str = "label"
    first: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.choices or (len(self.choices) == 1 and "{" in self.choices[0]):
            raise ConfigError(
                f"choices is {list(self.choices)}. Name the columns or templates of two choices or "
                "more, or the column with a list of them."
            )
        columns_of(self.texts)

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns and templates of all texts."""
        return (self.context, *self.choices, self.question or "")

    def build(self) -> MultipleChoice:
        """Finds the files."""
        return MultipleChoice(**self.find(), labels=(), config=self)


@dataclass(frozen=True)
class MultipleChoice(TableSource, TaskSource):
    """Reads the context of a row, its choices, each after the question, and the right one's index.

    The texts of a row are the context and then the choices.
    """

    kind: ClassVar[TaskKind] = "multiple_choice"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return (*columns_of(self.config.texts), self.config.label)

    def text_name(self, index: int) -> str:
        # With a list in one column, as "options", the third text of a row is options[1].
        if index == 0 or len(self.config.choices) > 1:
            return self.config.texts[index]
        return f"{self.config.choices[0]}[{index - 1}]"

    def decode_row(self, data: bytes) -> TaskRow:
        config, row = self.config, row_of(data)
        choices = self._choices(row)
        right = self._index(column(row, config.label), len(choices))
        question = "" if config.question is None else self._write(row, config.question).rstrip()
        # A blank question, as in parts of HellaSwag, is left out. A blank choice stays blank, so
        # that the row is rejected.
        begun = (
            f"{question} {choice}" if question and choice.strip() else choice for choice in choices
        )
        return TaskRow((self._write(row, config.context), *begun), float(right))

    def _write(self, row: Row, template: str) -> str:
        return write(row, template, self.config.words)

    def _choices(self, row: Row) -> list[str]:
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

    def _index(self, label: object, count: int) -> int:
        """Converts the label of a row to the index of the right choice."""
        # Letters do not depend on `first`: "B" is the second choice, also if numbers begin at 1.
        first, number = self.config.first, whole(label)
        if isinstance(label, str) and len(label) == 1 and "A" <= label <= "Z":
            number = first + ord(label) - ord("A")
        if number is None or not first <= number < first + count:
            raise BadRecord(
                f"{self.config.label} is not the number of a choice, {first} to "
                f"{first + count - 1}, nor its letter: {brief(label)}"
            )
        return number - first
