"""The text of a dataset as a file of word numbers.

Documents of the training split are read twice: to count their words, and to write the numbers of
the frequent ones. Both passes work on blocks of documents, in threads, and put the results together
in the order of the blocks; so the number of threads changes nothing.

A word is written as tokens, "un ##want ##ed" for example. Its tokens are hashed into a key of 64
bits, so that a block is counted by sorting keys, and only distinct words are decoded to text.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Shard
from data_pipeline.packing import Int64, ranges
from data_pipeline.reading.dataset import Dataset
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import ConfigError, DataError
from samestep.hashing import U64, mix
from samestep.progress import Progress
from samestep.storage import atomic_write, write_text
from samestep.stored_json import Count, JsonError, damage_of, read_json
from trainer.vectors.settings import Units

Ids: TypeAlias = npt.NDArray[np.int32]
T = TypeVar("T")


def _marks() -> str:
    """Combining marks, as ranges for a character class of `re`."""
    every = range(sys.maxunicode + 1)
    marks = {code for code in every if unicodedata.category(chr(code)).startswith("M")}
    # Ranges are matched four times as fast as 2,400 single characters.
    first = sorted(code for code in marks if code - 1 not in marks)
    last = sorted(code for code in marks if code + 1 not in marks)
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(first, last, strict=True))


MARKS = _marks()
"""Vowel signs of Hindi, vowels of Arabic, accents behind their letter: \\w has none of them."""
_PART = rf"\w[\w{MARKS}]*"
WORD = re.compile(rf"{_PART}(?:['\u2019-]{_PART})*")
"""A word in a text: punctuation belongs to none."""
END = -1
"""Stands after the words of each document."""

_BLOCK_TOKENS = 2**19
_MOST_WORDS_BYTES = 2**30


@dataclass(frozen=True)
class Words:
    """The words that get a vector, from the most frequent one on.

    Attributes:
        names: V words; of equally frequent ones, the first in alphabetical order comes first.
        counts: int64 [V], how often each one is in the text.
        tokens: int64 [V], the token of each one; None unless the units are tokens.
    """

    names: list[str]
    counts: Int64
    tokens: Int64 | None

    def save(self, path: Path) -> None:
        """Writes the words to a file, as JSON."""
        tokens = None if self.tokens is None else self.tokens.tolist()
        write_text(path, json.dumps([self.names, self.counts.tolist(), tokens]))

    @classmethod
    def load(cls, path: Path) -> Words:
        """Reads the words from a file that `save` has written."""
        with damage_of(path, DataError, f"Remove {path.parent} to start over."):
            names, counts, tokens = read_json(
                path, tuple[list[str], list[Count], list[Count] | None], _MOST_WORDS_BYTES
            )
            if not len(names) == len(counts) == len(counts if tokens is None else tokens):
                raise JsonError("has lists of different lengths")
        return cls(names, np.array(counts), None if tokens is None else np.array(tokens))


class _Occurrences(NamedTuple):
    """The words of a block.

    Attributes:
        keys: uint64 [M], hash of the tokens of each word.
        document: int64 [M], the document of each word.
        first, length: int64 [M], its tokens, as a range of `tokens`.
        tokens: int64 [T], of the block.
    """

    keys: U64
    document: Int64
    first: Int64
    length: Int64
    tokens: Int64


class _Distinct(NamedTuple):
    """Distinct words of a block, by ascending key.

    Attributes:
        keys: uint64 [M].
        counts: int64 [M].
        length: int64 [M], number of tokens of each one.
        tokens: int64, the tokens of all of them, end to end.
    """

    keys: U64
    counts: Int64
    length: Int64
    tokens: Int64


class Splitter:
    """Splits documents into words, by the marks of their tokenizer.

    Raises:
        ConfigError: the tokenizer does not mark where words begin.
    """

    def __init__(self, tokenizer: Tokenizer, units: Units) -> None:
        vocabulary = tokenizer.vocabulary
        self._continues = np.zeros(vocabulary.size, dtype=np.bool_)
        self._special = np.zeros(vocabulary.size, dtype=np.bool_)
        self._special[[*vocabulary.special, *vocabulary.sentinels]] = True
        if units == "words":
            if vocabulary.continuing is None:
                raise ConfigError(
                    "--units is words, and the dataset's tokenizer does not mark where words "
                    "begin. Use --units tokens."
                )
            self._continues[list(vocabulary.continuing)] = True

    def __call__(self, shard: Shard, documents: slice) -> _Occurrences:
        """Finds the words of a block of documents; special tokens are none."""
        start, length = shard.start[documents], shard.length[documents]
        tokens = shard.tokens[ranges(start, length)].astype(np.int64)
        document = np.repeat(np.arange(len(length)), length)
        first, count = self.split(tokens, document)
        if not len(first):
            return _Occurrences(np.empty(0, np.uint64), document, first, first, tokens)
        # The place of a token in its word counts: "ab ##c" and "c ##ab" are different words. Two
        # of n words have the same key with a probability of n * n / 2**65.
        place = np.arange(len(tokens)) - np.repeat(first, count)
        keys = np.add.reduceat(mix(tokens + (place << 32)), first)
        words = self.is_word(tokens[first])
        first, count = first[words], count[words]
        return _Occurrences(keys[words], document[first], first, count, tokens)

    def split(self, tokens: Int64, document: Int64) -> tuple[Int64, Int64]:
        """The ranges of words, and of special tokens: first token and number of tokens."""
        special = self._special[tokens]
        # A word ends before a token that begins one, at the end of a document, and on both sides of
        # a special token: [UNK] stands for a word of its own.
        begins = ~self._continues[tokens] | special
        begins[1:] |= special[:-1] | (document[1:] != document[:-1])
        begins[:1] = True
        first = np.flatnonzero(begins)
        return first, np.diff(first, append=len(tokens))

    def is_word(self, tokens: Int64) -> npt.NDArray[np.bool_]:
        """Whether tokens are not special."""
        return ~self._special[tokens]

    def distinct(self, shard: Shard, documents: slice) -> _Distinct:
        """Counts the words of a block of documents."""
        found = self(shard, documents)
        keys, at, counts = np.unique(found.keys, return_index=True, return_counts=True)
        length = found.length[at]
        return _Distinct(keys, counts, length, found.tokens[ranges(found.first[at], length)])


def words_in(text: str, tokenizer: Tokenizer) -> list[str]:
    """The words of a short text, as they are in a dataset of the tokenizer."""
    splitter = Splitter(tokenizer, "words")
    tokens = tokenizer.encode_batch([text])[0].astype(np.int64)
    first, count = splitter.split(tokens, np.zeros_like(tokens))
    is_word = splitter.is_word(tokens[first])
    parts = [tokens[at : at + n] for at, n in zip(first[is_word], count[is_word], strict=True)]
    return [word for part in parts for word in WORD.findall(tokenizer.decode(part.tolist()))]


@dataclass
class _Table:
    """All distinct words so far.

    Attributes:
        keys: uint64 [M], ascending.
        counts: int64 [M].
        number: int64 [M], the place of each word in the order in which they came.
        lengths, tokens: of the words in that order, in parts.
    """

    keys: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    counts: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    number: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: list[Int64] = field(default_factory=list)
    tokens: list[npt.NDArray[np.uint32]] = field(default_factory=list)

    def add(self, block: _Distinct) -> None:
        at = np.searchsorted(self.keys, block.keys)
        known = np.zeros(len(at), dtype=np.bool_)
        inside = at < len(self.keys)
        known[inside] = self.keys[at[inside]] == block.keys[inside]
        self.counts[at[known]] += block.counts[known]
        new = ~known
        # Tokens are appended and stay where they are; only keys, counts and numbers are sorted in.
        number = len(self.keys) + np.arange(np.count_nonzero(new))
        self.keys = np.insert(self.keys, at[new], block.keys[new])
        self.counts = np.insert(self.counts, at[new], block.counts[new])
        self.number = np.insert(self.number, at[new], number)
        self.lengths.append(block.length[new])
        self.tokens.append(block.tokens[np.repeat(new, block.length)].astype(np.uint32))


class Encoding(NamedTuple):
    """From the key of a word to the numbers of the words in it.

    "Hello," is one word to byte-level BPE, and its text has one word, "Hello". Most keys have one;
    those without a frequent word have none.

    Attributes:
        keys: uint64 [M], ascending.
        first, length: int64 [M], the numbers of each key, as a range of `numbers`.
        numbers: int32.
    """

    keys: U64
    first: Int64
    length: Int64
    numbers: Ids


def count_words(
    dataset: Dataset, splitter: Splitter, units: Units, min_count: int, workers: int
) -> tuple[Words, Encoding]:
    """Counts the words of the training split, and chooses those that get a vector.

    Args:
        workers: number of threads.

    Raises:
        DataError: the split is empty, a shard is damaged, or no word is frequent enough.
    """
    table = _Table()
    documents = sum(shard.documents for shard in dataset.shards("train"))
    with Progress("counting words", documents) as progress:
        for done, block in _in_blocks(dataset, splitter.distinct, workers, verify=True):
            table.add(block)
            progress.advance(done)
    # Several keys may have one name ("play" and "play," of BPE), and one key several names.
    names, parts, count = _named(table, dataset.tokenizer, units)
    every = np.zeros(len(names), dtype=np.int64)
    np.add.at(every, parts, np.repeat(table.counts, count))
    frequent = np.flatnonzero(every >= min_count).tolist()
    kept = np.array(sorted(frequent, key=lambda at: (-every[at], names[at])), dtype=np.int64)
    if not len(kept):
        most = f"the most frequent word has {every.max()}" if len(names) else "it has no words"
        raise DataError(
            f"no word of {dataset.name} is there {min_count} times ({most}). Lower --min-count, or "
            "build the dataset from more text."
        )
    number = np.full(len(names), END, dtype=np.int32)
    number[kept] = np.arange(len(kept))
    numbers = number[parts]
    has_number = numbers != END
    key = np.repeat(np.arange(len(count)), count)[has_number]
    count = np.bincount(key, minlength=len(count))
    encoding = Encoding(table.keys, np.cumsum(count) - count, count, numbers[has_number])
    tokens = None
    if units == "tokens":
        flat = np.concatenate(table.tokens).astype(np.int64)
        tokens = flat[table.number][kept]
    return Words([names[index] for index in kept.tolist()], every[kept], tokens), encoding


def _named(table: _Table, tokenizer: Tokenizer, units: Units) -> tuple[list[str], Int64, Int64]:
    """Decodes the distinct words.

    Returns:
        The names; int64, indices into them, of all keys end to end; int64 [M], the number of
        indices of each key.
    """
    if not table.keys.size:
        return [], np.empty(0, np.int64), np.empty(0, np.int64)
    lengths, tokens = np.concatenate(table.lengths), np.concatenate(table.tokens).tolist()
    if units == "tokens":
        names = [tokenizer.token(tokens[at]) for at in table.number.tolist()]
        return names, np.arange(len(names)), np.ones(len(names), dtype=np.int64)
    ends = np.cumsum(lengths)
    known: dict[str, int] = {}
    parts, counts = list[int](), list[int]()
    for first, end in zip(
        (ends - lengths)[table.number].tolist(), ends[table.number].tolist(), strict=True
    ):
        words = WORD.findall(tokenizer.decode(tokens[first:end]))
        parts += [known.setdefault(word, len(known)) for word in words]
        counts.append(len(words))
    return list(known), np.array(parts, dtype=np.int64), np.array(counts, dtype=np.int64)


def write_numbers(
    dataset: Dataset, splitter: Splitter, encoding: Encoding, path: Path, workers: int
) -> None:
    """Writes the text of the training split: int32, the words of each document, then `END`."""

    def encode(shard: Shard, documents: slice) -> Ids:
        found = splitter(shard, documents)
        at = np.searchsorted(encoding.keys, found.keys)
        count = encoding.length[at]
        numbers = encoding.numbers[ranges(encoding.first[at], count)]
        # Words may have become none or several, so each number needs its document again.
        document = np.repeat(found.document, count)
        # Documents without a frequent word leave nothing behind.
        last = np.flatnonzero(np.diff(document, append=-1)) + 1
        return np.insert(numbers, last, END)

    documents = sum(shard.documents for shard in dataset.shards("train"))
    with Progress("numbering words", documents) as progress, atomic_write(path) as file:
        for done, numbers in _in_blocks(dataset, encode, workers, verify=False):
            file.write(numbers.astype("<i4").tobytes())
            progress.advance(done)


def _in_blocks(
    dataset: Dataset, read: Callable[[Shard, slice], T], workers: int, *, verify: bool
) -> Iterator[tuple[int, T]]:
    """Applies a function to blocks of documents; yields (documents, result) in their order."""
    blocks = _blocks(dataset, verify)
    with ThreadPoolExecutor(workers) as pool:
        # As many blocks as threads at a time, so that results do not pile up.
        while group := list(itertools.islice(blocks, workers)):
            results = pool.map(lambda block: read(*block), group)
            for (_, documents), result in zip(group, results, strict=True):
                yield documents.stop - documents.start, result


def _blocks(dataset: Dataset, verify: bool) -> Iterator[tuple[Shard, slice]]:
    """The documents of the training split, about `_BLOCK_TOKENS` at a time."""
    for info in dataset.shards("train"):
        shard = dataset.open_shard(info, verify=verify)
        # Documents of 6, 8 and 3 tokens in blocks of 10 end at 6, 14 and 17, and so are in the
        # blocks 0, 1 and 1.
        block = np.cumsum(shard.length) // _BLOCK_TOKENS
        first = np.flatnonzero(np.diff(block, prepend=-1)).tolist()
        for begin, end in itertools.pairwise([*first, len(block)]):
            yield shard, slice(begin, end)
