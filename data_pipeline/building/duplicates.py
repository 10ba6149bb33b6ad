"""Finds the documents of a source that repeat earlier ones, before its units are built.

Workers store the signatures of each unit in `DIR/.build`. A build that was stopped resumes with the
units that have none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from data_pipeline.building import pool
from data_pipeline.building.decontamination import Matcher
from data_pipeline.building.progress import Meter
from data_pipeline.building.units import Unit
from data_pipeline.dedup import Config
from data_pipeline.sources import BadRecord, Source
from samestep.storage import atomic_write


@dataclass(frozen=True)
class _Signatures:
    """The signatures of a unit.

    Attributes:
        record: int64 [N], position in the unit of each record that is compared.
        origin: int64 [N, 2], its file and line.
        values: uint64 [N, K].
    """

    record: npt.NDArray[np.int64]
    origin: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Duplicates:
    """The documents that repeat an earlier one.

    Attributes:
        records: for each unit, their positions in it.
        pairs: int64 [M, 4], file and line of each of them, and of the earlier one.
    """

    records: list[frozenset[int]]
    pairs: npt.NDArray[np.int64]


def count_repeated(hashes: Sequence[npt.NDArray[np.uint64]]) -> int:
    """Number of documents that repeat an earlier one, from the hashes of each unit: uint64 [N].

    It takes another 9 bytes a document; `np.unique` takes 66, and far longer.
    """
    # Sorted, [7, 3, 7, 7] is [3, 7, 7, 7], and two entries equal the one before.
    found = np.concatenate(hashes)
    found.sort()
    return int(np.count_nonzero(found[1:] == found[:-1]))


def find(
    units: Iterable[Unit],
    folder: Path,
    source: Source,
    config: Config,
    workers: int,
    test: Matcher | None = None,
) -> Duplicates:
    """Compares all documents of a source.

    Args:
        units: all of the source.
        folder: of the dataset in the making.
        test: documents that it matches will be left out of the dataset, so nothing repeats them.
    """
    tags: list[str] = []

    def missing(meter: Meter) -> Iterator[Unit]:
        for unit in units:
            # Of settings and content: signatures of an earlier try count if both are equal.
            tags.append(_tag(unit, config, test))
            if _load(folder, unit.index, tags[-1]) is None:
                yield unit
            else:
                meter.advance(unit.share, 0, len(unit.records))

    start = partial(_Signer, folder, source, config, test)
    with Meter("comparing") as meter, closing(pool.process(missing(meter), start, workers)) as done:
        for unit, count in done:
            meter.advance(unit.share, unit.size, count)
    loaded = [_load(folder, index, tag) for index, tag in enumerate(tags)]
    found = [each for each in loaded if each is not None]
    assert len(found) == len(tags)
    values = np.concatenate([each.values for each in found])
    origin = np.concatenate([each.origin for each in found])
    earlier = config.earlier(values)
    again = np.flatnonzero(earlier >= 0)
    # Documents of all units are counted together; each unit gets its own part.
    parts = np.split(earlier, np.cumsum([len(each.record) for each in found])[:-1])
    records = [
        frozenset(each.record[part >= 0].tolist()) for each, part in zip(found, parts, strict=True)
    ]
    return Duplicates(records, np.hstack([origin[again], origin[earlier[again]]]))


class _Signer:
    """Computes and stores the signatures of units; each worker process has one."""

    def __init__(self, folder: Path, source: Source, config: Config, test: Matcher | None) -> None:
        self._folder, self._source, self._config, self._test = folder, source, config, test

    def __call__(self, unit: Unit) -> int:
        record, origin, values = list[int](), list[tuple[int, int]](), []
        for number, each in enumerate(unit.records):
            try:
                text = self._source.parse(each)
            except BadRecord:  # the build itself reports it
                continue
            # It is left out of the dataset, so a later copy would not repeat anything there.
            if self._test is not None and self._test.matches(text):
                continue
            record.append(number)
            origin.append((each.file, each.line))
            values.append(self._config.signature(text))
        # A unit without a document must stack with the others: uint64 [0, K].
        width = len(self._config.signature(""))
        with atomic_write(_path(self._folder, unit.index)) as file:
            np.savez(
                file,
                tag=np.array(_tag(unit, self._config, self._test)),
                record=np.array(record, np.int64),
                origin=np.array(origin, np.int64).reshape(-1, 2),
                values=np.array(values, np.uint64).reshape(-1, width),
            )
        return len(record)


def _path(folder: Path, index: int) -> Path:
    return folder / ".build" / f"{index:06d}.signatures"


def _tag(unit: Unit, config: Config, test: Matcher | None) -> str:
    tree = config.settings() | ({} if test is None else test.settings())
    settings = json.dumps(tree, sort_keys=True)
    return hashlib.sha256(f"{unit.digest} {settings}".encode()).hexdigest()


def _load(folder: Path, index: int, tag: str) -> _Signatures | None:
    """Reads the signatures of a unit; None if they are missing, damaged or of another unit."""
    try:
        with np.load(_path(folder, index), allow_pickle=False) as stored:
            if str(stored["tag"]) != tag:
                return None
            return _Signatures(stored["record"], stored["origin"], stored["values"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
