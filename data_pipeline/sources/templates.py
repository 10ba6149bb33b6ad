"""Texts that are made of a row's columns.

A column by its name, or a template as "{question} passage: {passage}".

A template is not Python's: it looks columns up and knows three formats, and nothing in it is run.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from data_pipeline.sources import BadRecord
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
from data_pipeline.sources.table import TableConfig
from trainer.errors import ConfigError

Words = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class TemplateConfig(TableConfig):
    """Where the rows are, and how texts are made of their columns.

    Attributes:
        words: what is written for the values of a column, as {question: {cause: "Why?", effect:
            "And then?"}}; of the column of classes, the label that they mean.
    """

    words: dict[str, dict[str, str]] = field(default_factory=dict)


class _Piece(NamedTuple):
    """Literal text of a template, and the column that follows it, if any, with its format."""

    literal: str
    column: str | None
    format: str


class _Format(NamedTuple):
    """What a format does, one of.

    Mark a word, put a column in the place of something, round a number.
    """

    marked: str | None = None
    replaced: tuple[str, str] | None = None
    step: float | None = None


@functools.lru_cache(maxsize=256)
def _pieces(template: str) -> tuple[_Piece, ...]:
    """The parts of a template.

    Raises:
        ConfigError: it is none.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{template!r} is not a template: {error}; write {{column}}, and {{{{ for a brace"
        ) from None
    for _, name, _, conversion in parsed:
        if name is not None and (conversion or not name or "[" in name):
            raise ConfigError(
                f"{template!r} is not a template: write the name of a column in braces, as "
                "{question}"
            )
    pieces = tuple(_Piece(literal, name, form or "") for literal, name, form, _ in parsed)
    for piece in pieces:
        _format(piece.format)
    return pieces


@functools.lru_cache(maxsize=256)
def _format(form: str) -> _Format:
    if not form:
        return _Format()
    if len(form) > 1 and form.startswith("*"):
        return _Format(marked=form[1:])
    replaced, equals, name = form.partition("=")
    if equals and replaced and name:
        return _Format(replaced=(replaced, name))
    if re.fullmatch(r"\d+(\.\d+)?", form) and float(form) > 0:
        return _Format(step=float(form))
    raise ConfigError(
        f"{form!r} is not a format of a template; there are {{text:*index}}, "
        "{query:@placeholder=entity} and "
        "{score:0.2}"
    )


def _is_template(name: str) -> bool:
    return "{" in name or "}" in name


def columns_of(templates: Iterable[str]) -> tuple[str, ...]:
    """The columns that texts are made of, each once.

    Raises:
        ConfigError: one is no template.
    """
    found = []
    for template in templates:
        if not _is_template(template):
            found.append(template)
            continue
        for piece in _pieces(template):
            if piece.column is not None:
                form = _format(piece.format)
                found += [
                    piece.column,
                    *filter(None, (form.marked, form.replaced and form.replaced[1])),
                ]
    return tuple(dict.fromkeys(found))


def write(row: Row, template: str, words: Words) -> str:
    """The text that a template, or a column of text by its name, makes of a row.

    Raises:
        BadRecord: the row lacks a column, or has in it what cannot be written.
    """
    if not _is_template(template):
        return _word(row, template, words) if template in words else text(row, template)
    pieces = _pieces(template)
    return "".join(
        p.literal + ("" if p.column is None else _value(row, p.column, p.format, words))
        for p in pieces
    )


def value_of(row: Row, name: str, words: Words) -> object:
    """What a row has in a column, or the word for it; a list or an object may be there as JSON.

    Raises:
        BadRecord: there is no such column, or no word for what it has.
    """
    return _word(row, name, words) if name in words else nested(row, name)


def _value(row: Row, name: str, form: str, words: Words) -> str:
    """A column as it is written in a template."""
    how = _format(form)
    if how.step is not None:
        return _rounded(column(row, name), how.step, name)
    written = _written(row, name, words)
    if how.marked is not None:
        return _marked(written, whole(column(row, how.marked)), how.marked)
    if how.replaced is not None:
        old, new = how.replaced
        if old not in written:
            raise BadRecord(f"column {name!r} has no {old!r}")
        return written.replace(old, _written(row, new, words))
    return written


def _written(row: Row, name: str, words: Words) -> str:
    if name in words:
        return _word(row, name, words)
    value = column(row, name)
    if isinstance(value, list):
        return ", ".join(map(label_text, value))
    if value is None or isinstance(value, dict):
        raise BadRecord(f"column {name!r} holds what is no text")
    if not (written := label_text(value)).strip():
        raise BadRecord(f"column {name!r} is empty")
    return written


def _word(row: Row, name: str, words: Words) -> str:
    value = label_text(column(row, name))
    if value not in words[name]:
        raise BadRecord(f"{name} {brief(value)} is not one of: {listed(words[name])}")
    return words[name][value]


def _marked(written: str, index: int | None, name: str) -> str:
    """A text with its word of the number, from 0, between asterisks."""
    places = [match.span() for match in re.finditer(r"\S+", written)]
    if index is None or not 0 <= index < len(places):
        raise BadRecord(f"{name} is not the number of a word, 0 to {len(places) - 1}")
    begin, end = places[index]
    return f"{written[:begin]}*{written[begin:end]}*{written[end:]}"


def _rounded(value: object, step: float, name: str) -> str:
    """The multiple of a step that is nearest to a number, with as many decimals as the step has."""
    try:
        multiple = round(number(value) / step) * step
    except (ValueError, OverflowError):  # of what is not finite
        raise BadRecord(f"{name} {brief(value)} is not a finite number") from None
    return f"{multiple:.{len(str(step).rstrip('0').partition('.')[2])}f}"
