"""JSON Lines or a JSON array: one object per document, with its text in one of the fields."""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data_pipeline.sources import UTF8, BadRecord, Problem, Record, Source, decode_utf8
from data_pipeline.sources.encodings import normalized
from data_pipeline.sources.files import find, read_records


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz`, `.bz2`, `.xz` and `.zst` are decompressed.
        field: key of the text; dots reach into nested objects, unless a key has the dots.
        encoding: of the text, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    paths: tuple[str, ...]
    field: str = "text"
    encoding: str = UTF8

    def build(self) -> JsonLines:
        """Finds the files."""
        return JsonLines(find(self.paths), self.field, encoding=normalized(self.encoding))


@dataclass(frozen=True)
class JsonLines(Source):
    """Reads the field `field` of each line that is not blank."""

    field: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, values, self.encoding)

    def decode(self, data: bytes) -> str:
        return text_of(load_json(data), self.field)


def lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers."""
    # Blank lines count, as in an editor.
    return ((number, line) for number, line in enumerate(file, start=1) if not line.isspace())


def values(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Splits JSON Lines into lines, or a JSON array, which is read into memory, into elements."""
    content = file.readline()
    if content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        content += file.read()
        elements = json_or_none(content)
        # Otherwise its first line may be a bad one of JSON Lines.
        if isinstance(elements, list):
            return enumerate(map(encoded, elements), start=1)
    return lines(itertools.chain(io.BytesIO(content), file))


def encoded(value: object, problem: str = "invalid Unicode") -> bytes:
    """Encodes a row as the bytes of a record; a Problem if a text of it cannot be encoded."""
    try:
        # Not as ASCII with escapes, which could spell half a surrogate pair.
        return json.dumps(value, ensure_ascii=False, default=_plain).encode()
    except UnicodeEncodeError:
        return Problem.of(problem)


def _plain(value: object) -> str | None:
    """Replaces a value that JSON cannot represent: bytes by null, a date or decimal by its text."""
    # Images and sounds of a dataset are bytes. No text is made of them, and they are large.
    return None if isinstance(value, bytes) else str(value)


def json_or_none(data: bytes) -> object:
    """Decodes a JSON value; None if it is not valid."""
    try:
        return load_json(data)
    except BadRecord:
        return None


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
    """Returns the text in a field; see `value_at`.

    Raises:
        BadRecord: there is no such field, or it holds something else.
    """
    try:
        text = value_at(value, field)
    except KeyError:
        raise BadRecord(f"no field {field!r}") from None
    if not isinstance(text, str):
        raise BadRecord(f"field {field!r} is not text")
    return text


def value_at(value: object, name: str) -> object:
    """Returns the value that a name means in an object.

    A key may have dots itself. At others, a name reaches into nested objects, and by number, from
    0, into lists: "a.b.0" is the 1 of {"a": {"b": [1]}} and of {"a.b": [1]}.

    Raises:
        KeyError: there is none.
        BadRecord: there are several.
    """
    if "." not in name and isinstance(value, dict):  # as most names, in each row
        return value[name]
    meanings = list(_meanings(value, name))
    if not meanings:
        raise KeyError(name)
    if len(meanings) > 1:
        raise BadRecord(ambiguous(name))
    return meanings[0]


def ambiguous(name: str) -> str:
    """The reason for rejecting a row, or a whole table, in which a name means two things."""
    return f"{name!r} is both a name with dots and a path to a nested value. Rename one"


def splits(name: str) -> Iterator[tuple[str, str | None]]:
    """Yields the key that a name may begin with, and the rest: "a.b" is "a.b", or "a" and "b"."""
    yield name, None
    for dot in re.finditer(r"\.", name):
        yield name[: dot.start()], name[dot.end() :]


def _meanings(value: object, name: str | None) -> Iterator[object]:
    if name is None:
        yield value
    elif isinstance(value, dict):
        for key, rest in splits(name):
            if key in value:
                yield from _meanings(value[key], rest)
    elif isinstance(value, list):
        index, dot, rest = name.partition(".")
        if index.isdecimal() and int(index) < len(value):
            yield from _meanings(value[int(index)], rest if dot else None)
