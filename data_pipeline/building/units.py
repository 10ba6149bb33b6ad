"""Units of work of a build: runs of records that become one shard of each split.

The limits of units and everything made from them depend on the input alone. So any number of
processes, in any order, make the same dataset, and a finished unit is never rebuilt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from data_pipeline.building import example_counts
from data_pipeline.building.decontamination import Matcher
from data_pipeline.building.special_names import SpecialNames
from data_pipeline.building.task_rows import Encoded, encode, join
from data_pipeline.format.manifest import ShardInfo, token_dtype
from data_pipeline.format.writing import write_shard
from data_pipeline.sources import BadRecord, PairSource, Record, Source, TaskSource
from data_pipeline.tokenizers import sentences
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.examples import TaskRow
from samestep.hashing import U64
from samestep.storage import atomic_write, write_text
from samestep.stored_json import JsonError, read_json

LEFT_OUT = (DUPLICATE, CONTAMINATED) = ("repeats an earlier document", "contains text of the test")
"""Reasons for leaving a document out on purpose."""
_BATCH_CHARACTERS = 2**20  # tokenized at a time; bounds the memory of the result

Item = TypeVar("Item")


@dataclass(frozen=True)
class Unit:
    """Records that are processed together.

    Attributes:
        index: position of the unit in the source; it names the unit's shards.
        records: in the order of the source.
        digest: hash of the records.
        size: bytes of the records.
        share: fraction of the source that the unit is; for progress reports only.
        left_out: positions of the records that repeat an earlier document.
        first_passage: of retrieval, number of distinct passages in the units before.
    """

    index: int
    records: list[Record]
    digest: str
    size: int
    share: float
    left_out: frozenset[int] = frozenset()
    first_passage: int = 0

    def without(self, records: frozenset[int]) -> Unit:
        """The same unit with these records left out."""
        if not records:
            return self
        digest = hashlib.blake2b(f"{self.digest} {sorted(records)}".encode(), digest_size=16)
        return replace(self, left_out=records, digest=digest.hexdigest())


def limited(records: Iterable[Record], limit: int | None) -> Iterator[Record]:
    """Yields records until `limit` bytes are reached, the record that reaches them included.

    None means all records.
    """
    if limit is None:
        yield from records
        return
    total = 0
    for record in records:
        total += len(record.data)
        # Progress toward the limit, unless the source ends first.
        yield record._replace(read=max(record.read, min(1.0, total / limit)))
        if total >= limit:
            return


def first_rows(records: Iterable[Record], count: int, first_heldout: int) -> Iterator[Record]:
    """Yields the first `count` records to train on, and all held-out ones.

    Args:
        first_heldout: index of the first held-out file; files are read in order.
    """
    for record in records:
        if record.file >= first_heldout:
            yield record
        elif count:
            count -= 1
            yield record


def _grouped(
    items: Iterable[Item], size_of: Callable[[Item], int], size: int
) -> Iterator[list[Item]]:
    """Groups items in order; a group ends with the item that brings it to `size`.

    Sizes [10, 0, 95, 5, 200, 3] in groups of 100 are [10, 0, 95], [5, 200] and [3].
    """
    group, total = list[Item](), 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


def _record_size(record: Record) -> int:
    return len(record.data)


def cut(records: Iterable[Record], size: int) -> Iterator[Unit]:
    """Splits a source into units of at least `size` bytes, but for the last one."""
    before = 0.0
    for index, group in enumerate(_grouped(records, _record_size, size)):
        read = group[-1].read
        total = sum(map(_record_size, group))
        yield Unit(index, group, _digest(group), total, read - before)
        before = read


def _digest(records: list[Record]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        # With the length, no two lists of records have the same bytes.
        digest.update(f"{record.file} {record.line} {len(record.data)} {record.problem}\n".encode())
        digest.update(record.data)
    return digest.hexdigest()


def hashed_share(text: str, purpose: str) -> float:
    """Maps a text to a number in [0, 1), uniformly, and to the same number in every process."""
    return hashed(text, purpose) / 2**64


def hashed(text: str, purpose: str) -> int:
    """A hash of a text, of 64 bits."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Outcome:
    """The result of a unit, stored beside the shards until the whole build is done.

    Attributes:
        build: digest of the settings it was made with.
        digest: of the unit.
        documents_in: number of records of the unit.
        rejected: (file, line, reason) of each record without a document.
        shards: split -> shard; without splits that have no documents.
        unknown: number of tokens that stand for text unknown to the tokenizer.
        examples: split -> number of examples under common packings, see `example_counts.count`.
        special_names: name of a special token -> number of documents that hold it as text.
    """

    build: str
    digest: str
    documents_in: int
    rejected: tuple[tuple[int, int, str], ...]
    shards: dict[str, ShardInfo]
    unknown: int
    examples: dict[str, dict[str, int]] = field(default_factory=dict)
    special_names: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes it as JSON, atomically."""
        write_text(path, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Outcome | None:
        """Reads it; None if it does not exist or is damaged."""
        try:
            # Whatever is wrong with it, the unit is simply built again.
            return read_json(path, cls)
        except (OSError, JsonError):
            return None


def outcome_path(folder: Path, index: int) -> Path:
    """Path of the outcome of unit `index` of a dataset in the making."""
    return folder / ".build" / f"{index:06d}.json"


def texts_path(folder: Path, index: int) -> Path:
    """Path of the hashes of the documents of unit `index`: uint64 [documents]."""
    return folder / ".build" / f"{index:06d}.texts"


class Parsed(NamedTuple):
    """A parsed record: texts, each tokenized separately, and for a task the row they belong to."""

    file: int
    line: int
    split: str
    texts: list[str]
    row: TaskRow | None

    @property
    def text(self) -> str:
        """All texts."""
        return "\n".join(self.texts)


class UnitWriter:
    """Tokenizes units and writes their shards and outcomes; each worker process has one."""

    splits: ClassVar[tuple[str, ...]] = ("train", "heldout")

    def __init__(
        self,
        folder: Path,
        source: Source,
        heldout_fraction: float,
        build: str,
        splitter: sentences.Splitter | None = None,
        test: Matcher | None = None,
    ) -> None:
        """Loads the dataset's tokenizer; `build` is the digest of the settings."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core already
        self._tokenizer = Tokenizer.load(folder / "tokenizer", saved=True)
        self._dtype = token_dtype(self._tokenizer.vocabulary.size)
        self._special_names = SpecialNames(self._tokenizer)
        self._folder, self._source, self._build = folder, source, build
        self._heldout_fraction, self._splitter = heldout_fraction, splitter
        self._test = test
        self._is_task = isinstance(source, TaskSource)
        self._is_pairs = isinstance(source, PairSource)

    def __call__(self, unit: Unit) -> Outcome:
        """Writes the shards of a unit, then its outcome.

        Raises:
            DataError: the disk is full or read-only.
        """
        # From the first shard on, the outcome of an earlier build with other settings is wrong.
        outcome_path(self._folder, unit.index).unlink(missing_ok=True)
        # Records are rejected twice: here if they hold no text, below if it has no tokens.
        parsed, rejected = list[Parsed](), list[tuple[int, int, str]]()
        for number, record in enumerate(unit.records):
            try:
                if number in unit.left_out:
                    raise BadRecord(DUPLICATE)
                parsed += self._documents(record)
            except BadRecord as error:
                rejected.append((record.file, record.line, str(error)))
        batches = _grouped(parsed, lambda each: sum(map(len, each.texts)), _BATCH_CHARACTERS)
        encoded = itertools.chain.from_iterable(map(self._encode, batches))
        splits: dict[str, list[tuple[Parsed, Encoded]]] = {name: [] for name in self.splits}
        for origin, document in zip(parsed, encoded, strict=True):
            if isinstance(document, str):
                rejected.append((origin.file, origin.line, document))
            else:
                splits[origin.split].append((origin, document))
        shards, unknown, examples = {}, 0, {}
        texts = [origin.text for members in splits.values() for origin, _ in members]
        with atomic_write(texts_path(self._folder, unit.index)) as file:
            np.save(file, self._hashes(splits))
        special = self._tokenizer.vocabulary.special
        for split, members in splits.items():
            if members:
                shards[split] = self._write(f"{split}-{unit.index:06d}.tar", members)
                examples[split] = self._count([document for _, document in members])
            # The only special token that text can produce is [UNK].
            unknown += sum(int(np.isin(document.tokens, special).sum()) for _, document in members)
        reasons = tuple(sorted(rejected))
        outcome = Outcome(
            self._build,
            unit.digest,
            len(unit.records),
            reasons,
            shards,
            unknown,
            examples,
            self._special_names.count(texts),
        )
        outcome.save(outcome_path(self._folder, unit.index))
        return outcome

    def _hashes(self, splits: dict[str, list[tuple[Parsed, Encoded]]]) -> U64:
        """Hashes of all documents, by which equal ones are counted."""
        texts = [origin.text for members in splits.values() for origin, _ in members]
        return np.array([hashed(text, "document") for text in texts], np.uint64)

    def _documents(self, record: Record) -> list[Parsed]:
        """Parses a record, for most sources to one document.

        Raises:
            BadRecord: it holds none.
        """
        row, source = None, self._source
        # Documents with the same key are in the same split: equal texts, rows that are scored
        # together, and all targets of a source, or held-out documents would be trained on.
        if isinstance(source, TaskSource):
            row = source.parse_row(record)
            texts = list(row.texts)
            key = row.group or "\n".join(texts)
        elif isinstance(source, PairSource):
            texts = list(source.parse_pair(record))
            key = texts[0]
        else:
            key = source.parse(record)
            texts = [key] if self._splitter is None else sentences.split(key, self._splitter)
        if self._test is not None and self._test.matches("\n".join(texts)):
            raise BadRecord(CONTAMINATED)
        return [Parsed(record.file, record.line, self._split(record, key), texts, row)]

    def _split(self, record: Record, key: str) -> str:
        """The split of a document; documents with the same key are in the same one."""
        first_heldout = self._source.first_heldout
        if first_heldout is not None:
            is_heldout = record.file >= first_heldout
        else:
            is_heldout = hashed_share(key, "heldout") < self._heldout_fraction
        return "heldout" if is_heldout else "train"

    def _encode(self, batch: list[Parsed]) -> list[Encoded | str]:
        """Returns the document of each record, or the reason why it has none."""
        if isinstance(self._source, TaskSource):
            rows = [parsed.row for parsed in batch if parsed.row is not None]
            return encode(rows, self._tokenizer, self._source.kind)
        # One call for all texts, since each has a cost of its own.
        texts = [text for parsed in batch for text in parsed.texts]
        tokens = iter(self._tokenizer.encode_batch(texts))
        documents = [join(list(itertools.islice(tokens, len(each.texts)))) for each in batch]
        # Control characters alone, for example, are normalized to nothing, and are no part.
        least, reason = 1, "no tokens"
        if self._is_pairs:
            least, reason = 2, "no tokens in the source or the target"
        return [each if len(each.parts) >= least else reason for each in documents]

    def _count(self, documents: list[Encoded]) -> dict[str, int]:
        if self._is_task or self._is_pairs:  # their packings depend on the objective
            return {}
        lengths = np.array([len(document.tokens) for document in documents], dtype=np.int64)
        has_sentences = self._splitter is not None
        sentences = [document.parts for document in documents] if has_sentences else None
        return example_counts.count(lengths, sentences)

    def _write(self, name: str, members: list[tuple[Parsed, Encoded]]) -> ShardInfo:
        origins = [(origin.file, origin.line) for origin, _ in members]
        documents = [document for _, document in members]
        # Only held-out rows are scored, so only their texts are needed again.
        is_scored = self._is_task and members[0][0].split == "heldout"
        has_parts = self._is_task or self._is_pairs or self._splitter is not None
        return write_shard(
            self._folder / name,
            [document.tokens for document in documents],
            np.array(origins, np.uint32),
            self._dtype,
            [document.parts for document in documents] if has_parts else None,
            [document.labels for document in documents] if self._is_task else None,
            [document.row for document in documents if document.row] if is_scored else None,
        )
