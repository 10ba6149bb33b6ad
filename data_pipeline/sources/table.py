"""Rows of tasks in tables: JSON Lines, JSON, CSV, TSV and Parquet files, and datasets of the
Hugging Face Hub.

The source kinds for tasks, such as `classification`, share this: where rows are, and how files
become rows. Each kind defines the meaning of the columns.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Literal, TypedDict

from data_pipeline.sources import INVALID, UTF8, BadRecord, Problem, Record, Source, require
from data_pipeline.sources.columns import (
    no_column,
    outer_columns,
    repeated,
    with_class_names,
)
from data_pipeline.sources.encodings import normalized
from data_pipeline.sources.files import Split, find, identity, read_records, suffix
from data_pipeline.sources.kinds import huggingface, parquet
from data_pipeline.sources.kinds.jsonl import encoded, json_or_none, lines, values
from samestep.errors import ConfigError
from samestep.storage import shown

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_CELL = 2**24  # characters of a cell of CSV; Python's own limit of 2**17 is too low


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hugging Face Hub or in a folder, read by `datasets` (extra `hf`).

    Attributes:
        path: the repository, OWNER/NAME, or a folder: one that `save_to_disk` wrote, or one of data
            files.
        name: the subset, if there are several.
        split: the split to train on; None for a dataset that is only evaluated on.
        heldout: the split of held-out rows, such as "validation"; None: `heldout_fraction` of the
            other one.
        revision: commit, tag or branch of the repository. Name a commit: anything else may change
            between two builds.
    """

    path: str
    name: str | None = None
    split: str | None = "train"
    heldout: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        # Also rejects null for both: then there would be no rows at all.
        if self.heldout == self.split:
            raise ConfigError(
                f"split and heldout are both {self.split!r}. Name a split to train on, another one "
                "to hold out, or both: held-out rows must not be trained on."
            )

    def parts(self) -> tuple[huggingface.Config, ...]:
        """Returns the split to train on and the held-out one, as far as they are set.

        Raises:
            ConfigError: the folder holds a single split, which would be read as both.
        """
        if self.heldout is not None and Path(self.path, "state.json").is_file():
            raise ConfigError(
                f"{self.path} holds a single split, so {self.heldout!r} is not in it. Leave "
                "heldout out, or save a DatasetDict of both."
            )
        # The one to train on first, as for files.
        splits = filter(None, (self.split, self.heldout))
        return tuple(
            huggingface.Config(self.path, self.name, split, revision=self.revision)
            for split in splits
        )

    def save(self, folder: Path) -> None:
        """Downloads the splits into a folder, which `path` can name afterwards."""
        import datasets

        splits = {part.split: part.open(streaming=False) for part in self.parts()}
        datasets.DatasetDict(splits).save_to_disk(folder)


class Found(TypedDict):
    """The files of a table source, and the splits of a Hugging Face dataset that they stand for."""

    files: tuple[str, ...]
    first_heldout: int | None
    header: tuple[str, ...]
    parts: tuple[huggingface.Config, ...]
    encoding: str


@dataclass(frozen=True)
class TableConfig:
    """Where the rows are.

    Attributes:
        paths: files, glob patterns or URLs of the rows to train on: .jsonl, .json, .csv, .tsv
            (without quoting) or .parquet; `.gz`, `.bz2`, `.xz` and `.zst` are decompressed. None
            for a dataset that is only evaluated on.
        heldout: the same, of the held-out rows; without it, `heldout_fraction` chooses among all
            rows.
        header: names of the columns of .csv and .tsv files that have no line of names; [] reads
            the names from the first line.
        dataset: a Hugging Face dataset instead of files.
        encoding: of files of text, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    paths: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    dataset: HubDataset | None = None
    encoding: str = UTF8
    formats: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".csv", ".tsv", ".parquet")

    def __post_init__(self) -> None:
        if bool(self.paths or self.heldout) == (self.dataset is not None):
            raise ConfigError(
                f"there are {len(self.paths + self.heldout)} paths and dataset is "
                f"{self.dataset and self.dataset.path}. Name either files in paths, or a Hugging "
                "Face dataset in dataset."
            )
        if twice := repeated(self.header):
            raise ConfigError(f"header names two columns {twice!r}. Give each its own name.")
        if self.header and self.dataset is not None:
            raise ConfigError(
                "header names the columns of files, and dataset has names. Leave header out."
            )
        if self.dataset is not None and normalized(self.encoding) != UTF8:
            raise ConfigError(
                f"encoding {self.encoding} is of files, and dataset names none. Leave encoding out."
            )

    def find(self) -> Found:
        """Finds the files, or names the splits.

        Raises:
            ConfigError: a pattern matches nothing, a file is both trained on and held out, or its
                format is unknown.
            MissingExtra: a package that reads them is not installed.
        """
        if self.dataset is not None:
            require("datasets", "hf", "source.dataset")
            parts = self.dataset.parts()
            # The held-out split is the last one, or the only one.
            first_heldout = None if self.dataset.heldout is None else len(parts) - 1
            titles = tuple(part.title for part in parts)
            return {
                "files": titles,
                "first_heldout": first_heldout,
                "header": (),
                "parts": parts,
                "encoding": UTF8,
            }
        train = find(self.paths) if self.paths else ()
        heldout = find(self.heldout, "source.heldout") if self.heldout else ()
        # A row in both splits would be trained on and then scored. A link may bring it there.
        if both := {*map(identity, train)} & {*map(identity, heldout)}:
            raise ConfigError(
                f"{shown(min(both))} is both in paths and in heldout. Make the pattern of one "
                "narrower."
            )
        files = (*train, *heldout)
        for file in files:
            if suffix(file) not in self.formats:
                raise ConfigError(
                    f"{shown(file)} has an unknown format. Its name must end in "
                    f"{', '.join(self.formats)}, and then in .gz, .bz2, .xz or .zst if it is "
                    "compressed."
                )
        if ".parquet" in map(suffix, files):
            require("pyarrow", "parquet", "reading .parquet")
        first_heldout = len(train) if heldout else None
        formats = {*map(suffix, files)}
        if self.header and formats.isdisjoint((".csv", ".tsv")):
            raise ConfigError(
                f"header names the columns of .csv and .tsv files, and {shown(files[0])} has names "
                "in it. Leave header out."
            )
        return {
            "files": files,
            "first_heldout": first_heldout,
            "header": self.header,
            "parts": (),
            "encoding": normalized(self.encoding),
        }


@dataclass(frozen=True)
class TableSource(Source):
    """Reads the rows of each file, by its suffix.

    A record's line is the line where the row begins, or the row's number.

    Attributes:
        header: names of the columns of .csv and .tsv files without a line of names; else empty.
        parts: the splits of a Hugging Face dataset that `files` names; empty for files.
    """

    header: tuple[str, ...] = field(kw_only=True, default=())
    parts: tuple[huggingface.Config, ...] = field(kw_only=True)

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Required columns, with the columns of texts first; dots reach into nested objects."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read if they exist."""
        return ()

    @property
    def numbered(self) -> Mapping[str, tuple[str, ...]]:
        """Columns that may give a label by its number -> the labels, in the order of numbers."""
        return {}

    def text_name(self, index: int) -> str:
        return self.columns[index]

    def splitter(self, suffix: str) -> Split:
        """Returns the function that splits a file of this suffix into rows."""
        # .tsv files of GLUE and others have single quotation marks in texts, so there a mark is
        # an ordinary character.
        splitters: dict[str, Split] = {
            ".jsonl": values,
            ".json": self._json,
            ".csv": functools.partial(
                _csv_rows, delimiter=",", quoting=csv.QUOTE_MINIMAL, names=self.header
            ),
            ".tsv": functools.partial(
                _csv_rows, delimiter="\t", quoting=csv.QUOTE_NONE, names=self.header
            ),
            ".parquet": self._parquet,
        }
        return splitters[suffix]

    def records(self) -> Iterator[Record]:
        for index, name in enumerate(self.files):
            if self.parts:
                found = self.parts[index].read(self._chosen, self._encoder)
            else:
                form = suffix(name)
                encoding = UTF8 if form == ".parquet" else self.encoding
                found = read_records((name,), self.splitter(form), encoding)
            for record in found:
                # Files count alike, since the number of rows of a later one is unknown.
                read = (index + record.read) / len(self.files)
                yield record._replace(file=index, read=read)

    def rows_of(self, value: object) -> Iterable[object] | None:
        """Returns the rows in the single value of a .json file; None if it does not hold any."""
        return value if isinstance(value, list) else None

    def _json(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Splits JSON Lines, or a single value that holds all rows."""
        content = file.readline()
        value = json_or_none(content)
        # A first line that is a row begins JSON Lines. Anything else may begin a value of many
        # lines, as "[" or SQuAD's '{"data": ['.
        if not isinstance(value, dict) or self.rows_of(value) is not None:
            content += file.read()
            rows = self.rows_of(json_or_none(content))
            if rows is not None:
                yield from enumerate(map(encoded, rows), start=1)
                return
        yield from lines(itertools.chain(io.BytesIO(content), file))

    def _parquet(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        # Rows are numbered through all batches of the file.
        batches = parquet.batches(file, lambda schema: self._chosen(schema.names))
        return enumerate(itertools.chain.from_iterable(map(self._batch_rows, batches)), start=1)

    def _batch_rows(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """Yields the rows of an Arrow batch; a row with invalid UTF-8 is a Problem."""
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            # Arrow converts a batch as a whole or not at all: find the bad row by itself.
            if batch.num_rows == 1:
                yield Problem.of(INVALID)
                return
            for index in range(batch.num_rows):
                yield from self._batch_rows(batch.slice(index, 1))
            return
        yield from map(self._encoder(parquet.class_names_of(batch.schema)), rows)

    def _encoder(
        self, class_names: Mapping[str, Sequence[str]]
    ) -> Callable[[dict[str, object]], bytes]:
        """Returns the function that encodes rows of a table with these names of classes."""
        # A dataset may number the labels in another order, or have more of them. If its labels
        # have other names, the numbers count.
        renamed = {}
        for name, labels in self.numbered.items():
            names = tuple(class_names.get(name, ()))
            if names != labels and set(labels).issubset(names):
                renamed[name] = names
        return partial(self._encoded, renamed)

    def _encoded(self, renamed: Mapping[str, Sequence[str]], row: dict[str, object]) -> bytes:
        """Encodes a row as the bytes of a record; a Problem if a text of it is not valid.

        Args:
            renamed: the names of classes, for columns with numbers that these names replace.
        """
        for name, names in renamed.items():
            row[name] = with_class_names(row[name], names)
        # Files of older programs have texts as bytes, in UTF-8.
        for name in self.columns:
            if isinstance(content := row.get(name), bytes):
                try:
                    row[name] = content.decode()
                except UnicodeDecodeError:
                    return Problem.of(INVALID)
        return encoded(row)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        """Chooses the columns of a table to read; of a nested column, the outermost."""
        chosen = set[str]()
        for name in (*self.columns, *self.optional):
            outer = outer_columns(name, names)
            if not outer and name in self.columns:
                raise BadRecord(no_column(name, names))
            if twice := repeated(outer):
                raise BadRecord(f"two columns are named {twice!r}")
            chosen.update(outer)
        return [name for name in names if name in chosen]


def _csv_rows(
    file: BinaryIO, delimiter: str, quoting: Literal[0, 3], names: Sequence[str]
) -> Iterator[tuple[int, bytes]]:
    """Yields the rows as JSON objects; without `names`, the first line has the names of columns."""
    csv.field_size_limit(_LONGEST_CELL)
    # Invalid UTF-8 passes here as lone surrogates, and is found when its row is encoded again, so
    # it spoils that row only.
    decoded = codecs.iterdecode(file, "utf-8-sig", "surrogateescape")
    first = next(decoded, "")
    if not names and "\0" in first:  # UTF-16: to csv, these would be strange names of columns
        raise BadRecord(INVALID)
    lines_of = itertools.chain((first,), decoded)
    reader = csv.reader(lines_of, delimiter=delimiter, quoting=quoting, strict=True)
    header = list(names)
    while True:
        # Before the row is read: a quoted cell may have line breaks.
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if not header:
                raise BadRecord(_bad_row(line, reader.line_num, f"invalid CSV: {error}")) from None
            last = reader.line_num
            if last > line and "field limit" in str(error):
                # Whether the quotation is still open is unknown, and so is which lines are rows.
                last += sum(1 for _ in decoded)
            yield from _lost(line, last, f"invalid CSV: {error}")
            continue
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if not header:
            header = cells
            if twice := repeated(header):
                raise BadRecord(f"two columns are named {twice!r}")
        elif len(cells) != len(header):
            names_of = "header" if names else "the line of names"
            problem = f"not as many cells as {names_of} has: {len(cells)}, not {len(header)}"
            yield from _lost(line, reader.line_num, problem)
        else:
            yield line, encoded(dict(zip(header, cells, strict=True)), INVALID)


def _lost(first: int, last: int, problem: str) -> Iterator[tuple[int, bytes]]:
    """Yields a Problem for each line of a row that cannot be read.

    A quotation mark that is not closed makes one row of all lines up to the next mark.
    """
    for line in range(first, last + 1):
        yield line, Problem.of(_bad_row(first, last, problem))


def _bad_row(first: int, last: int, problem: str) -> str:
    quotation = f", in a quotation from line {first} to line {last}" if last > first else ""
    return problem + quotation
