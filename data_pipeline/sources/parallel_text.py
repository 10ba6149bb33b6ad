"""Parallel text: two files, as train.en and train.de, in which line n of one goes with line n of
the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import BinaryIO, ClassVar

from data_pipeline.sources import PairSource, Record, decode_utf8
from data_pipeline.sources.files import find, read_records
from trainer.errors import ConfigError, DataError
from trainer.storage import shown


@dataclass(frozen=True)
class Config:
    """Where the pairs are.

    Attributes:
        source_paths: files, glob patterns or URLs of the sources; `.gz` and `.zst` are
            decompressed.
        target_paths: those of the targets, as many and in the same order (within a pattern, that of
            the names).
        prefix: what each source begins with, as "translate English to German: ".
    """

    source_paths: tuple[str, ...]
    target_paths: tuple[str, ...]
    prefix: str = ""

    def at(self, paths: tuple[str, ...]) -> Config:
        """The same in other files: those of the sources, and then as many of the targets.

        Raises:
            ConfigError: their number is odd.
        """
        half, odd = divmod(len(paths), 2)
        if odd:
            raise ConfigError(
                "parallel text takes files of sources and as many of targets, as test.en test.de; "
                "these are "
                f"{len(paths)} files"
            )
        return replace(self, source_paths=paths[:half], target_paths=paths[half:])

    def build(self) -> ParallelText:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or there are more files of one kind than of the
                other.
        """
        sources, targets = (
            [file for path in paths for file in find((path,))]
            for paths in (self.source_paths, self.target_paths)
        )
        if len(sources) != len(targets) or not sources:
            raise ConfigError(
                f"source_paths are {len(sources)} files and target_paths {len(targets)}; name a "
                "file of targets for "
                "each file of sources"
            )
        return ParallelText(
            tuple(file for pair in zip(sources, targets, strict=True) for file in pair),
            self.prefix,
            None,
        )


@dataclass(frozen=True)
class ParallelText(PairSource):
    """Reads the files two by two, line by line: sources, then their targets."""

    target_file: ClassVar[int] = 1

    def records(self) -> Iterator[Record]:
        pairs = len(self.files) // 2
        for pair in range(pairs):
            for record in self._read(2 * pair):
                yield record._replace(read=(pair + record.read) / pairs)

    def _read(self, file: int) -> Iterator[Record]:
        """The records of a pair of files, up to the first part that cannot be read."""
        both = [read_records((path,), _lines) for path in self.files[file : file + 2]]
        for source, target in zip_longest(*both):
            if source is None or target is None:
                alone, longer = (source, 0) if target is None else (target, 1)
                lines = alone.line + sum(1 for _ in both[longer])
                names = [shown(path) for path in self.files[file : file + 2]]
                raise DataError(
                    f"{names[longer]} has {lines} lines and {names[1 - longer]} {alone.line - 1}: "
                    f"line {alone.line} of "
                    f"{names[longer]} has no partner; correct them, since a line goes with that of "
                    "the same number in "
                    "the other file"
                )
            for number, record in ((file, source), (file + 1, target)):
                if record.problem:
                    yield record._replace(file=number)
                    return
            yield Record(file, source.line, source.data + b"\n" + target.data, source.read)

    def decode_pair(self, data: bytes) -> tuple[str, str]:
        source, target = data.split(b"\n")
        return decode_utf8(source), decode_utf8(target)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    return ((number, line.rstrip(b"\r\n")) for number, line in enumerate(file, start=1))
