"""What is in the columns of a task's row, and the reasons of rows in which it is not what it must
be.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable
from typing import TypeAlias

from data_pipeline.sources import BadRecord
from data_pipeline.sources.jsonl import load_json
from trainer.errors import ConfigError

Row: TypeAlias = dict[str, object]

_SHORT = 100  # characters of a value, or of a list of names, in a reason


def row_of(data: bytes) -> Row:
    """The row in the bytes of a record.

    Raises:
        BadRecord: there is none.
    """
    value = load_json(data)
    if not isinstance(value, dict):
        raise BadRecord("not a JSON object")
    return value


def column(row: Row, name: str) -> object:
    """What a row has in a column.

    Dots in the name reach into nested objects, and by number, from 0, into lists, unless a column
    has them in its own.

    Raises:
        BadRecord: there is no such column.
    """
    if name in row:
        return row[name]
    value: object = row
    for key in name.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            raise BadRecord(no_column(name, row))
    return value


def no_column(name: str, names: Iterable[str]) -> str:
    """The reason of a row, or of a whole table, that lacks a column."""
    return f"no column {name!r}; there are: {listed(names)}"


def text(row: Row, name: str) -> str:
    """The text in a column.

    Raises:
        BadRecord: there is no such column, or no text in it.
    """
    value = column(row, name)
    if not isinstance(value, str):
        raise BadRecord(f"column {name!r} is not text")
    return value


def nested(row: Row, name: str) -> object:
    """What a row has in a column.

    A list or an object may be there as JSON, since CSV knows nothing but text.

    Raises:
        BadRecord: there is no such column.
    """
    value = column(row, name)
    if isinstance(value, str) and value.startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def items(row: Row, name: str) -> list[object]:
    """The list in a column.

    Raises:
        BadRecord: there is no such column, or no list in it.
    """
    value = nested(row, name)
    if not isinstance(value, list):
        raise BadRecord(f"column {name!r} is not a list")
    return value


def whole(value: object) -> int | None:
    """The whole number that a value is or that its digits say; None if there is none."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float:
    """The number that a value is or that its text says; nan if there is none."""
    try:
        return float(value) if isinstance(value, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def index_of(value: object, labels: tuple[str, ...], name: str) -> int:
    """The index of a label, which a row gives as its text, or as that index.

    Raises:
        BadRecord: it is neither.
    """
    written = label_text(value)
    if written in labels:
        return labels.index(written)
    # Where labels are numbers themselves, a number is one of them, or wrong.
    index = None if any(whole(label) is not None for label in labels) else whole(value)
    if index is None or not 0 <= index < len(labels):
        raise BadRecord(f"{name} {brief(value)} is not one of: {listed(labels)}")
    return index


def label_text(value: object) -> str:
    """A label as text; what is none in a row is spelt as in JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def brief(value: object) -> str:
    """A value in a reason."""
    return cut if len(cut := repr(value)) <= _SHORT else cut[: _SHORT - 3] + "..."


def listed(names: Iterable[str]) -> str:
    """Names in a reason, the first of them where there are many."""
    return cut if len(cut := ", ".join(names)) <= _SHORT else cut[: _SHORT - 3] + "..."


def check_labels(labels: tuple[str, ...], least: int) -> None:
    """Refuses a set of labels that is none, or in which one stands twice.

    Raises:
        ConfigError: naming it.
    """
    if len(labels) < least:
        raise ConfigError(
            f"labels must name at least {least}; it has {len(labels)}: {listed(labels)}"
        )
    if twice := [label for index, label in enumerate(labels) if label in labels[:index]]:
        raise ConfigError(
            f"labels names {twice[0]!r} twice; an index among them must be one label's"
        )
