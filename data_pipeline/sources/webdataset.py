"""Raw text in WebDataset tars: one member a document, read by the `webdataset` library."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data_pipeline.sources import Record, jsonl
from data_pipeline.sources.files import find, read_records


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: tar files, glob patterns or URLs; `.tar.gz` and `.tar.zst` are decompressed.
        member: the suffix of the members that are documents, as WebDataset counts it: of
            `a/0001.text.json` it is `text.json`. All other members are passed over.
        field: the key of the text where members end in `json`; dots reach into nested objects.
    """

    paths: tuple[str, ...]
    member: str = "txt"
    field: str = "text"

    def build(self) -> WebDataset:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing.
        """
        return WebDataset(find(self.paths), self.field, self.member)


@dataclass(frozen=True)
class WebDataset(jsonl.JsonLines):
    """Reads the members `*.{member}` of each tar.

    A record's line is the document's number in the file.
    """

    member: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, self._members)

    def decode(self, data: bytes) -> str:
        return (
            super().decode(data)
            if self.member.endswith("json")
            else super(jsonl.JsonLines, self).decode(data)
        )

    def _members(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        from webdataset import (
            tariterators,
        )  # imports torch, which only builds from such a source are to pay for

        def wanted(name: str) -> bool:
            return bool(tariterators.base_plus_ext(name)[1] == self.member)

        try:
            members = tariterators.tar_file_iterator(file, select_files=wanted)
            yield from ((number, member["data"]) for number, member in enumerate(members, start=1))
        except tarfile.ReadError as error:
            raise EOFError from error  # the tar ends before its end mark
