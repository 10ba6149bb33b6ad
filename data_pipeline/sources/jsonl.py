"""JSON Lines: one JSON object per line, with the document in one of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_pipeline.sources import BadRecord, Record, Source, decode_utf8
from data_pipeline.sources.files import find, read_records


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz` and `.zst` are decompressed.
        field: key of the text; dots reach into nested objects.
    """

    paths: tuple[str, ...]
    field: str = "text"

    def build(self) -> JsonLines:
        """Finds the files."""
        return JsonLines(find(self.paths), self.field)


@dataclass(frozen=True)
class JsonLines(Source):
    """Reads the field `field` of each line that is not blank."""

    field: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, lines)

    def decode(self, data: bytes) -> str:
        return text_of(load_json(data), self.field)


def lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers."""
    # Blank lines count, as in an editor.
    return ((number, line) for number, line in enumerate(file, start=1) if not line.isspace())


def load_json(data: bytes) -> object:
    """Decodes the JSON value of a line.

    Raises:
        BadRecord: it is not valid.
    """
    try:
        return json.loads(decode_utf8(data))
    except (ValueError, RecursionError):  # deeply nested brackets exceed the recursion limit
        raise BadRecord("invalid JSON") from None


def text_of(value: object, field: str) -> str:
    """Returns the text in a field, in whose name dots reach into nested objects.

    Raises:
        BadRecord: there is no such field, or it holds something else.
    """
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise BadRecord(f"no field {field!r}")
        value = value[key]
    if not isinstance(value, str):
        raise BadRecord(f"field {field!r} is not text")
    return value
