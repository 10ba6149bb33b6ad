"""Texts made from the columns of a row: a column by its name, or a template as "{a} and {b}".

Templates are not Python's format strings: they look up columns and know three formats, and nothing
in them is executed. {text:*index} marks the word that the number in column `index` counts,
{query:@x=entity} replaces @x by column `entity`, and {score:0.2} rounds to multiples of 0.2.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from data_pipeline.sources import BadRecord, TaskSource
from data_pipeline.sources.columns import (
    Row,
    brief,
    column,
    label_text,
    listed,
    nested,
    number,
    text,
    whole,
)
from data_pipeline.sources.table import TableConfig, TableSource
from samestep.errors import ConfigError

Words: TypeAlias = Mapping[str, Mapping[str, str]]

_Part: TypeAlias = tuple[str, str | None, re.Match[str] | None]
# "", "*index", "@x=entity" or "0.2". The step must have a digit that is not 0.
_FORMAT = re.compile(
    r"(?P<plain>)|\*(?P<index>.+)|(?P<old>[^=]+)=(?P<new>.+)|(?P<step>(?=.*[1-9])\d+(\.\d+)?)",
    re.DOTALL,
)


@dataclass(frozen=True)
class TemplateConfig(TableConfig):
    """Where the rows are, and how texts are made of their columns.

    Attributes:
        words: text for each value of a column, as {question: {cause: "Why?", effect: "And then?"}};
            for the column of classes, the label that each value means.
    """

    words: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TextsConfig(TemplateConfig):
    """Where the rows are, and the texts of each.

    Attributes:
        texts: the texts, in their order in the sequence: columns, in whose names dots reach into
            nested objects, or templates, as "{passage} {question}".
    """

    texts: tuple[str, ...] = ("text",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.texts:
            raise ConfigError("texts is empty. Name the columns of the texts.")
        columns_of(self.texts)


@dataclass(frozen=True)
class TextsSource(TableSource, TaskSource):
    """Reads the texts of each row."""

    config: TextsConfig

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of(self.config.texts)

    def text_name(self, index: int) -> str:
        return self.config.texts[index]

    def texts(self, row: Row) -> tuple[str, ...]:
        """Makes the texts of a row.

        Raises:
            BadRecord: a column is missing, or its value is no text.
        """
        return tuple(write(row, template, self.config.words) for template in self.config.texts)


# A build parses each template once, not once per row.
@functools.lru_cache(maxsize=256)
def _parsed(template: str) -> tuple[_Part, ...]:
    """Parses a template into literal texts, each with the column that follows it and its format.

    Column and format are None behind the last literal text. "{a}: {b:0.2}." becomes ("", "a", plain
    format), (": ", "b", step 0.2), (".", None, None).

    Raises:
        ConfigError: it is no template.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{template!r} is not a template: {error}. Write {{column}}, and {{{{ for a brace."
        ) from None
    parts = list[_Part]()
    for literal, name, form, conversion in parsed:
        if name is None:
            parts.append((literal, None, None))
            continue
        # Python's own look-ups, as {a!r} and {a[0]}, are no part of templates.
        if conversion or not name or "[" in name:
            raise ConfigError(
                f"{template!r} is not a template. Write the name of a column in braces, as "
                "{question}."
            )
        match = _FORMAT.fullmatch(form or "")
        if match is None:
            raise ConfigError(
                f"{form!r} is not a format of a template. Use one of {{text:*index}}, "
                "{query:@placeholder=entity} and {score:0.2}."
            )
        parts.append((literal, name, match))
    return tuple(parts)


def _is_template(name: str) -> bool:
    return "{" in name or "}" in name


def columns_of(templates: Iterable[str]) -> tuple[str, ...]:
    """Returns the columns that texts are made of, each once.

    Raises:
        ConfigError: a template is invalid.
    """
    found: list[str | None] = []
    for template in templates:
        if not _is_template(template):
            found.append(template)
            continue
        for _, name, form in _parsed(template):
            found += [name, *(form.group("index", "new") if form else ())]
    return tuple(dict.fromkeys(filter(None, found)))


def write(
    row: Row,
    template: str,
    words: Words,
) -> str:
    """Makes a text from a row, by a template or the name of a column of text.

    Raises:
        BadRecord: the row lacks a column, or its value is no text.
    """
    # A column by its name must be text, while a template also writes numbers and lists.
    if not _is_template(template):
        return _word(row, template, words) if template in words else text(row, template)
    parts = []
    for literal, name, form in _parsed(template):
        parts.append(literal)
        if name is not None and form is not None:
            parts.append(_formatted(row, name, form, words))
    return "".join(parts)


def value_of(
    row: Row,
    name: str,
    words: Words,
) -> object:
    """Returns the value of a column, or the word for it; a list or an object may be JSON.

    Raises:
        BadRecord: there is no such column, or no word for its value.
    """
    return _word(row, name, words) if name in words else nested(row, name)


def _formatted(
    row: Row,
    name: str,
    form: re.Match[str],
    words: Words,
) -> str:
    # At most one of the three formats is set: {text:*index}, {query:old=new} or {score:step}.
    index, old, new, step = form.group("index", "old", "new", "step")
    if step:
        return _rounded(column(row, name), float(step), name)
    plain = _plain(row, name, words)
    if index:
        return _marked(plain, whole(column(row, index)), index)
    if old and old not in plain:
        raise BadRecord(f"column {name!r} has no {old!r}")
    return plain.replace(old, _plain(row, new, words)) if old else plain


def _plain(
    row: Row,
    name: str,
    words: Words,
) -> str:
    """Returns the value of a column as text."""
    if name in words:
        return _word(row, name, words)
    value = column(row, name)
    # Of an empty value, a template would make a text that looks complete: "Question: ".
    if isinstance(value, list):
        return ", ".join(map(label_text, value))
    if value is None or isinstance(value, dict):
        raise BadRecord(f"column {name!r} holds what is no text")
    if not (plain := label_text(value)).strip():
        raise BadRecord(f"column {name!r} is empty")
    return plain


def _word(
    row: Row,
    name: str,
    words: Words,
) -> str:
    value = label_text(column(row, name))
    if value not in words[name]:
        raise BadRecord(f"{name} is not one of {listed(words[name])}: {brief(value)}")
    return words[name][value]


def _marked(
    plain: str,
    index: int | None,
    name: str,
) -> str:
    """Puts asterisks around the word of a text with this number, counted from 0."""
    places = [match.span() for match in re.finditer(r"\S+", plain)]
    if index is None or not 0 <= index < len(places):
        raise BadRecord(f"{name} is not the number of a word: there are {len(places)} words")
    begin, end = places[index]
    return f"{plain[:begin]}*{plain[begin:end]}*{plain[end:]}"


def _rounded(
    value: object,
    step: float,
    name: str,
) -> str:
    """Rounds a number to a multiple of `step`, with as many decimals as the step has.

    2.5 in steps of 0.2 is "2.4", as Python rounds halves to even: 12.5 steps are 12.
    """
    try:
        multiple = round(number(value) / step) * step
    except (ValueError, OverflowError):  # NaN or infinite
        raise BadRecord(f"{name} is not a finite number: {brief(value)}") from None
    decimals = len(str(step).rstrip("0").partition(".")[2])
    return f"{multiple:.{decimals}f}"
