"""Values in the columns of a task's row, and the reasons for rejecting a row with a wrong value."""

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
    """Decodes the row of a record.

    Raises:
        BadRecord: it is not a JSON object.
    """
    value = load_json(data)
    if not isinstance(value, dict):
        raise BadRecord("not a JSON object")
    return value


def column(row: Row, name: str) -> object:
    """Returns the value of a column.

    Dots in the name reach into nested objects, and by number, from 0, into lists, unless a column's
    own name has the dots: "answers.text.0" is row["answers"]["text"][0].

    Raises:
        BadRecord: there is no such column.
    """
    # CSV can have a column that is named "a.b".
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
    """The reason for rejecting a row, or a whole table, that lacks a column."""
    return f"no column {name!r}: there are {listed(names)}"


def text(row: Row, name: str) -> str:
    """Returns the text in a column.

    Raises:
        BadRecord: there is no such column, or it holds something else.
    """
    value = column(row, name)
    if not isinstance(value, str):
        raise BadRecord(f"column {name!r} is not text")
    return value


def nested(row: Row, name: str) -> object:
    """Returns the value of a column; a list or an object may be given as JSON.

    Raises:
        BadRecord: there is no such column.
    """
    value = column(row, name)
    # CSV has no other way to hold a list. A text that only looks like JSON stays a text.
    if isinstance(value, str) and value.startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def items(row: Row, name: str) -> list[object]:
    """Returns the list in a column.

    Raises:
        BadRecord: there is no such column, or it holds something else.
    """
    value = nested(row, name)
    if not isinstance(value, list):
        raise BadRecord(f"column {name!r} is not a list")
    return value


def whole(value: object) -> int | None:
    """Converts a number without fraction, or its digits, to an integer; None for anything else."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None
    # pandas writes a column of whole numbers with a missing value as 0.0, 1.0, ...
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    # To Python, true is the integer 1.
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float:
    """Converts a number or its text to a float; NaN for anything else."""
    try:
        # float() reads "nan" and "inf", too: callers check that the number is finite.
        return float(value) if isinstance(value, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def index_of(
    value: object,
    labels: tuple[str, ...],
    name: str,
) -> int:
    """Returns the index of a label, which a row gives as its text or as that index.

    Raises:
        BadRecord: it is neither.
    """
    # With the labels ("no", "yes"), "yes", 1 and "1" all have the index 1.
    given = label_text(value)
    if given in labels:
        return labels.index(given)
    # If a label is a number itself, as "1" of ("0", "1"), a number that is no label is wrong: it
    # must not be taken for an index.
    index = None if any(whole(label) is not None for label in labels) else whole(value)
    if index is None or not 0 <= index < len(labels):
        raise BadRecord(f"{name} is not one of {listed(labels)}: {brief(value)}")
    return index


def label_text(value: object) -> str:
    """Returns a label as text; a label that is no text in a row is spelled as in JSON."""
    # true is "true", as the file has it; str(True) would be "True".
    return value if isinstance(value, str) else json.dumps(value)


def brief(value: object) -> str:
    """Shortens a value for a reason."""
    return _short(repr(value))


def listed(names: Iterable[str]) -> str:
    """Joins names for a reason; only the first of many."""
    return _short(", ".join(names))


def _short(text: str) -> str:
    # Names of JSON may hold half of a surrogate pair, which no message can be encoded with.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."


def repeated(names: Iterable[str]) -> str | None:
    """Returns the first name that occurs a second time; None if all differ."""
    # ["a", "b", "a", "b"] gives "a".
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def check_labels(labels: tuple[str, ...]) -> None:
    """Checks that there are two labels or more, all different.

    Raises:
        ConfigError: the message names the fault.
    """
    if len(labels) < 2:
        raise ConfigError(
            f"labels must name at least 2; it has {len(labels)}: {listed(labels)}. Add the others."
        )
    if twice := repeated(labels):
        raise ConfigError(f"labels names {twice!r} twice. Leave one of them out.")
