"""The units of work of a build: a run of records that becomes one shard of each split.

Where one unit ends and the next begins, and all that comes out of one, depends on the input alone, so any number of
processes in any order make the same dataset, and a finished unit never needs to be made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline import sentences
from data_pipeline.manifest import ShardInfo, token_dtype
from data_pipeline.packing import Int64
from data_pipeline.shards import Tokens, write_shard
from data_pipeline.sources import BadRecord, PairSource, Record, Source
from data_pipeline.tokenization import Tokenizer
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
    """The records up to the one with which `limit` bytes are reached, that one included; None means all of them."""
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
    """Cuts a source into units of `size` bytes; each ends with the record that reaches it, so a unit is never empty."""
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
    """Maps a text to [0, 1), uniformly, the same in every process; equal texts go to the same place."""
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
            return cls(tree["build"], tree["digest"], tree["documents_in"], rejected, shards, tree["unknown"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def outcome_path(folder: Path, index: int) -> Path:
    """Where the outcome of unit `index` of a dataset being built is kept."""
    return folder / ".build" / f"{index:06d}.json"


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
        """Loads the dataset's tokenizer; `build` is the digest of the settings, stored with every outcome."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
        self._tokenizer = Tokenizer.load(folder / "tokenizer")
        self._dtype = token_dtype(self._tokenizer.vocabulary.size)
        self._folder, self._source, self._heldout_fraction, self._build = folder, source, heldout_fraction, build
        self._splitter, self._is_pairs = splitter, isinstance(source, PairSource)

    def __call__(self, unit: Unit) -> Outcome:
        """Writes the unit's shards, then its outcome.

        Raises:
            DataError: the disk does not take them.
        """
        # From the first shard on, what an earlier build of other settings said about this unit would be wrong.
        outcome_path(self._folder, unit.index).unlink(missing_ok=True)
        texts, heldout = list[list[str]](), list[bool]()
        origin, rejected = list[tuple[int, int]](), list[tuple[int, int, str]]()
        for record in unit.records:
            try:
                key, parts = self._parse(record)
                texts.append(parts)
                heldout.append(hashed_share(key, "heldout") < self._heldout_fraction)
                origin.append((record.file, record.line))
            except BadRecord as error:
                rejected.append((record.file, record.line, str(error)))
        encoded = [document for batch in _batches(texts) for document in self._encode(batch)]
        documents = [tokens for tokens, _ in encoded]
        # Text of nothing but control characters, say, normalises to nothing.
        sound = [len(parts) == 2 if self._is_pairs else len(tokens) > 0 for tokens, parts in encoded]
        reason = "no tokens in the source or the target" if self._is_pairs else "no tokens"
        rejected += [(*place, reason) for place, good in zip(origin, sound, strict=True) if not good]
        shards = {}
        for split, chosen in (("train", False), ("heldout", True)):
            members = [i for i, good in enumerate(sound) if heldout[i] == chosen and good]
            if members:
                shards[split] = write_shard(
                    self._folder / f"{split}-{unit.index:06d}.tar",
                    [documents[i] for i in members],
                    np.array([origin[i] for i in members], np.uint32),
                    self._dtype,
                    [encoded[i][1] for i in members] if self._splitter or self._is_pairs else None,
                )
        # Of the special tokens, text produces no other.
        unknown = sum(int(np.isin(tokens, self._tokenizer.vocabulary.special).sum()) for tokens in documents)
        outcome = Outcome(self._build, unit.digest, len(unit.records), tuple(sorted(rejected)), shards, unknown)
        outcome.save(outcome_path(self._folder, unit.index))
        return outcome

    def _parse(self, record: Record) -> tuple[str, list[str]]:
        """The text whose hash chooses the split, and the parts that are tokenised each by itself."""
        if isinstance(self._source, PairSource):
            source, target = self._source.parse_pair(record)
            return source, [source, target]  # so that all targets of a source go to the same split
        text = self._source.parse(record)
        return text, [text] if self._splitter is None else sentences.split(text, self._splitter)

    def _encode(self, texts: list[list[str]]) -> list[tuple[Tokens, Int64]]:
        """The tokens of each text and, where it may have several parts, the offsets of their first tokens."""
        encoded = self._tokenizer.encode_batch(list(itertools.chain.from_iterable(texts)))
        if self._splitter is None and not self._is_pairs:
            return [(tokens, np.zeros(0, dtype=np.int64)) for tokens in encoded]
        remaining = iter(encoded)
        return [_join(list(itertools.islice(remaining, len(parts)))) for parts in texts]


def _join(parts: list[Tokens]) -> tuple[Tokens, Int64]:
    """Puts the parts of a text together: all tokens, and the offsets of the first ones."""
    length = np.array([len(part) for part in parts])
    return np.concatenate(parts), (np.cumsum(length) - length)[length > 0]


def _batches(texts: list[list[str]]) -> Iterator[list[list[str]]]:
    """Groups texts by about a million characters, to bound the memory of the tokenizer's answer."""
    batch, characters = list[list[str]](), 0
    for text in texts:
        batch.append(text)
        characters += sum(map(len, text))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
