"""Packing: where every token of a shard's documents goes in its fixed-length examples.

A plan is a pure function of document lengths, the objective's `PackSpec`, the policy and a key; no token is read.
It cuts documents into pieces (runs of tokens of one document) and lays the pieces into examples, such that every
token is in exactly one piece:

    concat    documents end to end with `suffix` cells between them, cut into windows; next to no padding. A row begins
              with text: of a separator at the cut, the end of one row has a place for it, the next row drops its cells.
    padded    one piece an example.
    best_fit  pieces of at most one example, packed whole by best-fit-decreasing (Ding et al. 2024, "Fewer truncations
              improve language modeling"); each keeps its own special tokens, so that attention can stay within it.
              Where examples have two sides, pieces are packed into both at once (`boxes`).

Pairs of texts, as for translation, are documents already cut in two, and packed by `text_pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from data_pipeline.packing.boxes import count_boxes, pack_boxes
from trainer.errors import ConfigError
from trainer.examples import PackSpec, Policy
from trainer.hashing import combine, name_key

Int64: TypeAlias = npt.NDArray[np.int64]

PACKING_VERSION = 2  # part of every digest of a packing: raise it when `plan` gives other examples for the same input

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
        random: bool [N], whether the second of an example's two pieces is from anywhere; empty unless they are pairs.
    """

    example_start: Int64
    document: Int64
    begin: Int64
    length: Int64
    column: Int64
    random: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

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
    assert policy != "pairs", "data_pipeline.packing.pairs makes those"
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
    if spec.sides is None:
        example, offset = _best_fit(spec.prefix + length + spec.suffix, spec.sequence_length, key)
    else:
        example, offsets = pack_boxes(np.array(spec.sides.cost)[length - 1], spec.sides.size, key)
        offset = offsets[:, 0]
    order = np.lexsort((offset, example))
    start = starts(example[order])
    return PackPlan(
        start, document[order], begin[order], length[order], spec.prefix + offset[order]
    )


def count_examples(lengths: npt.ArrayLike, spec: PackSpec, policy: Policy) -> int:
    """The number of examples of `plan`, at a small part of its cost; the arguments are the same, and no key matters."""
    lengths = np.asarray(lengths, dtype=np.int64)
    lengths = lengths[lengths > 0]
    room = room_for_tokens(spec)
    if policy == "concat":
        _, first_window, windows = _windows(lengths, spec, room)
        shared = first_window[1:] == (first_window + windows - 1)[:-1]
        return int(windows.sum() - shared.sum())
    pieces = -(-lengths // room)
    if policy == "padded":
        return int(pieces.sum())
    if spec.sides is not None:
        length = np.concatenate((np.full((pieces - 1).sum(), room), lengths - (pieces - 1) * room))
        return count_boxes(np.array(spec.sides.cost)[length - 1], spec.sides.size)
    whole = (pieces - 1).sum()  # all pieces of a document but its last one fill an example
    last = np.bincount(
        spec.prefix + lengths - (pieces - 1) * room + spec.suffix,
        minlength=spec.sequence_length + 1,
    )
    last[spec.sequence_length] += whole
    return sum(
        move.examples
        for move in _moves(last, spec.sequence_length)
        if move.room == spec.sequence_length
    )


def starts(example: Int64) -> Int64:
    """Where each example's pieces start, from the sorted examples of all pieces (numbered without holes)."""
    return np.concatenate(([0], np.cumsum(np.bincount(example)))).astype(np.int64)


def _windows(lengths: Int64, spec: PackSpec, room: int) -> tuple[Int64, Int64, Int64]:
    """Lays documents end to end; per document: the cell of its first token, that cell's window, its windows' number."""
    occupied = np.where(lengths > 0, lengths + spec.suffix, 0)
    line = np.cumsum(occupied) - occupied
    first_window = line // room
    return (
        line,
        first_window,
        np.where(lengths > 0, (line + lengths - 1) // room - first_window + 1, 0),
    )


def _concat(lengths: Int64, spec: PackSpec, room: int) -> PackPlan:
    line, first_window, windows = _windows(lengths, spec, room)
    document = np.repeat(np.arange(len(lengths)), windows)
    window = ranges(first_window, windows)
    cell = np.maximum(line[document], window * room)
    end = np.minimum((line + lengths)[document], (window + 1) * room)
    # A window that holds nothing but a separator (possible when room <= suffix) is no example: number without holes.
    example = np.cumsum(np.diff(window, prepend=window[:1]) != 0)
    start = starts(example)
    column = spec.prefix + cell - cell[start[:-1]][example]
    return PackPlan(start, document, cell - line[document], end - cell, column)


class _Move(NamedTuple):
    """`pieces` pieces of one cost go into `examples` examples with `room` free cells each, as many into one as fit."""

    cost: int
    room: int
    examples: int
    pieces: int


def _moves(members: Int64, size: int) -> Iterator[_Move]:
    """Best-fit-decreasing: every piece goes into the fullest example that has room for it, the costliest pieces first.

    Pieces of equal cost are interchangeable and so are examples with equal room, so both are moved in groups: the
    work is per (cost, room) pair that meets, not per piece. The result is that of best-fit-decreasing done one by
    one: an example that takes a piece becomes the fullest, and goes on taking pieces of that cost while they fit.

    Args:
        members: int64 [size + 1], the number of pieces of each cost.
        size: cells of an example; a move with this much room opens its examples.
    """
    with_room = np.zeros(size + 1, dtype=np.int64)
    for cost in np.flatnonzero(members)[::-1].tolist():
        left = int(members[cost])
        for room in (*(cost + np.flatnonzero(with_room[cost:size])).tolist(), size):
            fit = room // cost
            examples = -(-left // fit)
            if room < size:
                examples = min(examples, int(with_room[room]))
                with_room[room] -= examples
            pieces = min(left, examples * fit)
            filled, rest = divmod(pieces, fit)
            with_room[room - fit * cost] += filled
            if rest:
                with_room[room - rest * cost] += 1
            yield _Move(cost, room, examples, pieces)
            left -= pieces
            if not left:
                break


def _best_fit(cost: Int64, size: int, key: int) -> tuple[Int64, Int64]:
    """Places each piece as `_moves` says.

    Args:
        cost: int64 [M], cells each piece needs, its special tokens included; at most `size`.
        size: cells of an example.
        key: shuffles pieces of equal cost, and the examples.

    Returns:
        example, offset: int64 [M], the example of each piece and the first of its cells there.
    """
    waiting = np.lexsort((combine(key, np.arange(len(cost))), -cost))
    example, offset = np.empty_like(cost), np.empty_like(cost)
    with_room = [np.empty(0, dtype=np.int64)] * size  # examples by the number of their free cells
    placed = opened = 0
    for c, room, examples, pieces in _moves(np.bincount(cost, minlength=size + 1), size):
        if room == size:
            chosen = np.arange(opened, opened + examples)
            opened += examples
        else:
            chosen, with_room[room] = np.split(with_room[room], [examples])
        fit = room // c
        piece, slot = waiting[placed : placed + pieces], np.arange(pieces)
        placed += pieces
        example[piece] = chosen[slot // fit]
        offset[piece] = size - room + slot % fit * c
        filled, rest = divmod(pieces, fit)
        for group, free in ((chosen[:filled], room - fit * c), (chosen[filled:], room - rest * c)):
            if len(group):
                with_room[free] = np.concatenate((with_room[free], group))
    # Examples were opened from the longest piece to the shortest; number them in an order that says nothing of length.
    number = np.empty(opened, dtype=np.int64)
    number[np.argsort(combine(key, _BINS, np.arange(opened)), kind="stable")] = np.arange(opened)
    return number[example], offset
