"""Rows of a task as lines of JSON in held-out shards; scores compare predictions with them."""

from __future__ import annotations

import dataclasses
import json
import math
import tarfile
from typing import Annotated, Any, BinaryIO

from data_pipeline.format.shards import failure_explained, open_member
from samestep.examples import TaskRow
from samestep.stored_json import Unpaired, parse_json

_NAMES = {field.name for field in dataclasses.fields(TaskRow)}


def dump(row: TaskRow) -> bytes:
    """Returns the row as a line, with a newline."""
    return json.dumps({name: getattr(row, name) for name in sorted(_NAMES)}).encode() + b"\n"


def load(line: bytes) -> TaskRow:
    """Parses and validates a line, which may come from an untrusted address.

    Raises:
        ValueError: the line is not a row.
    """
    tree = parse_json(line, dict[str, Annotated[Any, Unpaired]])
    if not tree.keys() <= _NAMES or "texts" not in tree:
        raise ValueError("a row is not an object with the fields of a row")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()
    }
    row = TaskRow(**fields)
    row = dataclasses.replace(row, spans=_pairs(row.spans, 3), offsets=_pairs(row.offsets, 2))
    sound = {
        "texts": _are(row.texts, str) and len(row.texts) > 0,
        "label": row.label is None or _is_number(row.label),
        "answers": _are(row.answers, str),
        "group": isinstance(row.group, str),
        "probabilities": isinstance(row.probabilities, tuple)
        and all(map(_is_number, row.probabilities)),
    }
    if wrong := [name for name, good in sound.items() if not good]:
        raise ValueError(f"{wrong[0]} of a row has the wrong type")
    end = len(row.texts[-1])
    if not all(
        0 <= span[0] <= span[1] <= end and span[-1] >= 0 for span in (*row.spans, *row.offsets)
    ):
        raise ValueError("a row has spans outside its text")
    return row


def read_rows(file: BinaryIO, name: str, documents: int) -> list[TaskRow]:
    """Reads the rows of an open held-out shard of a task, one for each document.

    Args:
        file: the shard; seekable.
        name: path or address of the shard, for messages.
        documents: number of its documents.

    Raises:
        DataError: the shard is damaged, or has no rows.
    """
    with failure_explained(name):
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            members = [
                open_member(tar, member) for member in tar if member.name.endswith(".rows.jsonl")
            ]
            rows = [load(line) for member in members for line in member]
        if len(rows) != documents:
            raise ValueError(f"it has {len(rows)} rows for {documents} documents")
        return rows


def _pairs(values: Any, size: int) -> Any:
    """Turns lists of `size` integers into tuples."""
    if not isinstance(values, tuple) or not all(
        isinstance(v, list) and len(v) == size and _are(v, int) for v in values
    ):
        raise ValueError("the spans of a row have the wrong type")
    return tuple(map(tuple, values))


def _are(values: object, kind: type) -> bool:
    return isinstance(values, tuple | list) and all(type(value) is kind for value in values)


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))
