"""Parallel text: two files, as train.en and train.de, in which lines of the same number belong
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import BinaryIO, ClassVar

from data_pipeline.sources import UTF8, PairSource, Record, decode_utf8
from data_pipeline.sources.encodings import normalized
from data_pipeline.sources.files import matches, read_records
from samestep.errors import ConfigError, DataError
from samestep.storage import shown


@dataclass(frozen=True)
class Config:
    """Where the pairs are.

    Attributes:
        source_paths: files, glob patterns or URLs of the sources; `.gz`, `.bz2`, `.xz` and `.zst`
            are decompressed.
        target_paths: files of the targets, as many and in the same order (the files of a pattern
            are ordered by name).
        prefix: prepended to each source, as "translate English to German: ".
        encoding: of both texts, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    source_paths: tuple[str, ...]
    target_paths: tuple[str, ...]
    prefix: str = ""
    encoding: str = UTF8

    def at(self, paths: tuple[str, ...]) -> Config:
        """Returns the settings for other files: first the sources, then as many targets.

        Raises:
            ConfigError: the number of files is odd.
        """
        half, odd = divmod(len(paths), 2)
        if odd:
            raise ConfigError(
                f"parallel text needs as many files of targets as of sources, and these are "
                f"{len(paths)} files. Name pairs of files, as test.en test.de."
            )
        return replace(self, source_paths=paths[:half], target_paths=paths[half:])

    def build(self) -> ParallelText:
        """Finds the files."""
        # Patterns are expanded one by one: sorted together, a pattern's files could mix with
        # another's, and no longer be in the order of their partners.
        # Links stay: one file may be the partner of several.
        sources = [file for path in self.source_paths for file in matches(path)]
        targets = [file for path in self.target_paths for file in matches(path)]
        if len(sources) != len(targets) or not sources:
            raise ConfigError(
                f"source_paths are {len(sources)} files and target_paths {len(targets)}. Name one "
                "file of targets for each file of sources."
            )
        files = tuple(chain.from_iterable(zip(sources, targets, strict=True)))
        return ParallelText(files, self.prefix, encoding=normalized(self.encoding))


@dataclass(frozen=True)
class ParallelText(PairSource):
    """Reads two files at a time, line by line: sources, then their targets.

    A record is the lines of both, separated by a line break.
    """

    target_file: ClassVar[int] = 1

    def records(self) -> Iterator[Record]:
        for first in range(0, len(self.files), 2):
            for record in self._read(first):
                yield record._replace(read=(first + 2 * record.read) / len(self.files))

    def _read(self, first: int) -> Iterator[Record]:
        """Yields the records of a pair of files, up to the first damage of either."""
        both = [
            read_records((path,), _lines, self.encoding) for path in self.files[first : first + 2]
        ]
        for source, target in zip_longest(*both):
            if source is None or target is None:
                names = [shown(path) for path in self.files[first : first + 2]]
                longer, shorter = names if target is None else reversed(names)
                raise DataError(
                    f"{longer}:{(source or target).line} has no partner in {shorter}. Correct the "
                    "files: lines of the same number belong together."
                )
            # Behind the first damage, lines could belong to others.
            for offset, record in enumerate((source, target)):
                if record.problem:
                    yield record._replace(file=first + offset)
                    return
            yield Record(first, source.line, source.data + b"\n" + target.data, source.read)

    def decode_pair(self, data: bytes) -> tuple[str, str]:
        # Neither has a line break of its own: each is a line.
        source, target = data.split(b"\n")
        return decode_utf8(source), decode_utf8(target)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    # Blank lines count, unlike in JSON Lines: without them the lines behind would lose their
    # partners.
    return ((number, line.rstrip(b"\r\n")) for number, line in enumerate(file, start=1))
