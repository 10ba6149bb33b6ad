"""Where raw text comes from: each module reads one kind of source and has a `Config` (`kind` is the
module's name).

A source works in two places. The coordinator of a build calls `records`, which only decompresses
and splits, so that one process keeps many workers busy. The workers call `parse`, which decodes and
checks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from trainer.examples import TaskRow
from trainer.tasks import TaskKind


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
    """A record that holds no usable document.

    The message is a short reason, the same for every record of its sort.
    """


@dataclass(frozen=True)
class Source(ABC):
    """An ordered set of files of documents.

    Attributes:
        files: names, in the order in which they are read.
    """

    files: tuple[str, ...]

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Every record of every file, in order.

        What cannot be read comes as one record with a `problem`.

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
        return _checked(self.decode(record.data), "document")


class SourceConfig(Protocol):
    """The settings of a source: the `Config` of a module in here, or of a user's own."""

    def build(self) -> Source:
        """Finds the files.

        Raises:
            ConfigError: there are none.
        """
        ...


@dataclass(frozen=True)
class PairSource(Source):
    """An ordered set of files of pairs of texts, a source and a target, as for translation.

    Attributes:
        prefix: what each source begins with, as T5's "translate English to German: ".
        first_heldout: index into `files` of the first one whose pairs are the held-out split; None:
            there is none, and the split is chosen by hash.
    """

    prefix: str
    first_heldout: int | None
    target_file: ClassVar[int] = 0
    """How many places in `files` the file of the targets stands behind that of their sources."""

    @abstractmethod
    def decode_pair(self, data: bytes) -> tuple[str, str]:
        """The source, without the prefix, and the target in the bytes of a record.

        Raises:
            BadRecord: they are not both there.
        """

    def decode(self, data: bytes) -> str:
        """Both texts as one document, as tokenizers are trained on them."""
        return "\n".join(self._checked_pair(data))

    def parse_pair(self, record: Record) -> tuple[str, str]:
        """The source, with the prefix, and the target in a record: neither blank.

        Raises:
            BadRecord: they are not both there.
        """
        if record.problem is not None:
            raise BadRecord(record.problem)
        return self._checked_pair(record.data)

    def _checked_pair(self, data: bytes) -> tuple[str, str]:
        source, target = self.decode_pair(data)
        return self.prefix + _checked(source, "source"), _checked(target, "target")


@dataclass(frozen=True)
class TaskSource(Source):
    """An ordered set of files of rows of a fine-tuning task.

    The bytes of a record are one row, a JSON object.

    Attributes:
        kind: of the task.
        labels: the names of the classes or tags, or of the number; none where choices or spans are
            predicted.
        first_heldout: index into `files` of the first one whose rows are the held-out split; None:
            there is none, and the split is chosen by hash.
    """

    kind: ClassVar[TaskKind]
    labels: tuple[str, ...]
    first_heldout: int | None

    @abstractmethod
    def decode_row(self, data: bytes) -> TaskRow:
        """The row in the bytes of a record.

        Raises:
            BadRecord: there is none, or not all of it.
        """

    def text_name(self, index: int) -> str:
        """What a row's text `index` is called in reasons, such as its column."""
        return f"text {index + 1}"

    def decode(self, data: bytes) -> str:
        """All texts of a row as one document, as tokenizers are trained on them."""
        return "\n".join(self._checked_row(data).texts)

    def parse_row(self, record: Record) -> TaskRow:
        """The row in a record: none of its texts blank.

        Raises:
            BadRecord: there is none, or not all of it.
        """
        if record.problem is not None:
            raise BadRecord(record.problem)
        return self._checked_row(record.data)

    def _checked_row(self, data: bytes) -> TaskRow:
        row = self.decode_row(data)
        for index, text in enumerate(row.texts):
            _checked(text, self.text_name(index))
        return row


def _checked(text: str, name: str) -> str:
    if not text or text.isspace():
        raise BadRecord(f"empty {name}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise BadRecord(
            "invalid Unicode" if name == "document" else f"invalid Unicode in {name}"
        ) from None
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
