"""Parquet: one document per row, its text in one column. Needs pyarrow (extra `parquet`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from data_pipeline.sources import BadRecord, Record, Source, require
from data_pipeline.sources.files import find, read_records

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1024  # decoded at a time
_BUFFER = 2**22  # bytes read at a time


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz` and `.zst` are decompressed in memory.
        field: column of the text; dots reach into structs.
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

        top, *inner = self.field.split(".")
        row = 0
        for batch in batches(file, self._columns):
            texts = compute.struct_field(batch[top], inner) if inner else batch[top]
            # As bytes: the workers decode them, and invalid UTF-8 spoils its own row only.
            for text in texts.cast(pa.large_binary()).to_pylist():
                row += 1
                yield row, text or b""  # a row without text is an empty document

    def _columns(self, schema: pa.Schema) -> list[str]:
        import pyarrow as pa

        # "meta.body" must be a struct "meta" with a text "body".
        found: pa.Schema | pa.DataType = schema
        for name in self.field.split("."):
            is_struct = isinstance(found, (pa.Schema, pa.StructType))
            found = found.field(name).type if is_struct and name in found.names else None
        if found not in (pa.string(), pa.large_string()):
            names = ", ".join(schema.names)
            raise BadRecord(f"no text column {self.field!r} among {names}")
        return [self.field]


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
