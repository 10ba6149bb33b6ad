"""Parquet: one row a document, its text in one column. Needs pyarrow (extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from data_pipeline.sources import BadRecord, Record, Source
from data_pipeline.sources.files import find, read_records
from trainer.errors import MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1024  # decoded at a time
_BUFFER = 2**22  # bytes read at a time


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: files, glob patterns or URLs.
        field: the column of the text; dots reach into structs.
    """

    paths: tuple[str, ...]
    field: str = "text"

    def build(self) -> Parquet:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing.
            MissingExtra: pyarrow is not installed.
        """
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise MissingExtra("pyarrow", "parquet", "source.kind parquet") from None
        return Parquet(find(self.paths), self.field)


@dataclass(frozen=True)
class Parquet(Source):
    """Reads one column, part of a row group at a time.

    A record's line is its row, counted from 1.
    """

    field: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, self._rows)

    def _rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        import pyarrow as pa
        from pyarrow import parquet

        row = 0
        try:
            # With pre_buffer, the default, whole row groups would be read at once.
            with parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as table:
                if not _is_text(table.schema_arrow, self.field):
                    raise BadRecord(
                        f"no text column {self.field!r} among {', '.join(table.schema_arrow.names)}"
                    )
                for batch in table.iter_batches(_ROWS, columns=[self.field]):
                    for text in _column(batch, self.field).cast(pa.large_binary()).to_pylist():
                        row += 1
                        yield row, text or b""  # a row without text is an empty document
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # Arrow's own have no number
                raise
            raise BadRecord("corrupt file") from error


def _is_text(schema: pa.Schema, field: str) -> bool:
    import pyarrow as pa

    inside: pa.Schema | pa.StructType | pa.DataType = schema
    for name in field.split("."):
        if isinstance(inside, (pa.Schema, pa.StructType)) and inside.get_field_index(name) >= 0:
            inside = inside.field(name).type
        else:
            return False
    return bool(pa.types.is_string(inside) or pa.types.is_large_string(inside))


def _column(batch: pa.RecordBatch, field: str) -> pa.Array:
    from pyarrow import compute

    top, *inner = field.split(".")
    return compute.struct_field(batch[top], inner) if inner else batch[top]
