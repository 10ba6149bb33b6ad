"""Values in the columns of a task's row, and the reasons for rejecting a row with a wrong value."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from data_pipeline.sources import BadRecord
from data_pipeline.sources.kinds.jsonl import load_json, splits, value_at
from samestep.errors import ConfigError

Row: TypeAlias = dict[str, object]

_PYTHON_LIST = re.compile(r"""\[\s*['"].*['"]\s*\]""", re.DOTALL)
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
    """Returns the value of a column; see `value_at`: "answers.text.0" may be nested.

    Raises:
        BadRecord: there is no such column.
    """
    try:
        return value_at(row, name)
    except KeyError:
        raise BadRecord(no_column(name, row)) from None


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Finds the columns that hold numbers of classes, or lists of such numbers, by `ClassLabel`.

    Args:
        features: of a dataset of Hugging Face, as `Features.to_dict()` and its Parquet files have
            them.

    Returns:
        The names of the classes by column, in the order of their numbers.
    """
    names = {}
    for column, feature in features.items():
        of_items = feature.get("feature", feature) if isinstance(feature, dict) else None
        if isinstance(of_items, dict) and of_items.get("_type") == "ClassLabel":
            names[column] = list(of_items.get("names") or ())
    return names


def with_class_names(value: object, names: Sequence[str]) -> object:
    """Replaces numbers of classes by their names; other values, such as -1, stay."""
    if isinstance(value, list):
        return [with_class_names(item, names) for item in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def outer_columns(name: str, names: Sequence[str]) -> list[str]:
    """Chooses the columns of a table to read for a name: "a.b" may be one, or be inside of "a"."""
    keys = {key for key, _ in splits(name)}
    return [column for column in names if column in keys]


def no_column(name: str, names: Iterable[str]) -> str:
    """The reason for rejecting a row, or a whole table, that lacks a column."""
    names = list(names)
    # "text;label", as spreadsheets of many countries write it, is one column.
    glued = len(names) == 1 and any(mark in names[0] for mark in ",;\t|")
    hint = ", in one column: cells of .csv end at commas, of .tsv at tabs" if glued else ""
    return f"no column {name!r}: there are {listed(names)}{hint}"


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


def check_no_python_list(value: object, name: str) -> None:
    """Rejects a list in Python's notation, such as "['a', 'b']", where it would pass for one text.

    pandas writes lists so into CSV.

    Args:
        value: as `nested` returns it.

    Raises:
        BadRecord: it is one.
    """
    if isinstance(value, str) and _PYTHON_LIST.fullmatch(value) and _is_list(value):
        raise BadRecord(
            f"column {name!r} has a list in Python's notation, not in JSON: {brief(value)}"
        )


def _is_list(text: str) -> bool:
    """Whether it is a list in Python's notation: not "['a'] or ['b']"."""
    try:
        return isinstance(ast.literal_eval(text), list)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def items(row: Row, name: str) -> list[object]:
    """Returns the list in a column.

    Raises:
        BadRecord: there is no such column, or it holds something else.
    """
    value = nested(row, name)
    check_no_python_list(value, name)
    if not isinstance(value, list):
        raise BadRecord(f"column {name!r} is not a list")
    return value


def whole(value: object) -> int | None:
    """Converts a number without fraction, or its digits, to an integer; None for anything else."""
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,9})(\.0+)?", value)
        return int(match[1]) if match else None
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
    # must not be taken for an index. 1.0 and "1.0" are that label.
    numbers = [whole(label) for label in labels]
    index = whole(value)
    if index is not None and any(number is not None for number in numbers):
        index = numbers.index(index) if numbers.count(index) == 1 else None
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
