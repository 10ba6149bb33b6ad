"""Best-fit-decreasing bin packing, for bins with one side or two.

A bin is an example. With one side its size is a number of positions; with two sides it holds an
encoder's sequence and a decoder's, and each chunk needs positions on both.

The longest chunks are placed first. Each goes into the fullest bin that has room for it, and a new
bin is opened if there is none (Ding et al. 2024, "Fewer truncations improve language modeling").
With two sides, "long" and "full" refer to the scarcer side: the one of which all chunks together
need the larger fraction.

Chunks of equal cost are interchangeable, and so are bins with equal room. So both are moved in
groups, and the work grows with the number of different (cost, room) pairs instead of chunks: a
million pairs of sentences take 1.5 s. A bin that takes a chunk becomes the fullest one with room,
so it continues to take chunks of that cost while they fit; one-by-one packing would do the same.

Example with one side: chunks of 4, 3, 3 and 2 positions, bins of 6.

    cost 4, 1 chunk    no bin yet: opens bin 0                        room 2
    cost 3, 2 chunks   no bin with room 3: bin 1 takes both           room 0, closed
    cost 2, 1 chunk    bin 0 has room 2                               room 0, closed

Example with two sides: chunks of (4, 1), (2, 2) and (2, 1), bins of (6, 4). The chunks need 8 / 6
of a bin on the first side and 4 / 4 on the second, so the first side is scarcer. (4, 1) opens a bin
with room (2, 3) left; (2, 2) fills the first side of it; (2, 1) opens another bin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

import numpy as np

from data_pipeline.packing import Int64
from samestep.hashing import combine, name_key

Room: TypeAlias = tuple[int, int]

# By number of sides: the purpose that is hashed to renumber bins.
_PURPOSE = {1: name_key("bins"), 2: name_key("boxes")}


def pack(cost: Int64, size: tuple[int, ...], key: int) -> tuple[Int64, Int64]:
    """Packs chunks into few bins.

    Args:
        cost: int64 [M, sides], positions that each chunk needs; from 1 to the bin's size.
        size: positions of a bin on each side.
        key: shuffles chunks of equal cost and renumbers the bins; the bin count does not depend on
            it.

    Returns:
        The bin of each chunk, int64 [M], numbered without gaps, and the chunk's first position
        there on each side, int64 [M, sides].
    """
    sides = len(size)
    kind, placed = _place(cost, size)
    index = np.arange(len(cost))
    # The order in which chunks were placed: by descending cost, equal ones shuffled by the key.
    queue = np.lexsort((combine(key, index), -kind))
    chosen = np.empty_like(placed)
    chosen[queue] = placed

    # Bins were opened from the longest chunk to the shortest. Renumber them at random, or training
    # would start with the longest documents.
    opened = int(chosen.max(initial=-1)) + 1
    shuffled = np.argsort(combine(key, _PURPOSE[sides], np.arange(opened)), kind="stable")
    chosen = np.argsort(shuffled)[chosen]  # argsort inverts a permutation

    # Within a bin a chunk begins where the chunks before it end: in placing order with one side,
    # in document order with two.
    order = queue if sides == 1 else index
    order = order[np.argsort(chosen[order], kind="stable")]
    before = np.cumsum(cost[order], axis=0) - cost[order]
    first_of_bin = np.searchsorted(chosen[order], chosen[order])
    offset = np.empty_like(cost)
    offset[order] = before - before[first_of_bin]
    return chosen, offset


def count(cost: Int64, size: tuple[int, ...]) -> int:
    """Returns the number of bins of `pack`, faster."""
    _, placed = _place(cost, size)
    return int(placed.max(initial=-1)) + 1


def _place(cost: Int64, size: tuple[int, ...]) -> tuple[Int64, Int64]:
    """Returns the kind of each chunk, and the bins of the chunks in descending order of kind.

    A kind is all costs of a chunk in one number, with the scarcer side in the upper 32 bits.
    """
    one_sided = len(size) == 1
    if one_sided:  # A second side of which chunks need nothing, and which is never full.
        cost = np.hstack((cost, np.zeros_like(cost)))
        size = (*size, 1)
    scarcer = int(np.argmax(cost.sum(axis=0) / size))
    other = 1 - scarcer
    kind = cost[:, scarcer] << 32 | cost[:, other]
    kinds, chunks = np.unique(kind, return_counts=True)
    longest_first = zip(kinds[::-1].tolist(), chunks[::-1].tolist(), strict=True)
    groups = ((kind >> 32, kind & 0xFFFF_FFFF, count) for kind, count in longest_first)
    return kind, _best_fit(groups, (size[scarcer], size[other]), oldest_first=one_sided)


def _best_fit(kinds: Iterable[tuple[int, int, int]], size: Room, oldest_first: bool) -> Int64:
    """Places groups of chunks, the longest first.

    Args:
        kinds: cost on the scarcer side, cost on the other side, number of chunks.
        size: of a bin.
        oldest_first: whether the oldest of the bins with equal room are filled first, rather than
            the newest.

    Returns:
        The bins of the chunks, in the order of `kinds`.
    """
    with_room = _OpenBins(size[0], oldest_first)
    opened = 0
    chosen: list[int] = []  # bins, one entry for each time that chunks are moved into it
    taken: list[int] = []  # the number of chunks moved into it then
    for a, b, left in kinds:
        # Rooms in ascending order, so the fullest bins come first. New bins come last.
        for room in chain(with_room.rooms(a, b), [size]):
            fit = room[0] // a
            if b:
                fit = min(fit, room[1] // b)
            wanted = -(-left // fit)  # bins, for all the chunks that are left
            if room is size:
                bins = list(range(opened, opened + wanted))
                opened += wanted
            else:
                bins = with_room.take(room, wanted)
            # Each bin takes `fit` chunks, except that the last one may take only the rest.
            moved = min(left, fit * len(bins))
            filled, rest = divmod(moved, fit)
            for group, each in ((bins[:filled], fit), (bins[filled:], rest)):
                with_room.add((room[0] - each * a, room[1] - each * b), group)
                taken += [each] * len(group)
            chosen += bins
            left -= moved
            if not left:
                break
    return np.repeat(np.array(chosen, dtype=np.int64), np.array(taken, dtype=np.int64))


class _OpenBins:
    """Bins that are not full, by their room; bit sets find the next larger room at once.

    For example, bins 4 and 7 with room (2, 3) and bin 5 with room (2, 1): bit 2 of `_first`, bits 3
    and 1 of `_second[2]`, and `_bins` is {(2, 3): [4, 7], (2, 1): [5]}.
    """

    def __init__(self, width: int, oldest_first: bool) -> None:
        # Bit x: there are bins with x free positions on the first side.
        self._first = 0
        # Element x, bit y: there are bins with x free positions on the first side, y on the second.
        self._second = [0] * (width + 1)
        self._bins: defaultdict[Room, list[int]] = defaultdict(list)
        self._oldest_first = oldest_first

    def rooms(self, a: int, b: int) -> Iterator[Room]:
        """Yields the existing rooms of at least (a, b), in ascending order."""
        for x in _bits(self._first, a):
            for y in _bits(self._second[x], b):
                yield x, y

    def take(self, room: Room, most: int) -> list[int]:
        """Removes up to `most` bins with a room."""
        bins = self._bins[room]
        # The choice among equal bins is arbitrary, but another one would change the data order of
        # existing runs.
        part = slice(most) if self._oldest_first else slice(-most, None)
        taken = bins[part]
        del bins[part]
        if not bins:
            x, y = room
            self._second[x] ^= 1 << y
            if not self._second[x]:
                self._first ^= 1 << x
        return taken

    def add(self, room: Room, bins: list[int]) -> None:
        """Adds bins with a room; bins that are full on one side are dropped."""
        x, y = room
        if bins and x and y:
            self._bins[room] += bins
            self._second[x] |= 1 << y
            self._first |= 1 << x


def _bits(number: int, least: int) -> Iterator[int]:
    """Yields the indices of the bits that are set, from `least` on.

    For example, 0b10110 from 2 on gives 2 and 4.
    """
    number >>= least
    while number:
        lowest = number & -number
        yield least + lowest.bit_length() - 1
        number ^= lowest
