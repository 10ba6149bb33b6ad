"""JSON Lines of text pairs: one object per line, with source and target in two of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from data_pipeline.sources import UTF8, PairSource, Record
from data_pipeline.sources.encodings import normalized
from data_pipeline.sources.files import find, read_records
from data_pipeline.sources.kinds.jsonl import load_json, text_of, values


@dataclass(frozen=True)
class Config:
    """Where the pairs are.

    Attributes:
        paths: files, glob patterns or URLs; `.gz`, `.bz2`, `.xz` and `.zst` are decompressed.
        source: key of the source; dots reach into nested objects, unless a key has the dots.
        target: key of the target.
        prefix: prepended to each source, as "translate English to German: ".
        encoding: of the text, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    paths: tuple[str, ...]
    source: str = "source"
    target: str = "target"
    prefix: str = ""
    encoding: str = UTF8

    def at(self, paths: tuple[str, ...]) -> Config:
        """Returns the settings for pairs of the same format in other files."""
        return replace(self, paths=paths)

    def build(self) -> JsonLinesPairs:
        """Finds the files."""
        return JsonLinesPairs(
            find(self.paths),
            self.prefix,
            self.source,
            self.target,
            encoding=normalized(self.encoding),
        )


@dataclass(frozen=True)
class JsonLinesPairs(PairSource):
    """Reads the fields `source` and `target` of each line that is not blank."""

    source: str
    target: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, values, self.encoding)

    def decode_pair(self, data: bytes) -> tuple[str, str]:
        value = load_json(data)
        return text_of(value, self.source), text_of(value, self.target)
