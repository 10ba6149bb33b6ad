"""Sources of raw text. Each module reads one kind, which a dataset names as `source.kind`.

A source works in two processes. The coordinator of a build calls `records`, which only decompresses
and splits, so one process keeps many workers busy. The workers call `parse`, which decodes and
validates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ClassVar, NamedTuple, Protocol

from samestep.errors import MissingExtra
from samestep.examples import TaskRow
from samestep.tasks import TaskKind

UTF8 = "utf-8"
INVALID = "invalid UTF-8"  # the reason for rejecting a record of another encoding


class BadRecord(Exception):
    """A record without a usable document.

    The message is a short reason, the same for all records with the same fault. Only what follows
    the first ": " differs, as the value at fault. See `fault`.
    """


def fault(reason: str) -> str:
    """The part of a record's reason by which the manifest counts records, without its values.

    For example, "label is not one of no, yes: 'maybe'" counts as "label is not one of no, yes".
    """
    return reason.partition(": ")[0]


class Problem(bytes):
    """The reason why a record cannot be read, in place of the record's bytes."""

    @classmethod
    def of(cls, reason: str) -> Problem:
        return cls(reason.encode(errors="replace"))


class Record(NamedTuple):
    """One document as stored in a file, not yet decoded.

    Attributes:
        file: index into `Source.files`.
        line: where it begins, counted from 1.
        data: its bytes.
        read: fraction of the source read so far, this record included; for progress reports only.
        problem: why it cannot be read at all (then `data` is empty), or None.
    """

    file: int
    line: int
    data: bytes
    read: float
    problem: str | None = None

    @classmethod
    def of(
        cls,
        file: int,
        line: int,
        data: bytes,
        read: float,
    ) -> Record:
        """Makes a record, with a `problem` if `data` is a Problem."""
        if isinstance(data, Problem):
            # Sources yield bytes, so that a problem travels the same way as a record.
            return cls(file, line, b"", read, data.decode())
        return cls(file, line, data, read)

    def content(self) -> bytes:
        """Returns `data`.

        Raises:
            BadRecord: the record could not be read.
        """
        if self.problem is not None:
            raise BadRecord(self.problem)
        return self.data


@dataclass(frozen=True)
class Source(ABC):
    """An ordered set of files of documents.

    Attributes:
        files: names, in reading order.
        first_heldout: index into `files` of the first file of the held-out split, which all later
            files belong to as well; None chooses the split by hash.
        encoding: of text files, see `encodings.normalized`; their records are in UTF-8.
    """

    files: tuple[str, ...]
    # By keyword only, so that subclasses can have fields without a default.
    first_heldout: int | None = field(default=None, kw_only=True)
    encoding: str = field(default=UTF8, kw_only=True)

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yields every record of every file, in order.

        An unreadable part of a file is one record with a `problem`.

        Raises:
            DataError: a file is missing or unreadable.
        """

    def passages(self) -> Iterator[Record]:
        """Yields the passages that rows of retrieval name by ids; `parse` gives their texts."""
        return iter(())

    def decode(self, data: bytes) -> str:
        """Decodes the bytes of a record.

        Raises:
            BadRecord: they hold no text.
        """
        return decode_utf8(data)

    def parse(self, record: Record) -> str:
        """Returns the document of a record: text that is not blank and is valid Unicode.

        A pair or a row of a task gives all its texts as one document, as tokenizers train on them.

        Raises:
            BadRecord: there is none.
        """
        return checked_text(self.decode(record.content()), "document")


class SourceConfig(Protocol):
    """Settings of a source: the `Config` of a module of this package, or of a user's own."""

    def build(self) -> Source:
        """Finds the files.

        Raises:
            ConfigError: there are none, or they cannot be used.
            MissingExtra: a package that reads them is not installed.
        """
        ...


@dataclass(frozen=True)
class PairSource(Source):
    """An ordered set of files of text pairs, a source and a target, as for translation.

    Attributes:
        prefix: prepended to each source, as T5's "translate English to German: ".
    """

    prefix: str
    target_file: ClassVar[int] = 0
    """Offset in `files` from a file of sources to the file of their targets; 0 is the same file."""

    @abstractmethod
    def decode_pair(self, data: bytes) -> tuple[str, str]:
        """Decodes the source, without the prefix, and the target of a record.

        Raises:
            BadRecord: one of them is missing.
        """

    # A tokenizer needs the words of both texts.
    def parse(self, record: Record) -> str:
        return "\n".join(self.parse_pair(record))

    def parse_pair(self, record: Record) -> tuple[str, str]:
        """Returns the source of a record, with the prefix, and the target; neither is blank.

        Raises:
            BadRecord: one of them is missing or blank.
        """
        source, target = self.decode_pair(record.content())
        return self.prefix + checked_text(source, "source"), checked_text(target, "target")


@dataclass(frozen=True)
class TaskSource(Source):
    """An ordered set of files of rows of a fine-tuning task; a record is a row, a JSON object.

    Attributes:
        kind: of the task.
        labels: names of the classes or tags, or of the number; empty for choices and answers.
    """

    kind: ClassVar[TaskKind]
    labels: tuple[str, ...]

    @abstractmethod
    def decode_row(self, data: bytes) -> TaskRow:
        """Decodes the row of a record.

        Raises:
            BadRecord: it is missing or incomplete.
        """

    @abstractmethod
    def text_name(self, index: int) -> str:
        """Name of a row's text `index` in reasons, such as its column."""

    def parse(self, record: Record) -> str:
        return "\n".join(self.parse_row(record).texts)

    def parse_row(self, record: Record) -> TaskRow:
        """Returns the row of a record; none of its texts is blank.

        Raises:
            BadRecord: the row is missing or incomplete, or a text is blank.
        """
        # Here, not in every kind: a model could not tell a blank text from a missing one.
        row = self.decode_row(record.content())
        for index, text in enumerate(row.texts):
            checked_text(text, self.text_name(index))
        _check_unicode(row.group, " in the row's group or id")
        return row


def checked_text(text: str, name: str) -> str:
    """Returns a text that is not blank and is valid Unicode.

    Raises:
        BadRecord: it is not.
    """
    if not text or text.isspace():
        raise BadRecord(f"empty {name}")
    _check_unicode(text, "" if name == "document" else f" in {name}")
    return text


def _check_unicode(text: str, where: str) -> None:
    try:
        # Tokenizers and hashes need UTF-8, which has no half of a surrogate pair. JSON can spell
        # one, as "\ud83d".
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"invalid Unicode{where}") from None


def decode_utf8(data: bytes) -> str:
    """Decodes UTF-8 strictly; a byte-order mark at the start is removed.

    Raises:
        BadRecord: it is not UTF-8.
    """
    try:
        # Editors of Windows begin files with a byte-order mark, which is no part of the text.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRecord(INVALID) from None


def require(
    package: str,
    extra: str,
    purpose: str,
) -> None:
    """Checks that an optional package is installed, without importing it.

    Raises:
        MissingExtra: it is not.
    """
    # A build should fail at once, but importing pyarrow or datasets takes seconds.
    if find_spec(package) is None:
        raise MissingExtra(package, extra, purpose)
