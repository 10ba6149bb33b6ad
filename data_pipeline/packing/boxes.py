"""Packing in two dimensions: pieces that take cells on two sides of an example, as in an encoder and a decoder.

Best-fit-decreasing on the scarcer side, that of which all pieces together take the larger share: the pieces that are
longest there come first, and each goes into the example that has the least room left there, of those with room for it
on both sides. Pieces of equal costs are interchangeable and so are examples of equal room, so both are moved in groups:
a million pairs of sentences take 1.5 s.
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
    """Puts pieces into few examples.

    Args:
        cost: int64 [M, 2], the cells that a piece takes on either side; at least 1, at most those of an example.
        size: cells of an example's sides.
        key: chooses which of several pieces of equal costs goes where, and the examples' order; not their number.

    Returns:
        The example of each piece, int64 [M], numbered without holes; and the first of its cells there on either side,
        int64 [M, 2].
    """
    kind, placed = _place(cost, size)
    example = np.empty_like(placed)
    example[np.lexsort((combine(key, np.arange(len(kind))), -kind))] = placed
    # Examples were opened from the longest piece to the shortest; number them in an order that says nothing of length.
    opened = int(example.max(initial=-1)) + 1
    number = np.empty(opened, dtype=np.int64)
    number[np.argsort(combine(key, _BOXES, np.arange(opened)), kind="stable")] = np.arange(opened)
    example = number[example]

    order = np.argsort(example, kind="stable")
    before = np.cumsum(cost[order], axis=0) - cost[order]
    offset = np.empty_like(cost)
    offset[order] = before - before[np.searchsorted(example[order], example[order])]
    return example, offset


def count_boxes(cost: Int64, size: Room) -> int:
    """The number of examples of `pack_boxes`, at a part of its cost."""
    return int(_place(cost, size)[1].max(initial=-1)) + 1


def _place(cost: Int64, size: Room) -> tuple[Int64, Int64]:
    """Each piece's costs in one number, the scarcer side's first; and the examples of pieces in descending order."""
    scarcer = int(np.argmax(cost.sum(axis=0) / size))
    kind = cost[:, scarcer] << 32 | cost[:, 1 - scarcer]
    kinds, members = np.unique(kind, return_counts=True)
    descending = zip(kinds[::-1].tolist(), members[::-1].tolist(), strict=True)
    groups = ((kind >> 32, kind & 0xFFFF_FFFF, pieces) for kind, pieces in descending)
    return kind, _best_fit(groups, (size[scarcer], size[1 - scarcer]))


def _best_fit(kinds: Iterable[tuple[int, int, int]], size: Room) -> Int64:
    """Places pieces kind by kind (cost, cost on the other side, how many); the example of each piece in turn."""
    with_room = _OpenExamples(size[0])
    opened = 0
    chosen: list[int] = []
    groups: list[tuple[int, int]] = []  # so many examples took so many pieces each
    for a, b, left in kinds:
        for room in chain(with_room.rooms(a, b), [size]):
            fit = min(room[0] // a, room[1] // b)
            wanted = -(-left // fit)
            if room is size:
                examples = list(range(opened, opened + wanted))
                opened += wanted
            else:
                examples = with_room.take(room, wanted)
            pieces = min(left, fit * len(examples))
            filled, rest = divmod(pieces, fit)
            for group, each in ((examples[:filled], fit), (examples[filled:], rest)):
                groups.append((len(group), each))
                with_room.add((room[0] - each * a, room[1] - each * b), group)
            chosen += examples
            left -= pieces
            if not left:
                break
    examples_of, pieces_each = np.array(groups, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(np.array(chosen, dtype=np.int64), np.repeat(pieces_each, examples_of))


class _OpenExamples:
    """Examples that are not full, by their room. Bits of integers say which rooms there are: the next is found at once.

    Args:
        width: the most room on the first side.
    """

    def __init__(self, width: int) -> None:
        self._first = 0  # bit x: there are examples with x free cells on the first side
        self._second = [0] * (
            width + 1
        )  # in element x, bit y: there are some with y free cells on the second as well
        self._examples: defaultdict[Room, list[int]] = defaultdict(list)

    def rooms(self, a: int, b: int) -> Iterator[Room]:
        """The rooms of at least (a, b) there are, in ascending order."""
        for x in _bits(self._first, a):
            for y in _bits(self._second[x], b):
                yield x, y

    def take(self, room: Room, most: int) -> list[int]:
        """Removes examples of a room, up to `most`."""
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
        """Adds examples; those that are full on one side are done with."""
        x, y = room
        if examples and x and y:
            self._examples[room] += examples
            self._second[x] |= 1 << y
            self._first |= 1 << x


def _bits(number: int, least: int) -> Iterator[int]:
    """The places of the bits that are set, from `least` on."""
    number >>= least
    while number:
        lowest = number & -number
        yield least + lowest.bit_length() - 1
        number ^= lowest
