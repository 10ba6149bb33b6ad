"""Rows of tasks in tables: JSON Lines, JSON, CSV, TSV and Parquet files, and datasets of the
Hugging Face Hub.

This is what the kinds for tasks share, such as `classification`: where rows are, and how files
become rows. The kinds say what the columns mean.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, TypeAlias

from data_pipeline.sources import BadRecord, Record, Source, huggingface
from data_pipeline.sources.columns import no_column
from data_pipeline.sources.files import find, read_records
from data_pipeline.sources.jsonl import lines, load_json
from trainer.errors import ConfigError, DataError, MissingExtra
from trainer.storage import is_url, shown

Split: TypeAlias = Callable[[BinaryIO], Iterator[tuple[int, bytes]]]

_CELL = 2**24  # characters of a cell of CSV; the module's own limit of 2**17 refuses long documents
_ROWS = 1024  # of Parquet, decoded at a time
_BUFFER = 2**22  # bytes of Parquet read at a time


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hugging Face Hub, or in a folder, in any format that `datasets` (extra `hf`)
    reads.

    Attributes:
        path: the repository, OWNER/NAME, or a folder: one that `save_to_disk` wrote, or one of data
            files.
        name: the subset, where there are several.
        split: the part to train on; None for a dataset that is only evaluated on.
        heldout: the part whose rows are held out, such as "validation"; None: `heldout_fraction` of
            the other one.
        revision: a commit, tag or branch of the repository. Name a commit: anything else may change
            between two builds.
    """

    path: str
    name: str | None = None
    split: str | None = "train"
    heldout: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.heldout is None and self.split is None:
            raise ConfigError(
                "split and heldout are both null; name a part of the dataset in one of them"
            )
        if self.heldout == self.split:
            raise ConfigError(
                f"split and heldout are both {self.split!r}; held-out rows must not be trained on"
            )

    def parts(self) -> tuple[huggingface.Config, ...]:
        """The split, and the held-out one where there is one.

        Raises:
            ConfigError: the folder holds a single split, which would be read as both.
        """
        if self.heldout is not None and Path(self.path, "state.json").is_file():
            raise ConfigError(
                f"{self.path} holds a single split, so that {self.heldout!r} is not in it; leave "
                "heldout out, or save "
                "a DatasetDict of both"
            )
        splits = [split for split in (self.split, self.heldout) if split is not None]
        return tuple(
            huggingface.Config(self.path, self.name, split, "", self.revision) for split in splits
        )

    def save(self, folder: Path) -> None:
        """Downloads the splits into a folder that can be named as `path`."""
        import datasets

        splits = {part.split: part.open(streaming=False) for part in self.parts()}
        datasets.DatasetDict(splits).save_to_disk(folder)


class Found(NamedTuple):
    """What a source is made of: its files, the first held-out one among them, and the splits that
    they stand for.
    """

    files: tuple[str, ...]
    first_heldout: int | None
    parts: tuple[huggingface.Config, ...] = ()


@dataclass(frozen=True)
class TableConfig:
    """Where the rows are.

    Attributes:
        paths: files, glob patterns or URLs of the rows to train on: .jsonl, .json, .csv, .tsv (both
            with a line of names; .tsv without quoting) or .parquet; `.gz` and `.zst` are
            decompressed. None for a dataset that is only evaluated on.
        heldout: the same, of the rows that are held out; with none, `heldout_fraction` chooses
            among all rows.
        dataset: a Hugging Face dataset instead of files.
    """

    paths: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    dataset: HubDataset | None = None
    formats: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".csv", ".tsv", ".parquet")

    def __post_init__(self) -> None:
        if bool(self.paths or self.heldout) == (self.dataset is not None):
            raise ConfigError(
                f"there are {len(self.paths + self.heldout)} paths and dataset is "
                f"{self.dataset and self.dataset.path};"
                " name files in paths, or a Hugging Face dataset in dataset, and leave the other "
                "one out"
            )

    def find(self) -> Found:
        """Finds the files, or names the splits.

        Raises:
            ConfigError: a pattern matches nothing, a file is both trained on and held out, or is of
                no known format.
            MissingExtra: what reads them is not installed.
        """
        if self.dataset is not None:
            parts = self.dataset.parts()
            try:
                files = tuple(part.build().files[0] for part in parts)
            except MissingExtra:
                raise MissingExtra("datasets", "hf", "source.dataset") from None
            return Found(files, None if self.dataset.heldout is None else len(parts) - 1, parts)
        train = find(self.paths) if self.paths else ()
        heldout = find(self.heldout, "source.heldout") if self.heldout else ()
        if both := {*map(_place, train)} & {*map(_place, heldout)}:
            raise ConfigError(
                f"{shown(min(both))} is both in paths and in heldout; make the pattern of one "
                "narrower"
            )
        for file in (*train, *heldout):
            if suffix(file) not in self.formats:
                raise ConfigError(
                    f"{shown(file)} is of no known format; its name must end in "
                    f"{', '.join(self.formats)}, and then "
                    ".gz or .zst where it is compressed"
                )
        if any(suffix(file) == ".parquet" for file in (*train, *heldout)):
            try:
                import pyarrow  # noqa: F401
            except ImportError:
                raise MissingExtra("pyarrow", "parquet", "reading .parquet") from None
        return Found((*train, *heldout), len(train) if heldout else None)


def suffix(file: str) -> str:
    """What the name of a file says of its format, beneath any compression, such as ".csv"."""
    name = shown(file)
    for compression in (".gz", ".zst"):
        name = name.removesuffix(compression)
    return os.path.splitext(name)[1].lower()


def _place(file: str) -> str:
    return file if is_url(file) else os.path.realpath(file)


class Problem(bytes):
    """Why a row cannot be read, in place of the row."""

    @classmethod
    def of(cls, reason: str) -> Problem:
        return cls(reason.encode(errors="replace"))


@dataclass(frozen=True)
class TableSource(Source):
    """Reads the rows of each file, by its suffix.

    A record's line is where the row begins, or its number.

    Attributes:
        parts: the splits of a Hugging Face dataset that `files` name; none where these are files.
    """

    parts: tuple[huggingface.Config, ...]

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """What each row must have, the columns of texts first; dots reach into nested objects."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where there are any."""
        return ()

    def text_name(self, index: int) -> str:
        return self.columns[index]

    def splitter(self, suffix: str) -> Split:
        """What cuts a file of this suffix into rows."""
        splitters: dict[str, Split] = {
            ".jsonl": lines,
            ".json": self._json,
            ".csv": functools.partial(_cells, delimiter=",", quoting=csv.QUOTE_MINIMAL),
            ".tsv": functools.partial(_cells, delimiter="\t", quoting=csv.QUOTE_NONE),
            ".parquet": self._parquet,
        }
        return splitters[suffix]

    def records(self) -> Iterator[Record]:
        if self.parts:
            for index, part in enumerate(self.parts):
                yield from self._split_records(index, part)
            return
        for kind, group in itertools.groupby(
            range(len(self.files)), key=lambda index: suffix(self.files[index])
        ):
            first, *others = group
            count = 1 + len(others)
            for record in read_records(self.files[first : first + count], self.splitter(kind)):
                read = (first + record.read * count) / len(self.files)
                if record.problem is None:
                    yield _record(first + record.file, record.line, record.data, read)
                else:
                    yield record._replace(file=first + record.file, read=read)

    def rows_of(self, value: object) -> Iterable[object] | None:
        """The rows in the value that is the whole of a .json file; None if it does not hold any."""
        return value if isinstance(value, list) else None

    def _json(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """JSON Lines, or a single value that holds all rows."""
        head = file.readline()
        value = _json_or_none(head)
        if (
            not isinstance(value, dict) or self.rows_of(value) is not None
        ):  # the first line is not a row
            head += file.read()
            rows = self.rows_of(_json_or_none(head))
            if rows is not None:
                yield from ((number, encoded(row)) for number, row in enumerate(rows, start=1))
                return
        every = enumerate(itertools.chain(io.BytesIO(head), file), start=1)
        yield from ((number, line) for number, line in every if not line.isspace())

    def _parquet(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        import pyarrow as pa
        from pyarrow import parquet

        row = 0
        try:
            # With pre_buffer, the default, whole row groups would be read at once.
            with parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as table:
                for batch in table.iter_batches(
                    _ROWS, columns=self._chosen(table.schema_arrow.names)
                ):
                    for data in _batch_rows(batch):
                        row += 1
                        yield row, data
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # Arrow's own have no number
                raise
            raise BadRecord("corrupt file") from error

    def _split_records(self, index: int, part: huggingface.Config) -> Iterator[Record]:
        """The rows of a split of a Hugging Face dataset."""
        rows, row, name = part.open(streaming=True), 0, self.files[index]
        expected = huggingface.row_count(rows, part.split)
        if rows.column_names is not None:
            try:
                rows = rows.select_columns(self._chosen(rows.column_names))
            except BadRecord as error:
                yield Record(index, 1, b"", (index + 1) / len(self.parts), str(error))
                return
        try:
            for row, columns in enumerate(rows, start=1):
                share = min(1.0, row / expected) if expected else 0.0
                yield _record(index, row, encoded(columns), (index + share) / len(self.parts))
        except Exception as error:  # of whatever package a loader of `datasets` uses
            raise DataError(
                f"cannot read {name} after row {row}: {huggingface.reason(error)}; run the same "
                "command again to go on"
            ) from error
        if row < max(1, expected):
            problem = f"the split ends before row {expected}" if expected else "empty split"
            yield Record(index, row + 1, b"", (index + 1) / len(self.parts), problem)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        """Those of a table's columns that are read."""
        top = {
            name: name if name in names else name.partition(".")[0]
            for name in (*self.columns, *self.optional)
        }
        for name in self.columns:
            if top[name] not in names:
                raise BadRecord(no_column(name, names))
        return [name for name in names if name in top.values()]


def _record(file: int, line: int, data: bytes, read: float) -> Record:
    return (
        Record(file, line, b"", read, data.decode())
        if isinstance(data, Problem)
        else Record(file, line, data, read)
    )


def _json_or_none(data: bytes) -> object:
    try:
        return load_json(data)
    except BadRecord:
        return None


def _cells(file: BinaryIO, delimiter: str, quoting: Literal[0, 3]) -> Iterator[tuple[int, bytes]]:
    """The rows beneath a line of names; what is no UTF-8 is noticed when a row is encoded again."""
    csv.field_size_limit(_CELL)
    encodings = itertools.chain(("utf-8-sig",), itertools.repeat("utf-8"))
    decoded = (
        line.decode(encoding, "surrogateescape")
        for line, encoding in zip(file, encodings, strict=False)
    )
    reader = csv.reader(decoded, delimiter=delimiter, quoting=quoting, strict=True)
    names: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if not names:
                raise BadRecord(f"invalid CSV: {error}") from None
            yield line, Problem.of(f"invalid CSV: {error}")
            continue
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if not names:
            names = cells
            if twice := [name for index, name in enumerate(names) if name in names[:index]]:
                raise BadRecord(f"two columns are named {twice[0]!r}")
        elif len(cells) != len(names):
            yield (
                line,
                Problem.of(f"{len(cells)} cells and not {len(names)}, as the line of names has"),
            )
        else:
            yield line, encoded(dict(zip(names, cells, strict=True)), "invalid UTF-8")


def _batch_rows(batch: Any) -> Iterator[bytes]:
    """The rows of an Arrow batch, which is as good as its worst text.

    One of invalid UTF-8 is a row of its own.
    """
    try:
        yield from map(encoded, batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            yield Problem.of("invalid UTF-8")
        else:
            for index in range(batch.num_rows):
                yield from _batch_rows(batch.slice(index, 1))


def encoded(row: object, problem: str = "invalid Unicode") -> bytes:
    """A row as the bytes of a record; a Problem if some text of it cannot be encoded."""
    try:
        return json.dumps(row, ensure_ascii=False, default=_plain).encode()
    except UnicodeEncodeError:
        return Problem.of(problem)


def _plain(value: object) -> str | None:
    """What stands for a value that JSON has no name for.

    A date or a decimal fraction is its text, bytes are not.
    """
    return None if isinstance(value, bytes) else str(value)
