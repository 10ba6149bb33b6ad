"""Where raw text comes from: each module reads one kind of source and has a `Config` (`kind` is the module's name).

A source works in two places. The coordinator of a build calls `records`, which only decompresses and splits, so that
one process keeps many workers busy. The workers call `parse`, which decodes and checks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Record(NamedTuple):
    """One document as it lies in a file, not yet decoded.

    Attributes:
        file: index into `Source.files`.
        line: where it begins, counted from 1.
        data: its bytes.
        read: share of the source that has been read with it, in [0, 1]; for progress reports only.
        problem: why it cannot be read at all (then `data` is empty), or None.
    """

    file: int
    line: int
    data: bytes
    read: float
    problem: str | None = None


class BadRecord(Exception):
    """A record that holds no usable document; the message is a short reason, the same for every record of its sort."""


@dataclass(frozen=True)
class Source(ABC):
    """An ordered set of files of documents.

    Attributes:
        files: names, in the order in which they are read.
    """

    files: tuple[str, ...]

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Every record of every file, in order; what cannot be read comes as one record with a `problem`.

        Raises:
            DataError: a file is missing or unreadable.
        """

    def decode(self, data: bytes) -> str:
        """The text in the bytes of a record.

        Raises:
            BadRecord: there is none.
        """
        return decode_utf8(data)

    def parse(self, record: Record) -> str:
        """The document in a record: text that is not blank and can be encoded again.

        Raises:
            BadRecord: there is none.
        """
        if record.problem is not None:
            raise BadRecord(record.problem)
        text = self.decode(record.data)
        if not text or text.isspace():
            raise BadRecord("empty document")
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
            raise BadRecord("invalid Unicode") from None
        return text


def decode_utf8(data: bytes) -> str:
    """Decodes UTF-8, strictly; a byte-order mark at the start is dropped.

    Raises:
        BadRecord: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRecord("invalid UTF-8") from None
