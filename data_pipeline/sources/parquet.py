"""Parquet: one document per row, its text in one column. Needs pyarrow (extra `parquet`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from data_pipeline.sources import BadRecord, Record, Source, require
from data_pipeline.sources.columns import class_names, outer_columns, repeated
from data_pipeline.sources.files import find, read_records
from data_pipeline.sources.jsonl import ambiguous, json_or_none, splits

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1024  # decoded at a time
_BUFFER = 2**22  # bytes read at a time
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
            texts = compute.struct_field(batch[top], inner) if inner else batch[top]
            # As bytes: the workers decode them, and invalid UTF-8 spoils its own row only.
            for text in texts.cast(pa.large_binary()).to_pylist():
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


def batches(file: BinaryIO, columns: Callable[[pa.Schema], list[str]]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file, part of a row group at a time.

    Args:
        file: read whole if it cannot seek, as a decompressed one: its index is at its end.
        columns: chooses the columns to read; raises BadRecord if the schema lacks one.

    Raises:
        BadRecord: the file is damaged.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if not file.seekable():
            file = io.BytesIO(file.read())
        # With pre_buffer, the default, whole row groups would be read at once.
        with parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as table:
            yield from table.iter_batches(_ROWS, columns=columns(table.schema_arrow))
    except (pa.ArrowInvalid, OSError) as error:
        # Arrow raises OSError for damage, too, but without an error number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BadRecord("corrupt file") from error
