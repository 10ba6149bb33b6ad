"""Tab-separated pairs of texts: a pair a line, as Tatoeba and many corpora of sentences come.

There is no quoting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from data_pipeline.sources import BadRecord, PairSource, Record, decode_utf8
from data_pipeline.sources.files import find, read_records
from data_pipeline.sources.jsonl import lines
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Where the pairs are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz` and `.zst` are decompressed. They have no line of
            names.
        source: the column of the source, counted from 1.
        target: the column of the target.
        prefix: what each source begins with, as "translate English to German: ".
    """

    paths: tuple[str, ...]
    source: int = 1
    target: int = 2
    prefix: str = ""

    def __post_init__(self) -> None:
        if min(self.source, self.target) < 1 or self.source == self.target:
            raise ConfigError(
                "source and target are columns counted from 1, and not the same; they are "
                f"{self.source} and "
                f"{self.target}"
            )

    def at(self, paths: tuple[str, ...]) -> Config:
        """The same pairs in other files."""
        return replace(self, paths=paths)

    def build(self) -> TsvPairs:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing.
        """
        return TsvPairs(find(self.paths), self.prefix, None, self.source, self.target)


@dataclass(frozen=True)
class TsvPairs(PairSource):
    """Reads two columns of each line that is not blank."""

    source: int
    target: int

    def records(self) -> Iterator[Record]:
        return read_records(self.files, lines)

    def decode_pair(self, data: bytes) -> tuple[str, str]:
        columns = decode_utf8(data).rstrip("\r\n").split("\t")
        last = max(self.source, self.target)
        if len(columns) < last:
            raise BadRecord(f"fewer than {last} columns")
        return columns[self.source - 1], columns[self.target - 1]
