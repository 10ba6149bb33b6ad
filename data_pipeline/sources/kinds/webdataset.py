"""Raw text in WebDataset tar files: one member per document, read by the `webdataset` library."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self

from data_pipeline.sources import UTF8, BadRecord, Problem, Record, decode_utf8
from data_pipeline.sources.encodings import named, normalized, recoded
from data_pipeline.sources.files import find, read_records
from data_pipeline.sources.kinds import jsonl

_META = re.compile(r"__[^/]*__($|/)")
"""Members that WebDataset keeps for itself."""
_HIDDEN = re.compile(r"(^|/)\.[^/]*$")
"""Hidden files, as those that macOS adds."""
_READ_BYTES = 2**16


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: tar files, glob patterns or URLs; `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.xz` and
            `.tar.zst` are decompressed.
        member: suffix of the members that are documents, as WebDataset counts it: from the first
            dot of the name, in upper or lower case, so `text.json` for `a/0001.text.JSON`. Other
            members are skipped if they belong to a sample with such a document, and rejected if
            they do not.
        field: key of the text if `member` ends in `json`; dots reach into nested objects.
        encoding: of the text, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    paths: tuple[str, ...]
    member: str = "txt"
    field: str = "text"
    encoding: str = UTF8

    def build(self) -> WebDataset:
        """Finds the files."""
        return WebDataset(
            find(self.paths), self.field, self.member, encoding=normalized(self.encoding)
        )


@dataclass(frozen=True)
class WebDataset(jsonl.JsonLines):
    """Reads the members `*.{member}` of each tar; a record's line is its number in the tar."""

    member: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, self._members)

    def decode(self, data: bytes) -> str:
        return super().decode(data) if self.member.lower().endswith("json") else decode_utf8(data)

    def _members(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        # Imported here: it imports torch, which takes seconds.
        from webdataset import tariterators

        number = 0
        samples = _Samples(self.member)
        try:
            # Not the library's own loop: it reads whole a sparse member, of which some bytes may
            # declare terabytes of zeros. Nor "r|*", which decompresses without a bound.
            with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined] # or it would remember all
                    if member.isdir() or _META.match(member.name):
                        continue
                    key, suffix = tariterators.base_plus_ext(member.name)
                    if not key:  # such as README: without a dot, a file belongs to no sample
                        continue
                    # Members of other suffixes are not even read.
                    if not samples.is_document(member, key, suffix or ""):
                        continue
                    if member.issparse():
                        raise BadRecord("sparse member")
                    stream = tar.extractfile(member)
                    assert stream is not None, "it is a regular file"
                    number += 1
                    yield number, self._in_utf8(stream.read())
                _check_end(tar)
        except tarfile.ReadError as error:
            raise EOFError from error  # the tar ends before its end mark
        # Behind the documents, so that each document keeps its number.
        yield from enumerate(samples.without_text(), start=number + 1)

    def _in_utf8(self, content: bytes) -> bytes:
        if self.encoding == UTF8:
            return content
        try:
            return named(recoded(io.BytesIO(content), self.encoding).read(), self.encoding)
        except BadRecord as error:  # the next member may be valid
            return Problem.of(str(error))


class _Samples:
    """Keeps count of the samples of a tar that have no document.

    Args:
        member: suffix of the members that are documents.
    """

    def __init__(self, member: str) -> None:
        self._suffix = member.lower()  # WebDataset ignores case, too
        self._with_text = set[str]()
        self._others: dict[str, list[str]] = {}  # key of a sample without text: names of members

    def is_document(self, member: tarfile.TarInfo, key: str, suffix: str) -> bool:
        """Notes a member of the sample `key`; returns whether it is a document."""
        if suffix.lower() == self._suffix and member.isreg():
            self._with_text.add(key)
            self._others.pop(key, None)
            return True
        if key not in self._with_text and not _HIDDEN.search(member.name):
            name = member.name if member.isreg() else f"{member.name}, which is a link"
            names = self._others.setdefault(key, [])
            if not names or self._looks_like_text(name):
                names.append(name)
        return False

    def without_text(self) -> Iterator[Problem]:
        """Yields a Problem for each document that is missing."""
        for names in self._others.values():
            # "v1.0001.txt" and "v1.0002.txt" have one key, "v1", and are two documents.
            texts = list(filter(self._looks_like_text, names))
            for name in texts or names[:1]:
                reason = f"no member {self._suffix!r} in a sample: {name}"
                if texts:
                    reason += (
                        ". Its suffix begins at the first dot of the name: rename it, or set "
                        "source.member"
                    )
                yield Problem.of(reason)

    def _looks_like_text(self, name: str) -> bool:
        return name.lower().endswith(f".{self._suffix}")


class _Member(tarfile.TarInfo):
    """A member with an intact header; `tarfile` alone takes a damaged one for the end mark."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # the end mark
            raise
        except tarfile.InvalidHeaderError:  # type: ignore[attr-defined]
            raise BadRecord("corrupt file") from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def _check_end(tar: tarfile.TarFile) -> None:
    """Checks that a tar ends with two blocks of zeros, of which one has been read.

    Raises:
        ReadError: the second one is cut off.
        BadRecord: data follow, so the zeros may have been the header of a member.
    """
    rest = tar.fileobj
    assert rest is not None, "it is open"
    block = rest.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("unexpected end of data")
    while block:
        if block.strip(b"\0"):
            raise BadRecord("corrupt file")
        block = rest.read(_READ_BYTES)
