"""Parquet: one document per row, its text in one column. Needs pyarrow (extra `parquet`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from data_pipeline.sources import BadRecord, Record, Source, require
from data_pipeline.sources.columns import class_names, outer_columns, repeated
from data_pipeline.sources.files import MOST_EXPANSION, check_expansion, find, read_records
from data_pipeline.sources.kinds.jsonl import ambiguous, json_or_none, splits

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROWS = 1024  # decoded at a time
_BUFFER = 2**22  # bytes read at a time
_PART = 2**26  # bytes of texts that are decoded at a time
_FREE_ROWS = 2**20  # that any file may have
# Arrow's names of types of text. Files of older programs have text as binary, in UTF-8.
_TEXT = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz`, `.bz2`, `.xz` and `.zst` are decompressed in
            memory.
        field: column of the text; dots reach into structs, unless a column's name has them.
    """

    paths: tuple[str, ...]
    field: str = "text"

    def build(self) -> Parquet:
        """Finds the files."""
        require("pyarrow", "parquet", "source.kind parquet")
        return Parquet(find(self.paths), self.field)


@dataclass(frozen=True)
class Parquet(Source):
    """Reads one column; a record's line is its row, counted from 1."""

    field: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, self._rows)

    def _rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        import pyarrow as pa
        from pyarrow import compute

        row = 0
        for batch in batches(file, self._columns):
            top, *inner = self._path(batch.schema)
            with damage_explained():
                column = compute.struct_field(batch[top], inner) if inner else batch[top]
                # As bytes: the workers decode them, and invalid UTF-8 spoils its own row only.
                texts = column.cast(pa.large_binary()).to_pylist()
            for text in texts:
                row += 1
                yield row, text or b""  # a row without text is an empty document

    def _columns(self, schema: pa.Schema) -> list[str]:
        self._path(schema)
        return [self.field]

    def _path(self, schema: pa.Schema) -> tuple[str, ...]:
        """The column of the text, and the fields of structs that lead to it."""
        import pyarrow as pa

        found = list(_paths(schema, self.field))
        outer = outer_columns(self.field, schema.names)
        if twice := repeated(outer):
            raise BadRecord(f"two columns are named {twice!r}")
        if len(found) > 1:
            raise BadRecord(ambiguous(self.field))
        for path, kind in found:
            # pandas stores a categorical column as a dictionary of its values.
            if str(kind.value_type if pa.types.is_dictionary(kind) else kind) in _TEXT:
                return path
        names = ", ".join(schema.names)
        raise BadRecord(f"no text column {self.field!r} among {names}")


def class_names_of(schema: pa.Schema) -> dict[str, list[str]]:
    """The names of classes by column, if `datasets` has written the file; see `class_names`."""
    content = json_or_none((schema.metadata or {}).get(b"huggingface", b""))
    info = content.get("info") if isinstance(content, dict) else None
    features = info.get("features") if isinstance(info, dict) else None
    return class_names(features) if isinstance(features, dict) else {}


def _paths(
    fields: pa.Schema | pa.StructType, name: str, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yields the columns and fields of structs that a name may mean, as (path, type)."""
    import pyarrow as pa

    for key, rest in splits(name):
        for field in fields:
            if field.name == key and rest is None:
                yield (*above, key), field.type
            elif field.name == key and rest is not None and isinstance(field.type, pa.StructType):
                yield from _paths(field.type, rest, (*above, key))


def _check_sizes(metadata: pq.FileMetaData, size: int) -> None:
    """Rejects a file of `size` bytes that declares implausibly many rows or bytes.

    Raises:
        BadRecord: it does.
    """
    if metadata.num_rows > _FREE_ROWS + MOST_EXPANSION * size:
        raise BadRecord("decompression bomb")
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    check_expansion(sum(group.total_byte_size for group in groups), size)


def _text_widths(column: pa.Array) -> tuple[int, int] | None:
    """Bytes of all texts of a dictionary column, and of the longest; None for another column."""
    import pyarrow as pa
    from pyarrow import compute

    if not isinstance(column, pa.DictionaryArray) or str(column.dictionary.type) not in _TEXT:
        return None
    lengths = compute.binary_length(column.dictionary).take(column.indices)
    return compute.sum(lengths).as_py() or 0, compute.max(lengths).as_py() or 0


def batches(file: BinaryIO, columns: Callable[[pa.Schema], list[str]]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file, part of a row group at a time.

    Args:
        file: read whole if it cannot seek, as a decompressed one: its index is at its end.
        columns: chooses the columns to read; raises BadRecord if the schema lacks one.

    Raises:
        BadRecord: the file is damaged.
    """
    from pyarrow import parquet

    with damage_explained():
        if not file.seekable():
            file = io.BytesIO(file.read())
        # With pre_buffer, the default, whole row groups would be read at once.
        size = file.seek(0, io.SEEK_END)
        with parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as table:
            chosen = columns(table.schema_arrow)
            _check_sizes(table.metadata, size)
            metadata = table.metadata
        # As dictionaries, so a long text that all rows repeat is there once.
        kinds = {field.name: str(field.type) for field in table.schema_arrow}
        texts = [name for name in chosen if kinds.get(name) in _TEXT]
        with parquet.ParquetFile(
            file,
            metadata=metadata,
            buffer_size=_BUFFER,
            pre_buffer=False,
            read_dictionary=texts,
        ) as table:
            read = 0
            for batch in table.iter_batches(_ROWS, columns=chosen):
                widths = list(filter(None, map(_text_widths, batch.columns)))
                read += sum(total for total, _ in widths)
                check_expansion(read, size)
                widest = max(1, sum(longest for _, longest in widths))
                rows = min(_ROWS, max(1, _PART // widest))
                for begin in range(0, batch.num_rows, rows):
                    yield batch.slice(begin, rows)


@contextmanager
def damage_explained() -> Iterator[None]:
    """Turns Arrow's errors about the content of a file into a BadRecord."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        # Arrow raises OSError for damage, too, but without an error number. Names of columns that
        # are no UTF-8 are the only text that Python decodes here.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BadRecord("corrupt file") from error
