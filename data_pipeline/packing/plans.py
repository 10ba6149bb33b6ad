"""Packs the documents of a shard into examples of a fixed length.

A plan is a pure function of document lengths, the objective's `PackSpec`, the policy and a key; it
reads no tokens. It splits documents into chunks (consecutive tokens of one document) and places the
chunks in examples. Every token is in exactly one chunk. The policies are:

    concat    Documents are joined with `suffix` positions between them, and the line is cut into
              examples. There is next to no padding. An example starts with text: when the cut falls
              on a separator, the next example drops the rest of it.
    padded    One chunk for each example.
    best_fit  Documents are split into chunks of at most one example, and chunks are packed whole by
              best-fit-decreasing (Ding et al. 2024, "Fewer truncations improve language modeling").
              Each chunk keeps its own special tokens, so attention can stay within it. For examples
              with two sides, `boxes` packs both at once.

For example, documents of 5, 1 and 4 tokens in examples of 6 positions, with one special token
before the text ([) and one after it (]):

    concat    [AAAA]  [A]B].  [CCCC]
    padded    [AAAA]  [A]...  [B]...  [CCCC]
    best_fit  [AAAA]  [CCCC]  [A][B]

Pairs of texts, as for translation, are packed by `text_pairs`; rows of a task by `parts`; pairs for
next-sentence prediction by `pairs`.
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

# Part of every digest of a packing. Raise it when `plan` returns other examples for the same input.
PACKING_VERSION = 2

_BINS = name_key("bins")


@dataclass(frozen=True)
class PackPlan:
    """The N examples of a shard and their M chunks, ordered by example, then position.

    Attributes:
        example_start: int64 [N + 1]; example n has chunks example_start[n] to example_start[n + 1].
        document: int64 [M], the document of a chunk.
        begin: int64 [M], the chunk's first token within its document.
        length: int64 [M], tokens of the chunk; at least 1.
        column: int64 [M], the position in the example of the chunk's first token.
        random: bool [N], whether the second segment of a pair comes from another document; empty
            unless the policy is `pairs`.
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
    """Concatenates the runs first[i], first[i] + 1, ... of count[i] numbers each.

    For example, first [10, 20] and count [2, 3] give [10, 11, 20, 21, 22].
    """
    # Subtracting the number of elements before a run makes one arange fit all runs.
    end = np.cumsum(count)
    return np.repeat(first - (end - count), count) + np.arange(end[-1] if len(end) else 0)


def room_for_tokens(spec: PackSpec) -> int:
    """Returns the positions left for text in an example with a single chunk.

    Raises:
        ConfigError: there are none.
    """
    room = spec.sequence_length - spec.prefix - spec.suffix
    if room < 1:
        raise ConfigError(
            f"data.sequence_length {spec.sequence_length} leaves no position for text beside "
            f"{spec.sequence_length - room} special tokens; use at least "
            f"{spec.sequence_length - room + 1}"
        )
    return room


def plan(lengths: npt.ArrayLike, spec: PackSpec, policy: Policy, key: int = 0) -> PackPlan:
    """Packs the documents of a shard; empty documents are skipped.

    Args:
        lengths: int [D], tokens of each document.
        spec: length of examples, and number of special tokens.
        policy: see the module's docstring; not `pairs`.
        key: for `best_fit`, shuffles chunks of equal length, and the order of examples.

    Raises:
        ConfigError: examples are too short to hold text.
    """
    assert policy != "pairs", "data_pipeline.packing.pairs makes those"
    lengths = np.asarray(lengths, dtype=np.int64)
    room = room_for_tokens(spec)
    if policy == "concat":
        return _concat(lengths, spec, room)
    # Chunks of `room` tokens, the last one of a document shorter: 10 tokens and room for 4 give the
    # begins 0, 4, 8 and the lengths 4, 4, 2.
    chunks = -(-lengths // room)
    document = np.repeat(np.arange(len(lengths)), chunks)
    begin = ranges(np.zeros_like(lengths), chunks) * room
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
    """Returns the number of examples of `plan`, much faster; it does not depend on the key."""
    lengths = np.asarray(lengths, dtype=np.int64)
    lengths = lengths[lengths > 0]
    room = room_for_tokens(spec)
    if policy == "concat":
        _, first_window, windows = _windows(lengths, spec, room)
        shared = first_window[1:] == (first_window + windows - 1)[:-1]
        return int(windows.sum() - shared.sum())
    chunks = -(-lengths // room)
    if policy == "padded":
        return int(chunks.sum())
    # All chunks of a document but the last one fill an example.
    full = (chunks - 1).sum()
    last = lengths - (chunks - 1) * room
    if spec.sides is not None:
        length = np.concatenate((np.full(full, room), last))
        return count_boxes(np.array(spec.sides.cost)[length - 1], spec.sides.size)
    size = spec.sequence_length
    chunks_of_cost = np.bincount(spec.prefix + last + spec.suffix, minlength=size + 1)
    chunks_of_cost[size] += full
    return sum(move.examples for move in _moves(chunks_of_cost, size) if move.room == size)


def starts(example: Int64) -> Int64:
    """Returns where the chunks of each example start, from the sorted example of each chunk."""
    return np.concatenate(([0], np.cumsum(np.bincount(example)))).astype(np.int64)


def _windows(lengths: Int64, spec: PackSpec, room: int) -> tuple[Int64, Int64, Int64]:
    """Joins documents to one line, which is cut into windows of `room` positions.

    For lengths 5, 1 and 4, one separator and room for 4, the line is AAAA|A-B-|CCCC.

    Returns:
        For each document: the position of its first token on the line (0, 6, 8), the window of that
        position (0, 1, 2), and the number of windows that it reaches into (2, 1, 1).
    """
    occupied = np.where(lengths > 0, lengths + spec.suffix, 0)
    line = np.cumsum(occupied) - occupied
    first_window = line // room
    last_window = (line + lengths - 1) // room
    return line, first_window, np.where(lengths > 0, last_window - first_window + 1, 0)


def _concat(lengths: Int64, spec: PackSpec, room: int) -> PackPlan:
    line, first_window, windows = _windows(lengths, spec, room)
    document = np.repeat(np.arange(len(lengths)), windows)
    window = ranges(first_window, windows)
    # A chunk is the overlap of a document and a window.
    begin = np.maximum(line[document], window * room)
    end = np.minimum((line + lengths)[document], (window + 1) * room)
    # When room <= suffix, a window may hold only a separator. It is no example, so windows are
    # renumbered without gaps.
    example = np.cumsum(np.diff(window, prepend=window[:1]) != 0)
    start = starts(example)
    # The first chunk of an example moves to its start, which drops a separator that was cut.
    column = spec.prefix + begin - begin[start[:-1]][example]
    return PackPlan(start, document, begin - line[document], end - begin, column)


class _Move(NamedTuple):
    """`chunks` chunks of equal cost go into `examples` examples that have `room` left."""

    cost: int
    room: int
    examples: int
    chunks: int


def _moves(members: Int64, size: int) -> Iterator[_Move]:
    """Best-fit-decreasing: each chunk, longest first, goes into the fullest example that has room.

    Chunks of equal cost are interchangeable, and so are examples with equal room, so both are moved
    in groups: the work grows with the number of different (cost, room) pairs, not of chunks. The
    result is the same as one by one: an example that takes a chunk becomes the fullest, and takes
    further chunks of that cost while they fit.

    For example, costs 4, 3, 3 and 2 in examples of 6: (cost 4, room 6) opens an example, (3, 6)
    puts two chunks into a new one, and (2, 2) fills the first.

    Args:
        members: int64 [size + 1], the number of chunks of each cost.
        size: positions of an example; a move with this much room opens new examples.
    """
    with_room = np.zeros(size + 1, dtype=np.int64)
    for cost in np.flatnonzero(members)[::-1].tolist():
        left = int(members[cost])
        # Rooms in ascending order, so the fullest examples come first; new examples come last.
        for room in (*(cost + np.flatnonzero(with_room[cost:size])).tolist(), size):
            fit = room // cost
            examples = -(-left // fit)
            if room < size:
                examples = min(examples, int(with_room[room]))
                with_room[room] -= examples
            chunks = min(left, examples * fit)
            # All examples take `fit` chunks, except that the last one may take only the rest.
            filled, rest = divmod(chunks, fit)
            with_room[room - fit * cost] += filled
            if rest:
                with_room[room - rest * cost] += 1
            yield _Move(cost, room, examples, chunks)
            left -= chunks
            if not left:
                break


def _best_fit(cost: Int64, size: int, key: int) -> tuple[Int64, Int64]:
    """Places chunks by `_moves`.

    Args:
        cost: int64 [M], positions of each chunk, special tokens included; at most `size`.
        size: positions of an example.
        key: shuffles chunks of equal cost, and the examples.

    Returns:
        example, offset: int64 [M], the example of each chunk and its first position there.
    """
    # The order in which moves take chunks: by descending cost, equal ones by the key.
    waiting = np.lexsort((combine(key, np.arange(len(cost))), -cost))
    example, offset = np.empty_like(cost), np.empty_like(cost)
    with_room = [np.empty(0, dtype=np.int64)] * size  # examples by their free positions
    placed = opened = 0
    for c, room, examples, chunks in _moves(np.bincount(cost, minlength=size + 1), size):
        if room == size:
            chosen = np.arange(opened, opened + examples)
            opened += examples
        else:
            chosen, with_room[room] = np.split(with_room[room], [examples])
        fit = room // c
        chunk, slot = waiting[placed : placed + chunks], np.arange(chunks)
        placed += chunks
        # Chunk number `slot` of the move is the (slot % fit)-th in its example.
        example[chunk] = chosen[slot // fit]
        offset[chunk] = size - room + slot % fit * c
        filled, rest = divmod(chunks, fit)
        for group, free in ((chosen[:filled], room - fit * c), (chosen[filled:], room - rest * c)):
            if len(group):
                with_room[free] = np.concatenate((with_room[free], group))
    # Examples were opened from the longest chunk to the shortest. Renumber them at random, so that
    # training does not start with the longest documents.
    number = np.empty(opened, dtype=np.int64)
    number[np.argsort(combine(key, _BINS, np.arange(opened)), kind="stable")] = np.arange(opened)
    return number[example], offset
