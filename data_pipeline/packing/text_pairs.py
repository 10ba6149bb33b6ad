"""Packs pairs of texts, a source and its target, into examples with two sides.

The sides are an encoder's and a decoder's sequence. A pair is a document of two parts, and an
example has two chunks for each of its pairs. `best_fit` packs both sides at once (`bins`); with
`padded`, each example is one pair. Each text is followed by an end token. For a single decoder
(`Sides.joined`), the first side holds source and target, except for the target's end token, which
is only predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing import Int64, PackPlan, bins, starts
from samestep.errors import DataError
from samestep.examples import PackSpec, Policy


def plan(shard: ShardIndex, spec: PackSpec, policy: Policy, key: int = 0) -> PackPlan:
    """Packs the pairs of a shard that has passed `check`; columns are positions on a chunk's side.

    Args:
        shard: the pairs.
        spec: length of both sides.
        policy: best_fit or padded.
        key: for `best_fit`, shuffles pairs of equal lengths, and the order of examples.
    """
    whole, length = _lengths(shard, spec)
    if policy == "padded":
        example, column = np.arange(len(length)), np.zeros_like(length)
    else:
        assert spec.sides is not None
        example, column = bins.pack(_positions(length, spec), spec.sides.size, key)
    begin = np.zeros_like(length)
    begin[:, 1] = whole[:, 0]
    order = np.lexsort((column[:, 0], example))
    begin, length, column = (array[order].reshape(-1) for array in (begin, length, column))
    return PackPlan(2 * starts(example[order]), np.repeat(order, 2), begin, length, column)


def count_examples(shard: ShardIndex, spec: PackSpec, policy: Policy) -> int:
    """Returns the number of examples of `plan`; it does not depend on the key."""
    if policy == "padded":
        return len(shard.length)
    assert spec.sides is not None
    return bins.count(_positions(_lengths(shard, spec)[1], spec), spec.sides.size)


def check(shard: ShardIndex, spec: PackSpec, files: Sequence[str]) -> None:
    """Rejects texts that do not fit into an example.

    Args:
        files: names of the source files that `shard.origin` refers to.

    Raises:
        DataError: names the first such text, and the length that would fit.
    """
    assert spec.sides is not None
    needed, size = _positions(_lengths(shard, spec)[1], spec), spec.sides.size
    settings = ("data.sequence_length", "objective.target_length")
    for side in (1, 0):
        wrong = np.flatnonzero(needed[:, side] > size[side])
        if not wrong.size:
            continue
        file, line = shard.origin[wrong[0]].tolist()
        name = ("pair" if spec.sides.joined else "source", "target")[side]
        truncated = (spec.truncate_sources, spec.truncate_targets)[side]
        cut = "" if truncated else f", set objective.truncate_{('sources', 'targets')[side]}=true"
        raise DataError(
            f"{files[file]}:{line}: the {name} has {needed[wrong[0], side]} tokens, end tokens "
            f"included, and {settings[side]} is {size[side]} (too few for {wrong.size} of the "
            f"{len(needed)} pairs of its shard); raise it to at least {needed[:, side].max()}{cut} "
            "or remove such pairs"
        )


def lengths(shard: ShardIndex) -> Int64:
    """Returns the tokens of the source and the target of each pair: int64 [D, 2]."""
    parts = shard.sentences.reshape(-1, 2)
    source = parts[:, 1] - parts[:, 0]
    return np.stack((source, shard.length - source), axis=1)


def _lengths(shard: ShardIndex, spec: PackSpec) -> tuple[Int64, Int64]:
    """The lengths of the texts, and how many tokens are left after truncation."""
    assert spec.sides is not None
    whole = lengths(shard)
    used = whole.copy()
    if spec.truncate_targets:
        used[:, 1] = np.minimum(whole[:, 1], spec.sides.size[1] - 1)
    if spec.truncate_sources:
        beside = used[:, 1] if spec.sides.joined else 0
        used[:, 0] = np.minimum(whole[:, 0], np.maximum(spec.sides.size[0] - 1 - beside, 1))
    return whole, used


def _positions(length: Int64, spec: PackSpec) -> Int64:
    """The positions that each pair needs on either side: int64 [D, 2]."""
    assert spec.sides is not None
    needed = length + 1  # the end token
    if spec.sides.joined:
        needed[:, 0] += length[:, 1]
    return needed
