"""Plain text: each file is one document, or blank lines separate documents."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO, Literal

from data_pipeline.sources import UTF8, Record, Source
from data_pipeline.sources.encodings import normalized
from data_pipeline.sources.files import find, read_records, suffix
from samestep.storage import shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz`, `.bz2`, `.xz` and `.zst` are decompressed.
        document: one document is a whole "file", or a "paragraph", which ends at a blank line.
        encoding: of the text, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    paths: tuple[str, ...]
    document: Literal["file", "paragraph"] = "file"
    encoding: str = UTF8

    def build(self) -> Text:
        """Finds the files; warns of tables, of which it would make a document each."""
        files = find(self.paths)
        if tables := [shown(file) for file in files if suffix(file) in (".csv", ".tsv")]:
            logger.warning(
                "%s is a table, and source.kind text reads it as plain text. To read a column of "
                "it, set source.kind=table source.field=COLUMN.",
                tables[0],
            )
        return Text(files, self.document, encoding=normalized(self.encoding))


@dataclass(frozen=True)
class Text(Source):
    """Reads whole files or their paragraphs."""

    document: Literal["file", "paragraph"]

    def records(self) -> Iterator[Record]:
        return read_records(
            self.files, _whole if self.document == "file" else _paragraphs, self.encoding
        )


def _whole(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    if data := file.read():
        yield 1, data


def _paragraphs(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    lines: list[bytes] = []
    # A blank line behind the last one ends the last paragraph.
    for number, line in enumerate(chain(file, (b"\n",)), start=1):
        if not line.isspace():
            lines.append(line)
        elif lines:
            # At the first of its lines: lines 3 and 4 end at the blank line 5.
            yield number - len(lines), b"".join(lines)
            lines = []
