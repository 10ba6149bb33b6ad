"""Rows of retrieval: which passages an example has, and where its texts go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_pipeline.packing import Int64, ranges
from data_pipeline.packing.task_rows import place
from data_pipeline.reading.packed_shard import PackedShard
from data_pipeline.reading.passages import Passages
from samestep.examples import Examples, PackSpec
from samestep.hashing import U64, combine, name_key

_PASSAGE = name_key("passage of a row")


class _Chosen(NamedTuple):
    """For B rows: int64 [B, 1 + N], numbers of passages, and their slots among all of the row."""

    number: Int64
    slot: Int64


def choose(shards: Sequence[PackedShard], index: Int64, key: U64, negatives: int) -> _Chosen:
    """Chooses one positive of each row, and then `negatives` others, without replacement.

    Each passage of a row has a hash of (key, slot), and the smallest ones are chosen. For example,
    positives with hashes 7 3 and negatives with hashes 9 2 5 give the slots 1, 3, 4 for two
    negatives.

    Args:
        shards: of each row; its index in the shard is `index`.
        key: uint64 [B], which in training differs from epoch to epoch.
    """
    places = zip(shards, (2 * index).tolist(), strict=True)
    # Of each row: the first positive, the first negative, and the end.
    starts = np.array([shard.passage_start[first : first + 3] for shard, first in places])
    counts = np.diff(starts).reshape(-1, 2)
    found = zip(shards, starts[:, 0].tolist(), starts[:, 2].tolist(), strict=True)
    # All passages of all rows, one after the other. Two rows with 1 + 2 and 2 + 1 of them have the
    # row 0 0 0 1 1 1 and the slot 0 1 2 0 1 2.
    number = np.concatenate([shard.passages[first:end] for shard, first, end in found])
    total = counts.sum(axis=1)
    row = np.repeat(np.arange(len(index)), total)
    slot = ranges(np.zeros_like(total), total)
    is_negative = slot >= counts[row, 0]
    # By row, positives before negatives, and by hash within each side.
    order = np.lexsort((combine(key[row], _PASSAGE, slot), is_negative, row))
    # The rank of each passage among the positives or the negatives of its row.
    sides = counts.reshape(-1)
    rank = ranges(np.zeros_like(sides), sides)
    # Of each row, in this order: the first positive, then the first negatives.
    chosen = order[rank < np.where(is_negative[order], negatives, 1)]
    shape = len(index), 1 + negatives
    return _Chosen(number[chosen].astype(np.int64).reshape(shape), slot[chosen].reshape(shape))


class _Layout(NamedTuple):
    """Chunks of B rows, by row and then column: which text each is, its length and its column.

    Attributes:
        text: int64 [B, chunks], 0 for the query, 1 for the positive, 2 for the first negative.
        length, column: int64 [B, chunks].
    """

    text: Int64
    length: Int64
    column: Int64


def _lay_out(length: Int64, spec: PackSpec) -> _Layout:
    """Places texts of these lengths, int64 [B, 2 + N]."""
    parts = spec.parts
    assert parts is not None
    special = spec.prefix + spec.suffix
    length = length.copy()
    # A limit counts special tokens, and `length` does not.
    for limit, side in ((parts.query_length, length[:, :1]), (parts.passage_length, length[:, 1:])):
        if limit is not None:
            np.minimum(side, limit - special, out=side)
    rows, texts = length.shape
    text = np.arange(texts)[None]
    if parts.layout == "choices":  # of texts 0 1 2: sequences 0 1 and 0 2
        text = np.stack(np.broadcast_arrays(text[:, :1], text[:, 1:]), axis=2).reshape(1, -1)
        # Each sequence is placed by itself, as a row of two texts.
        length = length[:, text[0]].reshape(-1, 2)
    kept, column = place(length, spec)
    text = np.broadcast_to(text, (rows, text.shape[1]))
    return _Layout(text, kept.reshape(text.shape), column.reshape(text.shape))


def positions(
    shards: Sequence[PackedShard], index: Int64, key: U64, passages: Passages, spec: PackSpec
) -> Int64:
    """Number of filled positions of examples in one sequence each: int64 [B]."""
    assert spec.parts is not None
    chosen = choose(shards, index, key, spec.parts.negatives)
    query = [shard.pieces[3 * i + 1] for shard, i in zip(shards, index.tolist(), strict=True)]
    length = np.concatenate((np.array(query)[:, None], passages.length[chosen.number]), axis=1)
    layout = _lay_out(length.astype(np.int64), spec)
    return layout.column[:, -1] + layout.length[:, -1] + spec.suffix


def complete(
    queries: Examples,
    shards: Sequence[PackedShard],
    index: Int64,
    key: U64,
    passages: Passages,
    spec: PackSpec,
    dataset: str,
) -> Examples:
    """Adds passages to B examples, which have a query each.

    Args:
        shards: of each example; its index in the shard is `index`.
        key: as for `choose`.
        dataset: its digest.
    """
    parts, labels = spec.parts, queries.labels
    assert parts is not None
    assert labels is not None
    chosen = choose(shards, index, key, parts.negatives)
    length = np.concatenate((queries.length[:, None], passages.length[chosen.number]), axis=1)
    layout = _lay_out(length.astype(np.int64), spec)
    # Tokens of queries and of passages come from two arrays, and are merged chunk by chunk.
    is_query = layout.text == 0
    query_start = np.cumsum(queries.length) - queries.length
    # A query has the positive's number, which is not used.
    number = np.take_along_axis(chosen.number, np.maximum(layout.text - 1, 0), axis=1)
    kept = layout.length.reshape(-1)
    tokens = np.empty(kept.sum(), dtype=np.int32)
    of_query = np.repeat(is_query.reshape(-1), kept)
    begin = np.broadcast_to(query_start[:, None], is_query.shape)[is_query]
    # Truncated texts keep their first tokens.
    tokens[of_query] = queries.tokens[ranges(begin, layout.length[is_query])]
    tokens[~of_query] = passages.read(number[~is_query], layout.length[~is_query])
    rows, chunks = layout.text.shape
    ones = np.ones(rows, dtype=np.int64)
    return replace(
        queries,
        tokens=tokens,
        row=np.repeat(np.arange(rows), chunks),
        column=layout.column.reshape(-1),
        length=kept,
        labels=replace(
            labels,
            values=_scores(chosen, labels.values, labels.count).reshape(-1),
            count=ones * chosen.slot.shape[1],
            begin=0 * ones,
            ranks=ones > 0,
            passages=_known(chosen, shards, index, parts.known_positives, dataset),
        ),
    )


def _known(
    chosen: _Chosen, shards: Sequence[PackedShard], index: Int64, most: int, dataset: str
) -> Int64 | None:
    """The passages of each row, then all its positives, for `Labels.passages`."""
    if not most:
        return None
    count = chosen.number.shape[1]
    # With passages 7 3 5, positives 7 2 and K = 3, the row is 7 3 5, 7 2 7.
    found = np.repeat(chosen.number[:, :1], count + most, axis=1)
    found[:, :count] = chosen.number
    for row, (shard, first) in enumerate(zip(shards, (2 * index).tolist(), strict=True)):
        begin, end = shard.passage_start[first : first + 2]
        found[row, count : count + end - begin] = shard.passages[begin:end]
    # Numbers have 32 bits; another dataset's differ in the 16 bits above.
    other: Int64 = found + (name_key(dataset) % 2**16 << 32)
    return other


def _scores(
    chosen: _Chosen, values: npt.NDArray[np.float32], count: Int64
) -> npt.NDArray[np.float32]:
    """A teacher's scores of the chosen passages, or 1 and zeros: float32 [B, 1 + N]."""
    scores = np.zeros(chosen.slot.shape, dtype=np.float32)
    if count.any():
        first = np.cumsum(count) - count
        scores[:] = values[first[:, None] + chosen.slot]
        return scores
    scores[:, 0] = 1
    return scores
