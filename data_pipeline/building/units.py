"""The units of work of a build: a run of records that becomes one shard of each split.

Where one unit ends and the next begins, and all that comes out of one, depends on the input alone,
so any number of processes in any order make the same dataset, and a finished unit never needs to be
made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipeline.building.task_rows import Encoded, encode
from data_pipeline.format.manifest import ShardInfo, token_dtype
from data_pipeline.format.shards import Tokens, write_shard
from data_pipeline.sources import BadRecord, PairSource, Record, Source, TaskSource
from data_pipeline.tokenizers import sentences
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.examples import TaskRow
from trainer.storage import write_text

_BATCH_CHARACTERS = 2**20


@dataclass(frozen=True)
class Unit:
    """Records that are processed together.

    Attributes:
        index: position of the unit in the source; it names the unit's shards.
        records: in the order of the source.
        digest: hash of the records.
        size: bytes of the records.
        share: the part of the source that this unit is, in [0, 1]; for progress reports only.
    """

    index: int
    records: list[Record]
    digest: str
    size: int
    share: float


def limited(records: Iterable[Record], limit: int | None) -> Iterator[Record]:
    """The records up to the one with which `limit` bytes are reached, that one included.

    None means all of them.
    """
    if limit is None:
        yield from records
        return
    total = 0
    for record in records:
        total += len(record.data)
        yield record._replace(read=max(record.read, min(1.0, total / limit)))
        if total >= limit:
            return


def cut(records: Iterable[Record], size: int) -> Iterator[Unit]:
    """Cuts a source into units of `size` bytes.

    Each ends with the record that reaches it, so a unit is never empty.
    """
    index, gathered, total, read = 0, list[Record](), 0, 0.0
    for record in records:
        gathered.append(record)
        total += len(record.data)
        if total >= size:
            yield Unit(index, gathered, _digest(gathered), total, record.read - read)
            index, gathered, total, read = index + 1, [], 0, record.read
    if gathered:
        yield Unit(index, gathered, _digest(gathered), total, 1 - read)


def _digest(records: list[Record]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        digest.update(f"{record.file} {record.line} {len(record.data)} {record.problem}\n".encode())
        digest.update(record.data)
    return digest.hexdigest()


def hashed_share(text: str, purpose: str) -> float:
    """Maps a text to [0, 1), uniformly, the same in every process; equal texts go to the same
    place.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") / 2**64


@dataclass(frozen=True)
class Outcome:
    """What became of a unit; kept beside the shards until the whole build is done.

    Attributes:
        build: digest of the settings it was made with.
        digest: of the unit.
        documents_in: records of the unit.
        rejected: (file, line, reason) of each record that holds no document.
        shards: split -> shard; a split without documents is not in here.
        unknown: tokens in them that stand for what the tokenizer does not know.
    """

    build: str
    digest: str
    documents_in: int
    rejected: tuple[tuple[int, int, str], ...]
    shards: dict[str, ShardInfo]
    unknown: int

    def save(self, path: Path) -> None:
        """Writes it as JSON, atomically."""
        write_text(path, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Outcome | None:
        """Reads it back; None if it is not there or not readable."""
        try:
            tree = json.loads(path.read_bytes())
            shards = {split: ShardInfo(**shard) for split, shard in tree["shards"].items()}
            rejected = tuple((file, line, reason) for file, line, reason in tree["rejected"])
            return cls(
                tree["build"],
                tree["digest"],
                tree["documents_in"],
                rejected,
                shards,
                tree["unknown"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def outcome_path(folder: Path, index: int) -> Path:
    """Where the outcome of unit `index` of a dataset being built is kept."""
    return folder / ".build" / f"{index:06d}.json"


class _Parsed(NamedTuple):
    """What a record holds: texts that are tokenised each by itself, and for a task the row that
    they are of.
    """

    file: int
    line: int
    heldout: bool
    texts: list[str]
    row: TaskRow | None = None


class UnitWriter:
    """Tokenises units and writes their shards and outcomes; each worker process has one."""

    def __init__(
        self,
        folder: Path,
        source: Source,
        heldout_fraction: float,
        build: str,
        splitter: sentences.Splitter | None = None,
    ) -> None:
        """Loads the dataset's tokenizer.

        `build` is the digest of the settings, stored with every outcome.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
        self._tokenizer = Tokenizer.load(folder / "tokenizer")
        self._dtype = token_dtype(self._tokenizer.vocabulary.size)
        self._folder, self._source, self._heldout_fraction, self._build = (
            folder,
            source,
            heldout_fraction,
            build,
        )
        self._splitter = splitter

    def __call__(self, unit: Unit) -> Outcome:
        """Writes the unit's shards, then its outcome.

        Raises:
            DataError: the disk does not take them.
        """
        # From the first shard on, what an earlier build of other settings said about this unit
        # would be wrong.
        outcome_path(self._folder, unit.index).unlink(missing_ok=True)
        parsed, rejected = list[_Parsed](), list[tuple[int, int, str]]()
        for record in unit.records:
            try:
                parsed.append(self._parse(record))
            except BadRecord as error:
                rejected.append((record.file, record.line, str(error)))
        encoded = (document for batch in _batches(parsed) for document in self._encode(batch))
        members: dict[bool, list[tuple[_Parsed, Encoded]]] = {False: [], True: []}
        for origin, document in zip(parsed, encoded, strict=True):
            if isinstance(document, str):
                rejected.append((origin.file, origin.line, document))
            else:
                members[origin.heldout].append((origin, document))
        shards, unknown = {}, 0
        for split, heldout in (("train", False), ("heldout", True)):
            if members[heldout]:
                shards[split] = self._write(
                    f"{split}-{unit.index:06d}.tar", *zip(*members[heldout], strict=True)
                )
            # Of the special tokens, text produces no other.
            special = self._tokenizer.vocabulary.special
            unknown += sum(
                int(np.isin(document.tokens, special).sum()) for _, document in members[heldout]
            )
        outcome = Outcome(
            self._build, unit.digest, len(unit.records), tuple(sorted(rejected)), shards, unknown
        )
        outcome.save(outcome_path(self._folder, unit.index))
        return outcome

    def _parse(self, record: Record) -> _Parsed:
        row, source = None, self._source
        if isinstance(source, TaskSource):
            row = source.parse_row(record)
            texts = list(row.texts)
            key = row.group or "\n".join(texts)  # rows that are scored together stay together
        elif isinstance(source, PairSource):
            texts = list(source.parse_pair(record))
            key = texts[0]  # so that all targets of a source go to the same split
        else:
            key = source.parse(record)
            texts = [key] if self._splitter is None else sentences.split(key, self._splitter)
        if isinstance(source, (TaskSource, PairSource)) and source.first_heldout is not None:
            heldout = record.file >= source.first_heldout
        else:
            heldout = hashed_share(key, "heldout") < self._heldout_fraction
        return _Parsed(record.file, record.line, heldout, texts, row)

    def _encode(self, batch: Sequence[_Parsed]) -> list[Encoded | str]:
        """The document of each record, or why it holds none."""
        if isinstance(self._source, TaskSource):
            rows = [parsed.row for parsed in batch if parsed.row is not None]
            return encode(rows, self._tokenizer, self._source.kind)
        remaining = iter(
            self._tokenizer.encode_batch([text for parsed in batch for text in parsed.texts])
        )
        documents = [
            _join(list(itertools.islice(remaining, len(parsed.texts)))) for parsed in batch
        ]
        # Text of nothing but control characters, say, normalises to nothing.
        if isinstance(self._source, PairSource):
            return [
                each if len(each.parts) == 2 else "no tokens in the source or the target"
                for each in documents
            ]
        return [each if len(each.tokens) else "no tokens" for each in documents]

    def _write(
        self, name: str, origins: Sequence[_Parsed], documents: Sequence[Encoded]
    ) -> ShardInfo:
        is_task = isinstance(self._source, TaskSource)
        has_parts = is_task or isinstance(self._source, PairSource) or self._splitter is not None
        rows = [document.row for document in documents if document.row is not None]
        return write_shard(
            self._folder / name,
            [document.tokens for document in documents],
            np.array([(origin.file, origin.line) for origin in origins], np.uint32),
            self._dtype,
            [document.parts for document in documents] if has_parts else None,
            [document.labels for document in documents] if is_task else None,
            rows if is_task and origins[0].heldout else None,
        )


def _join(texts: list[Tokens]) -> Encoded:
    """Puts the texts of a document together."""
    length = np.array([len(text) for text in texts])
    return Encoded(np.concatenate(texts), (np.cumsum(length) - length)[length > 0])


def _batches(documents: list[_Parsed]) -> Iterator[list[_Parsed]]:
    """Groups documents by about a million characters, to bound the memory of the tokenizer's
    answer.
    """
    batch, characters = list[_Parsed](), 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, document.texts))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
