"""Passages of retrieval: numbered through all units, then stored once each, whoever names them.

A first pass over the source finds the distinct passages of each unit. They are numbered in order of
their first unit, so the numbers depend on the source alone. The second pass stores a passage in the
shard of that unit, and rows with the numbers of theirs. Units of texts "a b", "b c" and "d a" have
the passages 0 1, then 1 2, then 3 0, and store two, one and one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from data_pipeline.building import pool
from data_pipeline.building.decontamination import Matcher
from data_pipeline.building.progress import Meter
from data_pipeline.building.task_rows import Encoded
from data_pipeline.building.units import (
    CONTAMINATED,
    Outcome,
    Parsed,
    Unit,
    UnitWriter,
    hashed,
)
from data_pipeline.format.manifest import PASSAGES, ShardInfo
from data_pipeline.format.writing import write_shard
from data_pipeline.packing import Int64
from data_pipeline.sources import BadRecord, Record, Source
from data_pipeline.sources.kinds.retrieval import Retrieval, RetrievalRow
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import DataError
from samestep.hashing import U64
from samestep.storage import atomic_write, shown

_MISSING, _LEFT_OUT = -1, -2  # instead of a number
_KEY_BYTES = 16  # of a passage's hash: two texts never share one
Keys = npt.NDArray[np.bytes_]


@dataclass(frozen=True)
class Numbers:
    """The numbers of all passages.

    Attributes:
        first: int64 [units], number of distinct passages in the units before each.
        digest: of all of them, in order.
        scored: whether rows have a teacher's scores.
    """

    first: Int64
    digest: str
    scored: bool

    def before(self, unit: Unit) -> Unit:
        """The unit, with what it needs to know about earlier ones."""
        # A change of an early unit renumbers passages, which later ones name.
        digest = hashlib.blake2b(f"{unit.digest} {self.digest}".encode(), digest_size=16)
        first = int(self.first[unit.index])
        return replace(unit, digest=digest.hexdigest(), first_passage=first)


class _Found(NamedTuple):
    """The distinct passages of a unit, and places of a row with scores and of one without.

    Passages of the test are in `left_out` if rows may name them by ids.
    """

    keys: Keys
    left_out: Keys
    scored: tuple[int, int] | None
    bare: tuple[int, int] | None


def number(
    units: Iterator[Unit], folder: Path, source: Source, workers: int, test: Matcher | None
) -> Numbers:
    """Numbers the passages of a source, for the writers of its units.

    Args:
        units: all of the source.
        folder: of the dataset in the making.
        test: passages that it matches are left out, and so are the rows that name them.

    Raises:
        DataError: some rows have scores and others do not.
    """
    start = partial(_Finder, folder, source, test)
    found: dict[int, _Found] = {}
    with (
        Meter("numbering passages") as meter,
        closing(pool.process(units, start, workers)) as results,
    ):
        for unit, each in results:
            found[unit.index] = each
            meter.advance(unit.share, unit.size, len(unit.records))
    ordered = [found[index] for index in range(len(found))]
    scored = _check_scores(source, ordered)
    # Units with the passages "a b", "b c" and "d a" have the keys a b b c d a, and the sizes 2 2 2.
    sizes = [len(each.keys) for each in ordered]
    keys = np.concatenate([np.zeros(0, f"S{_KEY_BYTES}"), *(each.keys for each in ordered)])
    # Of equal keys, a stable sort has the earliest one first.
    order = np.argsort(keys, kind="stable")
    by_key = keys[order]
    # Sorted, they are a a b b c d, from the places 0 5 1 2 3 4: the first of each are 0 1 3 4.
    is_first = np.ones(len(keys), dtype=np.bool_)
    is_first[1:] = by_key[1:] != by_key[:-1]
    # Numbers go by the first place of each passage, and the table is sorted by key: the places
    # [4, 0, 2] of three sorted keys give the numbers [2, 0, 1].
    places = order[is_first]
    numbers = np.empty(len(places), dtype=np.int64)
    numbers[np.argsort(places)] = np.arange(len(places))
    left_out = np.setdiff1d(np.concatenate([keys[:0], *(each.left_out for each in ordered)]), keys)
    # An id that also has a clean line, a duplicate, keeps the number of that one.
    table = by_key[is_first]
    at = np.searchsorted(table, left_out)
    arrays = {
        _path(folder, "keys"): np.insert(table, at, left_out),
        _path(folder, "numbers"): np.insert(numbers, at, _LEFT_OUT),
    }
    for path, array in arrays.items():
        with atomic_write(path) as file:
            np.save(file, array)
    # Units begin at the places 0, 2 and 4, before which 0, 2 and 3 passages are new.
    first = np.searchsorted(np.sort(places), np.cumsum(sizes) - sizes)
    digest = hashlib.blake2b(digest_size=16)
    # Sizes belong to it: the same keys in other units are other shards.
    for array in (keys, np.array(sizes), left_out):
        digest.update(array.tobytes())
    return Numbers(first, digest.hexdigest(), scored)


def _check_scores(source: Source, found: Iterable[_Found]) -> bool:
    scored = next((each.scored for each in found if each.scored), None)
    bare = next((each.bare for each in found if each.bare), None)
    if scored and bare:
        places = (f"{shown(source.files[file])}:{line}" for file, line in (bare, scored))
        raise DataError(
            "{}: the row has no scores, and {} has. Give all rows scores, or set source.scores to "
            "null.".format(*places)
        )
    return scored is not None


class _Rows:
    """Parses records, the same way in both passes."""

    def __init__(self, source: Source, tokenizer: Tokenizer, test: Matcher | None) -> None:
        assert isinstance(source, Retrieval)
        self.source, self._tokenizer, self._test = source, tokenizer, test

    def passage(self, record: Record) -> tuple[bytes, str]:
        """Returns the key and the text of a passage with an id."""
        name, text = self.source.parse_passage(record)
        self._check(text, "passage")
        return _key(name), text

    def row(self, record: Record) -> RetrievalRow:
        """Returns a row."""
        row = self.source.parse_row(record)
        self._check(row.texts[0], "query")
        if self.source.corpus is None:
            for text in row.passages:
                self._check(text, "positive or negative")
        self.check_test("\n".join((*row.texts, *row.passages)))
        return row

    def _check(self, text: str, name: str) -> None:
        # Numbers are given before tokenizing, so what has no tokens must be known here. A text
        # with a letter has some.
        if not any(map(str.isalnum, text)) and not len(self._tokenizer.encode_batch([text])[0]):
            raise BadRecord(f"no tokens in a {name}")

    def check_test(self, text: str) -> None:
        """Raises BadRecord for text of the test."""
        if self.is_test(text):
            raise BadRecord(CONTAMINATED)

    def is_test(self, text: str) -> bool:
        """Whether it has text of the test."""
        return self._test is not None and self._test.matches(text)


class _Finder:
    """Finds the passages of units; each worker process of the first pass has one."""

    def __init__(self, folder: Path, source: Source, test: Matcher | None) -> None:
        self._rows = _Rows(source, Tokenizer.load(folder / "tokenizer", saved=True), test)

    def __call__(self, unit: Unit) -> _Found:
        keys, left_out = dict[bytes, None](), dict[bytes, None]()
        scored = bare = None
        for record in unit.records:
            try:
                if self._rows.source.is_passage(record):
                    key, text = self._rows.passage(record)
                    (left_out if self._rows.is_test(text) else keys)[key] = None
                    continue
                row = self._rows.row(record)
            except BadRecord:  # the second pass reports it
                continue
            # One row with scores and one without are enough to reject a source.
            if row.scores:
                scored = scored or (record.file, record.line)
            else:
                bare = bare or (record.file, record.line)
            if self._rows.source.corpus is None:
                keys.update(dict.fromkeys(map(_key, row.passages)))
        found, out = (np.array([*each], f"S{_KEY_BYTES}") for each in (keys, left_out))
        return _Found(found, out, scored, bare)


class RetrievalWriter(UnitWriter):
    """Writes the shards of units of retrieval: their rows, and the passages new in them."""

    splits = ("train", "heldout", PASSAGES)

    def __call__(self, unit: Unit) -> Outcome:
        self._rows = _Rows(self._source, self._tokenizer, self._test)
        self._keys, self._numbers = (
            np.load(path, mmap_mode="r")
            for path in (_path(self._folder, "keys"), _path(self._folder, "numbers"))
        )
        self._next = unit.first_passage
        return super().__call__(unit)

    def _documents(self, record: Record) -> list[Parsed]:
        if self._rows.source.is_passage(record):
            key, text = self._rows.passage(record)
            self._rows.check_test(text)
            # Numbers follow the order of first places, so an earlier number is of an earlier line.
            if self._number([key])[0] != self._next:
                raise BadRecord(f"duplicate id: {self._rows.source.parse_passage(record)[0]!r}")
            return [self._passage(record, text)]
        row = self._rows.row(record)
        numbers = self._number(list(map(_key, row.passages)))
        if (numbers == _LEFT_OUT).any():
            raise BadRecord(CONTAMINATED)
        if missing := np.flatnonzero(numbers == _MISSING).tolist():
            raise BadRecord(f"no passage has this id: {row.passages[missing[0]]!r}")
        row = replace(row, numbers=tuple(numbers.tolist()))
        split = self._split(record, row.texts[0])
        documents = [Parsed(record.file, record.line, split, list(row.texts), row)]
        # A passage is new where its number is the next one: earlier units, or earlier rows of this
        # one, have stored the others.
        if self._rows.source.corpus is None:
            for text, place in zip(row.passages, row.numbers, strict=True):
                if place == self._next:
                    documents.append(self._passage(record, text))
        return documents

    def _passage(self, record: Record, text: str) -> Parsed:
        self._next += 1
        return Parsed(record.file, record.line, PASSAGES, [text], None)

    def _number(self, keys: list[bytes]) -> Int64:
        """The numbers of passages; negative where there is none."""
        wanted = np.array(keys, f"S{_KEY_BYTES}")
        # Beyond the last key, any place will do: its key differs.
        place = np.minimum(np.searchsorted(self._keys, wanted), max(0, len(self._keys) - 1))
        if not len(self._keys):
            return np.full(len(keys), _MISSING)
        return np.where(self._keys[place] == wanted, self._numbers[place], _MISSING)

    def _hashes(self, splits: dict[str, list[tuple[Parsed, Encoded]]]) -> U64:
        found = [origin.row for members in splits.values() for origin, _ in members]
        rows = [row for row in found if isinstance(row, RetrievalRow)]
        texts = ["\n".join((*row.texts, *map(str, row.numbers))) for row in rows]
        return np.array([hashed(text, "document") for text in texts], np.uint64)

    def _encode(self, batch: list[Parsed]) -> list[Encoded | str]:
        tokens = self._tokenizer.encode_batch([each.text for each in batch])
        documents: list[Encoded | str] = []
        for each, encoded in zip(batch, tokens, strict=True):
            scores = each.row.scores if isinstance(each.row, RetrievalRow) else ()
            if len(encoded):
                labels = np.array(scores, np.float32)
                documents.append(Encoded(encoded, np.zeros(1, np.int64), labels, each.row))
            elif each.split != PASSAGES:
                documents.append("no tokens in a query")
            else:
                file = shown(self._source.files[each.file])
                raise DataError(
                    f"{file}:{each.line}: the tokenizer leaves nothing of a passage of this row. "
                    "Remove it."
                )
        return documents

    def _write(self, name: str, members: list[tuple[Parsed, Encoded]]) -> ShardInfo:
        origins = np.array([(origin.file, origin.line) for origin, _ in members], np.uint32)
        documents = [document for _, document in members]
        tokens = [document.tokens for document in documents]
        if members[0][0].split == PASSAGES:
            return write_shard(self._folder / name, tokens, origins, self._dtype)
        rows = [origin.row for origin, _ in members if isinstance(origin.row, RetrievalRow)]
        # Numbers 3 7 9 of one positive and two negatives are the sides [3] and [7, 9].
        sides = [np.split(np.array(row.numbers, np.uint32), [len(row.positives)]) for row in rows]
        return write_shard(
            self._folder / name,
            tokens,
            origins,
            self._dtype,
            [document.parts for document in documents],
            [document.labels for document in documents],
            rows if members[0][0].split == "heldout" else None,
            [(positives, negatives) for positives, negatives in sides],
        )


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()


def _path(folder: Path, name: Literal["keys", "numbers"]) -> Path:
    return folder / ".build" / f"passages.{name}"
