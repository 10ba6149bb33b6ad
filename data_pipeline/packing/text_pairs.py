"""Packing pairs of texts, a source and its target, into examples with two sides, as an encoder's and a decoder's.

A pair is a document of two parts, and an example has two pieces for each of its pairs. Under `best_fit` both sides are
packed at once (`boxes`), under `padded` an example is one pair. After each text there is a cell for the token that ends
it. Where both sides are rows of a single decoder (`Sides.joined`), a pair takes the source's and the target's cells of
the first side but for the one that ends the target, which is only predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing.boxes import count_boxes, pack_boxes
from data_pipeline.packing.plans import Int64, PackPlan, starts
from trainer.errors import DataError
from trainer.examples import PackSpec, Policy


def plan(shard: ShardIndex, spec: PackSpec, policy: Policy, key: int = 0) -> PackPlan:
    """Makes the examples of a shard whose pairs passed `check`.

    The column of a piece is the first of its cells on its own side.

    Args:
        shard: with its parts.
        spec: of pairs of texts.
        policy: best_fit or padded.
        key: chooses which of several pairs of equal lengths goes where, and the examples' order (`best_fit` only).
    """
    whole, length = _lengths(shard, spec)
    if policy == "padded":
        example, column = np.arange(len(length)), np.zeros_like(length)
    else:
        assert spec.sides is not None
        example, column = pack_boxes(_cells(length, spec), spec.sides.size, key)
    begin = np.zeros_like(length)
    begin[:, 1] = whole[:, 0]
    order = np.lexsort((column[:, 0], example))
    begin, length, column = (array[order].reshape(-1) for array in (begin, length, column))
    return PackPlan(2 * starts(example[order]), np.repeat(order, 2), begin, length, column)


def count_examples(shard: ShardIndex, spec: PackSpec, policy: Policy) -> int:
    """The number of examples of `plan`; the arguments are the same, and no key matters."""
    if policy == "padded":
        return len(shard.length)
    assert spec.sides is not None
    return count_boxes(_cells(_lengths(shard, spec)[1], spec), spec.sides.size)


def check(shard: ShardIndex, spec: PackSpec, files: Sequence[str]) -> None:
    """Refuses texts that do not fit into an example by themselves.

    Args:
        shard: with its parts.
        spec: of pairs of texts.
        files: the names of source files that `shard.origin` counts.

    Raises:
        DataError: naming the first such text and what would fit.
    """
    assert spec.sides is not None
    cells, size = _cells(_lengths(shard, spec)[1], spec), spec.sides.size
    settings = ("data.sequence_length", "objective.target_length")
    for side in (1, 0):
        wrong = np.flatnonzero(cells[:, side] > size[side])
        if not wrong.size:
            continue
        file, line = shard.origin[wrong[0]].tolist()
        name = ("pair" if spec.sides.joined else "source", "target")[side]
        truncated = (spec.truncate_sources, spec.truncate_targets)[side]
        cut = "" if truncated else f", set objective.truncate_{('sources', 'targets')[side]}=true"
        raise DataError(
            f"{files[file]}:{line}: with the tokens that end texts the {name} takes {cells[wrong[0], side]} cells, and "
            f"{settings[side]} is {size[side]} (too few for {wrong.size} of the {len(cells)} pairs of its shard); "
            f"raise it to at least {cells[:, side].max()}{cut} or remove such pairs"
        )


def lengths(shard: ShardIndex) -> Int64:
    """The tokens of the source and of the target of each pair: int64 [D, 2]."""
    parts = shard.sentences.reshape(-1, 2)
    source = parts[:, 1] - parts[:, 0]
    return np.stack((source, shard.length - source), axis=1)


def _lengths(shard: ShardIndex, spec: PackSpec) -> tuple[Int64, Int64]:
    """As `lengths`, and how many of these tokens are used."""
    assert spec.sides is not None
    whole = lengths(shard)
    used = whole.copy()
    if spec.truncate_targets:
        used[:, 1] = np.minimum(whole[:, 1], spec.sides.size[1] - 1)
    if spec.truncate_sources:
        beside = used[:, 1] if spec.sides.joined else 0
        used[:, 0] = np.minimum(whole[:, 0], np.maximum(spec.sides.size[0] - 1 - beside, 1))
    return whole, used


def _cells(length: Int64, spec: PackSpec) -> Int64:
    """The cells that each pair takes on either side: int64 [D, 2]."""
    assert spec.sides is not None
    cells = length + 1
    if spec.sides.joined:
        cells[:, 0] += length[:, 1]
    return cells
