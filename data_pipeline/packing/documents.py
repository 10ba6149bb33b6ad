"""Packs documents of any length into examples of a fixed length: concat, padded and best_fit.

A plan is a pure function of document lengths, the objective's `PackSpec`, the policy and a key; no
token is read. Documents are split into chunks (runs of tokens of one document) and the chunks are
placed in examples. Every token is in exactly one chunk.

    concat    Documents are joined with `suffix` positions between them, and the line is cut into
              examples. There is next to no padding. An example starts with text: when the cut falls
              on a separator, the next example drops the rest of it.
    padded    One chunk for each example.
    best_fit  Documents are split into chunks of at most one example, and chunks are packed whole
              (`bins`). Each chunk keeps its own special tokens, so attention can stay within it.

For example, documents of 5, 1 and 4 tokens in examples of 6 positions, with one special token
before the text ([) and one after it (]):

    concat    [AAAA]  [A]B].  [CCCC]
    padded    [AAAA]  [A]...  [B]...  [CCCC]
    best_fit  [AAAA]  [CCCC]  [A][B]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from data_pipeline.packing import Int64, PackPlan, ranges, starts
from samestep.errors import ConfigError
from samestep.examples import PackSpec, Policy


def plan(lengths: npt.ArrayLike, spec: PackSpec, policy: Policy, key: int = 0) -> PackPlan:
    """Packs the documents of a shard; empty documents are skipped.

    Args:
        lengths: int [D], tokens of each document.
        policy: concat, padded or best_fit.
        key: for best_fit, shuffles chunks of equal length, and the order of examples.

    Raises:
        ConfigError: examples are too short to hold text.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    room = room_for_tokens(spec)
    if policy == "concat":
        return _concat(lengths, spec, room)
    # All chunks of a document have `room` tokens, except that the last one may be shorter: 10
    # tokens and room for 4 give the begins 0, 4, 8 and the lengths 4, 4, 2.
    chunks = -(-lengths // room)
    document = np.repeat(np.arange(len(lengths)), chunks)
    begin = ranges(np.zeros_like(lengths), chunks) * room
    length = np.minimum(room, lengths[document] - begin)
    if policy == "padded":
        column = np.full(len(document), spec.prefix)
        return PackPlan(np.arange(len(document) + 1), document, begin, length, column)
    from data_pipeline.packing import bins

    example, offsets = bins.pack(*_costs(length, spec), key)
    offset = offsets[:, 0]
    # By example, then by position: a plan lists the chunks of an example from left to right.
    order = np.lexsort((offset, example))
    return PackPlan(
        example_start=starts(example[order]),
        document=document[order],
        begin=begin[order],
        length=length[order],
        column=spec.prefix + offset[order],
    )


def count_examples(lengths: npt.ArrayLike, spec: PackSpec, policy: Policy) -> int:
    """Returns the number of examples of `plan`, faster; it does not depend on the key."""
    lengths = np.asarray(lengths, dtype=np.int64)
    lengths = lengths[lengths > 0]
    room = room_for_tokens(spec)
    if policy == "concat":
        _, first_window, windows = _windows(lengths, spec, room)
        # Two neighboring documents share an example if one ends in the window where the next one
        # begins.
        last_window = first_window + windows - 1
        shared = first_window[1:] == last_window[:-1]
        return int(windows.sum() - shared.sum())
    chunks = -(-lengths // room)
    if policy == "padded":
        return int(chunks.sum())
    from data_pipeline.packing import bins

    full = (chunks - 1).sum()  # all chunks of a document but the last one
    last = lengths - (chunks - 1) * room
    return bins.count(*_costs(np.concatenate((np.full(full, room), last)), spec))


def room_for_tokens(spec: PackSpec) -> int:
    """The positions left for text in an example with a single chunk."""
    special = spec.prefix + spec.suffix
    if spec.sequence_length <= special:
        raise ConfigError(
            f"data.sequence_length {spec.sequence_length} leaves no position for text beside "
            f"{special} special tokens; use at least {special + 1}"
        )
    return spec.sequence_length - special


def _costs(length: Int64, spec: PackSpec) -> tuple[Int64, tuple[int, ...]]:
    """The positions that chunks need on each side, int64 [M, sides], and the size of an example."""
    if spec.sides is None:
        cost = spec.prefix + length + spec.suffix
        return cost[:, None], (spec.sequence_length,)
    # An objective tells the positions on both sides for each length of a chunk.
    return np.array(spec.sides.cost)[length - 1], spec.sides.size


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
    # A chunk is the overlap of a document and a window. On the line of `_windows` these are
    # documents 0 0 1 2 and windows 0 1 1 2, with the overlaps [0, 4), [4, 5), [6, 7), [8, 12).
    document = np.repeat(np.arange(len(lengths)), windows)
    window = ranges(first_window, windows)
    begin = np.maximum(line[document], window * room)
    end = np.minimum((line + lengths)[document], (window + 1) * room)
    # When room <= suffix, a window may hold only a separator. It is no example, so windows are
    # renumbered without gaps.
    example = np.cumsum(np.diff(window, prepend=window[:1]) != 0)
    example_start = starts(example)
    # The first chunk of an example moves to its start, which drops a separator that was cut. The
    # others keep their distance from it: B is 2 positions after the last token of A.
    first_begin = begin[example_start[:-1]]
    column = spec.prefix + begin - first_begin[example]
    return PackPlan(example_start, document, begin - line[document], end - begin, column)
