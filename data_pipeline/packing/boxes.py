"""Packs chunks that need positions on two sides of an example, an encoder's and a decoder's.

Best-fit-decreasing by the scarcer side, of which all chunks together need the larger fraction. The
longest chunks come first, and each goes into the example with the least room left on that side,
among those with room on both sides. Chunks of equal cost are interchangeable, and so are examples
with equal room, so both are moved in groups: a million pairs of sentences take 1.5 s.

For example, examples of 6 + 4 positions and chunks of (4, 1), (2, 2) and (2, 1): all three need 8
of 6 on the first side and 4 of 4 on the second, so the first is scarcer. (4, 1) opens an example
with room (2, 3); (2, 2) fills its first side; (2, 1) opens another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.hashing import combine, name_key

Int64: TypeAlias = npt.NDArray[np.int64]
Room: TypeAlias = tuple[int, int]

_BOXES = name_key("boxes")


def pack_boxes(cost: Int64, size: Room, key: int = 0) -> tuple[Int64, Int64]:
    """Packs chunks into few examples.

    Args:
        cost: int64 [M, 2], positions of each chunk on either side; from 1 to the size of an
            example.
        size: positions of an example on either side.
        key: shuffles chunks of equal cost, and the order of examples; does not change their number.

    Returns:
        The example of each chunk, int64 [M], numbered without gaps, and the chunk's first position
        there on either side, int64 [M, 2].
    """
    kind, placed = _place(cost, size)
    example = np.empty_like(placed)
    example[np.lexsort((combine(key, np.arange(len(kind))), -kind))] = placed
    # Examples were opened from the longest chunk to the shortest. Renumber them at random, so that
    # training does not start with the longest texts.
    opened = int(example.max(initial=-1)) + 1
    number = np.empty(opened, dtype=np.int64)
    number[np.argsort(combine(key, _BOXES, np.arange(opened)), kind="stable")] = np.arange(opened)
    example = number[example]

    # A chunk begins where the chunks before it in the same example end.
    order = np.argsort(example, kind="stable")
    before = np.cumsum(cost[order], axis=0) - cost[order]
    offset = np.empty_like(cost)
    offset[order] = before - before[np.searchsorted(example[order], example[order])]
    return example, offset


def count_boxes(cost: Int64, size: Room) -> int:
    """Returns the number of examples of `pack_boxes`, faster."""
    return int(_place(cost, size)[1].max(initial=-1)) + 1


def _place(cost: Int64, size: Room) -> tuple[Int64, Int64]:
    """Each chunk's costs as one number, the scarcer side first; and the examples of the chunks.

    The examples are in descending order of that number.
    """
    scarcer = int(np.argmax(cost.sum(axis=0) / size))
    kind = cost[:, scarcer] << 32 | cost[:, 1 - scarcer]
    kinds, members = np.unique(kind, return_counts=True)
    descending = zip(kinds[::-1].tolist(), members[::-1].tolist(), strict=True)
    groups = ((kind >> 32, kind & 0xFFFF_FFFF, chunks) for kind, chunks in descending)
    return kind, _best_fit(groups, (size[scarcer], size[1 - scarcer]))


def _best_fit(kinds: Iterable[tuple[int, int, int]], size: Room) -> Int64:
    """Places groups of chunks (cost, cost on the other side, number); returns their examples."""
    with_room = _OpenExamples(size[0])
    opened = 0
    chosen: list[int] = []
    groups: list[tuple[int, int]] = []  # (number of examples, chunks that each of them took)
    for a, b, left in kinds:
        for room in chain(with_room.rooms(a, b), [size]):
            fit = min(room[0] // a, room[1] // b)
            # Enough examples of this room for the chunks that are left, `fit` in each.
            wanted = -(-left // fit)
            if room is size:
                examples = list(range(opened, opened + wanted))
                opened += wanted
            else:
                examples = with_room.take(room, wanted)
            chunks = min(left, fit * len(examples))
            filled, rest = divmod(chunks, fit)
            for group, each in ((examples[:filled], fit), (examples[filled:], rest)):
                groups.append((len(group), each))
                with_room.add((room[0] - each * a, room[1] - each * b), group)
            chosen += examples
            left -= chunks
            if not left:
                break
    examples_of, chunks_each = np.array(groups, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(np.array(chosen, dtype=np.int64), np.repeat(chunks_each, examples_of))


class _OpenExamples:
    """Examples that are not full, by their room; bit sets find the next larger room at once.

    Args:
        width: positions of an example on the first side.
    """

    def __init__(self, width: int) -> None:
        # Bit x: there are examples with x free positions on the first side.
        self._first = 0
        # Element x, bit y: there are examples with x free positions on the first side, y on the
        # second.
        self._second = [0] * (width + 1)
        self._examples: defaultdict[Room, list[int]] = defaultdict(list)

    def rooms(self, a: int, b: int) -> Iterator[Room]:
        """Yields the existing rooms of at least (a, b), in ascending order."""
        for x in _bits(self._first, a):
            for y in _bits(self._second[x], b):
                yield x, y

    def take(self, room: Room, most: int) -> list[int]:
        """Removes up to `most` examples with a room."""
        examples = self._examples[room]
        taken = examples[-most:]
        del examples[-most:]
        if not examples:
            x, y = room
            self._second[x] ^= 1 << y
            if not self._second[x]:
                self._first ^= 1 << x
        return taken

    def add(self, room: Room, examples: list[int]) -> None:
        """Adds examples with a room; examples that are full on one side are dropped."""
        x, y = room
        if examples and x and y:
            self._examples[room] += examples
            self._second[x] |= 1 << y
            self._first |= 1 << x


def _bits(number: int, least: int) -> Iterator[int]:
    """Yields the indices of the bits that are set, from `least` on."""
    number >>= least
    while number:
        lowest = number & -number
        yield least + lowest.bit_length() - 1
        number ^= lowest
