"""How often words are near each other: counted out of core, by sorted runs that are merged.

A pair of words (i, j) has the key i * V + j. Blocks of text give sorted keys with their counts; as
many as fit into memory are added up into a run on disk, and in the end the runs are merged.
Memory is bounded by a setting, disk space by the number of different pairs.

Counts are weighted by distance. The weights are multiples of one number, so counts are stored as
integers of 64 bits: their sums are exact, whatever the order of addition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from samestep.progress import Progress
from samestep.storage import atomic_write
from trainer.vectors.corpus import END, Ids
from trainer.vectors.windows import Int64

Float64s: TypeAlias = npt.NDArray[np.float64]

_BLOCK, _SMALLEST_BLOCK = 2**18, 2**12  # words
_BYTES_PER_PAIR = 64  # a pair in memory while runs are sorted: key, count, order, and copies


class Weights(NamedTuple):
    """The weight of a pair of words by their distance.

    Attributes:
        units: int64 [W]; words at distance d count units[d - 1] / one.
        one: number of units that make a count of 1.
    """

    units: Int64
    one: int


def harmonic(window: int) -> Weights:
    """1 / d, as in GloVe. With a window of 3, it is 6, 3 and 2 units of 1/6."""
    one = math.lcm(*range(1, window + 1))
    return Weights(one // np.arange(1, window + 1), one)


def linear(window: int) -> Weights:
    """(W - d + 1) / W, the probability to be in a window of word2vec (Levy et al. 2015)."""
    return Weights(np.arange(window, 0, -1), window)


class Pairs(NamedTuple):
    """Pairs of words by ascending key.

    Attributes:
        keys: int64 [N], i * V + j.
        units: int64 [N], counts in units of the weights.
    """

    keys: Int64
    units: Int64

    @classmethod
    def summed(cls, parts: Iterable[Pairs]) -> Pairs:
        """Adds up the counts of equal pairs."""
        keys, units = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if not len(keys):
            return cls(keys, units)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        return cls(keys[first], np.add.reduceat(units[order], first))

    def between(self, first: int, end: int) -> Pairs:
        return Pairs(self.keys[first:end], self.units[first:end])


@dataclass(frozen=True)
class Cooccurrences:
    """All pairs of words that are near each other somewhere, in both orders.

    Attributes:
        pairs: memory-mapped; by ascending i, then j.
        words: V.
        one: number of units that make a count of 1.
    """

    pairs: Pairs
    words: int
    one: int

    @classmethod
    def open(cls, folder: Path, words: int, one: int) -> Cooccurrences:
        return cls(_open(folder, "all"), words, one)

    def blocks(self, size: int) -> Iterator[tuple[Int64, Int64, Float64s]]:
        """Yields up to `size` pairs at a time: int64 i and j, and float64 counts."""
        for first in range(0, len(self.pairs.keys), size):
            keys, units = self.pairs.between(first, first + size)
            i, j = np.divmod(np.asarray(keys), self.words)
            yield i, j, units / self.one


def near(text: Ids, weights: Weights, words: int, end: int) -> Pairs:
    """The pairs of words in a block of text, in both orders.

    Args:
        text: int32 [N]; a document may begin before the block and end after it.
        words: V.
        end: only pairs with the first word before this place are counted: the next block counts the
            others.
    """
    # Each place gets the number of its document, so that no pair reaches across a border.
    document = np.cumsum(text == END)
    parts = []
    for distance, units in enumerate(weights.units.tolist(), start=1):
        before, after = text[:-distance][:end], text[distance:][:end]
        is_pair = (before != END) & (after != END)
        is_pair &= document[:-distance][:end] == document[distance:][:end]
        i, j = before[is_pair].astype(np.int64), after[is_pair].astype(np.int64)
        parts.append(
            Pairs(np.concatenate([i * words + j, j * words + i]), np.full(2 * len(i), units))
        )
    return Pairs.summed(parts)


def count(text: Ids, weights: Weights, words: int, folder: Path, memory: int) -> Cooccurrences:
    """Counts all pairs of a text, and writes them to a folder.

    Args:
        text: int32 [N], see `corpus.write_numbers`.
        memory: about the bytes that counting takes.
    """
    limit = max(1, memory // _BYTES_PER_PAIR)
    reach = len(weights.units)
    # A block has up to 2 W pairs for each word, before equal ones are added up.
    size = min(_BLOCK, max(_SMALLEST_BLOCK, limit // (2 * reach)))
    held, runs = list[Pairs](), 0
    with Progress("counting pairs", len(text)) as progress:
        for first in range(0, len(text), size):
            # The window of the last word reaches into the next block.
            block = np.asarray(text[first : first + size + reach])
            held.append(near(block, weights, words, size))
            # Sums are delayed until memory is needed: each of them sorts everything that is held.
            if sum(len(pairs.keys) for pairs in held) > limit:
                held = [Pairs.summed(held)]
                # Most pairs of a block are in others, too: only a run that stays large is written.
                if len(held[0].keys) > limit // 2:
                    _write(folder, f"run-{runs}", held)
                    held, runs = [], runs + 1
            progress.advance(min(size, len(text) - first))
    every = [_open(folder, f"run-{number}") for number in range(runs)]
    if held:
        every.append(Pairs.summed(held))
    _write(folder, "all", merged(every, limit))
    for number, kind in itertools.product(range(runs), Pairs._fields):
        (folder / f"run-{number}.{kind}").unlink()
    return Cooccurrences.open(folder, words, weights.one)


def merged(runs: list[Pairs], limit: int) -> Iterator[Pairs]:
    """Merges sorted runs; yields the pairs in parts, by ascending key.

    Args:
        limit: number of pairs in memory.
    """
    # A chunk of each run is looked at. Up to the lowest of their last keys, the chunks have all
    # pairs of the runs. With chunks of 2 and the runs (1 4 7) and (2 3 9), pairs up to 3 come
    # first: 1 2 3. Then the chunks are (4 7) and (9), and pairs up to 7 come: 4 7. Then comes 9.
    at, chunk = [0] * len(runs), max(1, limit // max(1, len(runs)))
    while left := [n for n, run in enumerate(runs) if at[n] < len(run.keys)]:
        chunks = {n: runs[n].between(at[n], at[n] + chunk) for n in left}
        bound = min(int(each.keys[-1]) for each in chunks.values())
        parts = []
        for n, each in chunks.items():
            size = int(np.searchsorted(each.keys, bound, side="right"))
            parts.append(each.between(0, size))
            at[n] += size
        yield Pairs.summed(parts)


def _write(folder: Path, name: str, parts: Iterable[Pairs]) -> None:
    """Writes sorted pairs; both files get their names only when all is written."""
    keys, units = (folder / f"{name}.{kind}" for kind in Pairs._fields)
    # The file that shows that the pairs are complete comes last: the outer block ends last.
    with atomic_write(keys) as key_file, atomic_write(units) as unit_file:
        for pairs in parts:
            key_file.write(pairs.keys.astype("<i8").tobytes())
            unit_file.write(pairs.units.astype("<i8").tobytes())


def _open(folder: Path, name: str) -> Pairs:
    return Pairs(*(_map(folder / f"{name}.{kind}") for kind in Pairs._fields))


def _map(path: Path) -> Int64:
    # An empty file cannot be mapped.
    return np.memmap(path, "<i8", mode="r") if path.stat().st_size else np.empty(0, np.int64)
