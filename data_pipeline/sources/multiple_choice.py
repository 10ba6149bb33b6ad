"""Tables of a text and several ways to go on with it, or answers to a question about it, as SWAG and RACE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_pipeline.sources import BadRecord
from data_pipeline.sources.columns import brief, column, items, row_of, text, whole
from data_pipeline.sources.table import TableConfig, TableSource
from trainer.errors import ConfigError
from trainer.examples import TaskRow


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        context: the column of the text that all choices share; dots reach into nested objects.
        question: a column whose text each choice begins with, such as SWAG's "sent2"; a blank stands between them.
        choices: the columns of the choices, or the one that holds a list of them.
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
            raise ConfigError("choices is empty; name the columns of the choices, or the one that holds a list of them")

    def build(self) -> MultipleChoice:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or a file cannot be used.
            MissingExtra: what reads them is not installed.
        """
        found = self.find()
        return MultipleChoice(found.files, "choice", (), found.first_heldout, found.parts, self)


@dataclass(frozen=True)
class MultipleChoice(TableSource):
    """Reads a row's context, its choices, each with the question before it, and the index of the right one."""

    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        question = () if self.config.question is None else (self.config.question,)
        return (self.config.context, *self.config.choices, *question, self.config.label)

    def text_name(self, index: int) -> str:
        if index == 0 or len(self.config.choices) > 1:
            return super().text_name(index)
        return f"{self.config.choices[0]}[{index - 1}]"

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        choices = self._choices(row)
        label = column(row, self.config.label)
        right = self._index(label)
        if right is None or not 0 <= right < len(choices):
            first, last = self.config.first, self.config.first + len(choices) - 1
            raise BadRecord(
                f"{self.config.label} {brief(label)} is not the number of a choice, {first} to {last}, nor its letter"
            )
        question = "" if self.config.question is None else text(row, self.config.question).rstrip()
        # A blank choice stays blank, to be refused; a blank question, as in parts of HellaSwag, is none.
        begun = (f"{question} {choice}" if question and choice.strip() else choice for choice in choices)
        return TaskRow((text(row, self.config.context), *begun), float(right))

    def _choices(self, row: dict[str, Any]) -> list[str]:
        if len(self.config.choices) > 1:
            return [text(row, name) for name in self.config.choices]
        name = self.config.choices[0]
        choices = items(row, name)
        if len(choices) < 2:
            raise BadRecord(f"fewer than 2 {name}")
        if not all(isinstance(choice, str) for choice in choices):
            raise BadRecord(f"{name} holds what is not text")
        return choices

    def _index(self, label: Any) -> int | None:
        if isinstance(label, str) and len(label) == 1 and "A" <= label <= "Z":
            return ord(label) - ord("A")
        number = whole(label)
        return None if number is None else number - self.config.first
