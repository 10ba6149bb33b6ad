"""Tab-separated text pairs without quoting: one pair per line, as in Tatoeba and many corpora."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from data_pipeline.sources import UTF8, BadRecord, PairSource, Record, decode_utf8
from data_pipeline.sources.encodings import normalized
from data_pipeline.sources.files import find, read_records
from data_pipeline.sources.kinds.jsonl import lines
from samestep.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Where the pairs are.

    Attributes:
        paths: files, glob patterns or URLs, without a header line; `.gz`, `.bz2`, `.xz` and `.zst`
            are decompressed.
        source: column of the source, counted from 1.
        target: column of the target.
        prefix: prepended to each source, as "translate English to German: ".
        encoding: of the text, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    paths: tuple[str, ...]
    source: int = 1
    target: int = 2
    prefix: str = ""
    encoding: str = UTF8

    def __post_init__(self) -> None:
        if min(self.source, self.target) < 1 or self.source == self.target:
            raise ConfigError(
                f"source is {self.source} and target is {self.target}. Use two different columns, "
                "counted from 1."
            )

    def at(self, paths: tuple[str, ...]) -> Config:
        """Returns the settings for pairs of the same format in other files."""
        return replace(self, paths=paths)

    def build(self) -> TsvPairs:
        """Finds the files."""
        return TsvPairs(
            find(self.paths),
            self.prefix,
            self.source,
            self.target,
            encoding=normalized(self.encoding),
        )


@dataclass(frozen=True)
class TsvPairs(PairSource):
    """Reads two columns of each line that is not blank."""

    source: int
    target: int

    def records(self) -> Iterator[Record]:
        return read_records(self.files, lines, self.encoding)

    def decode_pair(self, data: bytes) -> tuple[str, str]:
        # Only the line break is removed: a tab at the end begins an empty last column.
        columns = decode_utf8(data).rstrip("\r\n").split("\t")
        last = max(self.source, self.target)
        if len(columns) < last:
            raise BadRecord(f"fewer than {last} columns")
        return columns[self.source - 1], columns[self.target - 1]
