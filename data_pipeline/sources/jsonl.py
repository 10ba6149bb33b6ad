"""JSON Lines: one JSON object a line, with the document in one of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data_pipeline.sources import BadRecord, Record, Source, decode_utf8
from data_pipeline.sources.files import find, read_records


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz` and `.zst` are decompressed.
        field: the key of the text; dots reach into nested objects.
    """

    paths: tuple[str, ...]
    field: str = "text"

    def build(self) -> JsonLines:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing.
        """
        return JsonLines(find(self.paths), self.field)


@dataclass(frozen=True)
class JsonLines(Source):
    """Reads the field `field` of each line that is not blank."""

    field: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, lines)

    def decode(self, data: bytes) -> str:
        return text_of(load_json(data), self.field)


def lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    return ((number, line) for number, line in enumerate(file, start=1) if not line.isspace())


def load_json(data: bytes) -> object:
    """The value of a line.

    Raises:
        BadRecord: it has none.
    """
    try:
        return json.loads(decode_utf8(data))
    except (ValueError, RecursionError):
        raise BadRecord("invalid JSON") from None


def text_of(value: object, field: str) -> str:
    """The text in a field, in whose name dots reach into nested objects.

    Raises:
        BadRecord: there is no such field, or no text in it.
    """
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise BadRecord(f"no field {field!r}")
        value = value[key]
    if not isinstance(value, str):
        raise BadRecord(f"field {field!r} is not text")
    return value
