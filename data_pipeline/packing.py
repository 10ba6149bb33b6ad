"""Packing: where every token of a shard's documents goes in its fixed-length examples.

A plan is a pure function of document lengths, the objective's `PackSpec`, the policy and a key; no token is read.
It cuts documents into pieces (runs of tokens of one document) and lays the pieces into examples, such that every
token is in exactly one piece:

    concat    documents end to end with `suffix` cells between them, cut into windows; next to no padding.
    padded    one piece an example.
    best_fit  pieces of at most one example, packed whole by best-fit-decreasing (Ding et al. 2024, "Fewer truncations
              improve language modeling"); each keeps its own special tokens, so that attention can stay within it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.errors import ConfigError
from trainer.examples import PackSpec, Policy
from trainer.hashing import combine, name_key

Int64: TypeAlias = npt.NDArray[np.int64]

PACKING_VERSION = 1  # part of every digest of a packing: raise it when `plan` gives other examples for the same input

_BINS = name_key("bins")


@dataclass(frozen=True)
class PackPlan:
    """The N examples of one shard and their M pieces, ordered by example, then column.

    Attributes:
        example_start: int64 [N + 1]; example n owns the pieces [example_start[n], example_start[n + 1]).
        document: int64 [M], the document a piece is cut from.
        begin: int64 [M], the piece's first token within its document.
        length: int64 [M], tokens in the piece; at least 1.
        column: int64 [M], the cell of the example that the piece's first token goes to.
    """

    example_start: Int64
    document: Int64
    begin: Int64
    length: Int64
    column: Int64

    @property
    def examples(self) -> int:
        return len(self.example_start) - 1


def ranges(first: Int64, count: Int64) -> Int64:
    """Concatenates the runs first[i], first[i] + 1, ... of count[i] numbers each."""
    end = np.cumsum(count)
    return np.repeat(first - (end - count), count) + np.arange(end[-1] if len(end) else 0)


def room_for_tokens(spec: PackSpec) -> int:
    """Cells of an example that are left for text when it holds a single piece.

    Raises:
        ConfigError: there are none.
    """
    room = spec.sequence_length - spec.prefix - spec.suffix
    if room < 1:
        raise ConfigError(
            f"data.sequence_length {spec.sequence_length} leaves no cell for text beside {spec.prefix + spec.suffix} "
            f"special tokens; use at least {spec.prefix + spec.suffix + 1}"
        )
    return room


def plan(lengths: npt.ArrayLike, spec: PackSpec, policy: Policy, key: int = 0) -> PackPlan:
    """Packs the documents of one shard; empty documents take no part.

    Args:
        lengths: int [D], tokens of each document.
        spec: cells of an example and of its special tokens.
        policy: see the module's docstring.
        key: chooses which of several equally long pieces goes where, and the examples' order (`best_fit` only).

    Raises:
        ConfigError: the examples are too short to hold text.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    room = room_for_tokens(spec)
    if policy == "concat":
        return _concat(lengths, spec, room)
    pieces = -(-lengths // room)
    document = np.repeat(np.arange(len(lengths)), pieces)
    begin = ranges(np.zeros_like(lengths), pieces) * room
    length = np.minimum(room, lengths[document] - begin)
    if policy == "padded":
        column = np.full(len(document), spec.prefix)
        return PackPlan(np.arange(len(document) + 1), document, begin, length, column)
    example, offset = _best_fit(spec.prefix + length + spec.suffix, spec.sequence_length, key)
    order = np.lexsort((offset, example))
    start = _starts(example[order])
    return PackPlan(start, document[order], begin[order], length[order], spec.prefix + offset[order])


def _starts(example: Int64) -> Int64:
    """Where each example's pieces start, from the sorted examples of all pieces (numbered without holes)."""
    return np.concatenate(([0], np.cumsum(np.bincount(example)))).astype(np.int64)


def _concat(lengths: Int64, spec: PackSpec, room: int) -> PackPlan:
    occupied = np.where(lengths > 0, lengths + spec.suffix, 0)
    line = np.cumsum(occupied) - occupied  # the cell of each document's first token, all examples end to end
    first_window = line // room
    windows = np.where(lengths > 0, (line + lengths - 1) // room - first_window + 1, 0)
    document = np.repeat(np.arange(len(lengths)), windows)
    window = ranges(first_window, windows)
    cell = np.maximum(line[document], window * room)
    end = np.minimum((line + lengths)[document], (window + 1) * room)
    # A window that holds nothing but a separator (possible when room <= suffix) is no example: number without holes.
    example = np.cumsum(np.diff(window, prepend=window[:1]) != 0)
    return PackPlan(_starts(example), document, cell - line[document], end - cell, spec.prefix + cell - window * room)


def _best_fit(cost: Int64, size: int, key: int) -> tuple[Int64, Int64]:
    """Puts every piece into the fullest example that still has room for it, the costliest pieces first.

    Pieces of equal cost are interchangeable and so are examples with equal room, so both are moved in groups: the
    work is per (cost, room) pair that meets, not per piece. The result is that of best-fit-decreasing done one by
    one: an example that takes a piece becomes the fullest, and goes on taking pieces of that cost while they fit.

    Args:
        cost: int64 [M], cells each piece needs, its special tokens included; at most `size`.
        size: cells of an example.
        key: shuffles pieces of equal cost, and the examples.

    Returns:
        example, offset: int64 [M], the example of each piece and the first of its cells there.
    """
    waiting = np.lexsort((combine(key, np.arange(len(cost))), -cost))
    example, offset = np.empty_like(cost), np.empty_like(cost)
    with_room = [np.empty(0, dtype=np.int64)] * (size + 1)  # examples by the number of their free cells
    number_with_room = np.zeros(size + 1, dtype=np.int64)
    placed = opened = 0
    costs, members = np.unique(cost, return_counts=True)
    for c, left in zip(costs[::-1].tolist(), members[::-1].tolist(), strict=True):
        fullest_first = (c + np.flatnonzero(number_with_room[c:])).tolist()
        for room in (*fullest_first, size):  # at last, new examples
            fit = room // c
            wanted = -(-left // fit)
            if room == size:
                chosen = np.arange(opened, opened + wanted)
                opened += wanted
            else:
                chosen, with_room[room] = np.split(with_room[room], [wanted])
                number_with_room[room] = len(with_room[room])
            count = min(left, len(chosen) * fit)
            piece, slot = waiting[placed : placed + count], np.arange(count)
            example[piece] = chosen[slot // fit]
            offset[piece] = size - room + slot % fit * c
            filled, rest = divmod(count, fit)
            for group, free in ((chosen[:filled], room - fit * c), (chosen[filled:], room - rest * c)):
                with_room[free] = np.concatenate((with_room[free], group))
                number_with_room[free] += len(group)
            placed += count
            left -= count
            if not left:
                break
    # Examples were opened from the longest piece to the shortest; number them in an order that says nothing of length.
    number = np.empty(opened, dtype=np.int64)
    number[np.argsort(combine(key, _BINS, np.arange(opened)), kind="stable")] = np.arange(opened)
    return number[example], offset
