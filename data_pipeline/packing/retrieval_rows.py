"""Packs rows of retrieval: a row is one example, in which its query comes first.

Which passages follow depends on the epoch, so `reading.retrieval_rows` adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing import Int64, PackPlan
from samestep.errors import ConfigError, DataError
from samestep.examples import PackSpec


def plan(shard: ShardIndex, spec: PackSpec) -> PackPlan:
    """Makes an example of each row, with the whole query."""
    rows = len(shard.length)
    return PackPlan(
        example_start=np.arange(rows + 1),
        document=np.arange(rows),
        begin=np.zeros(rows, dtype=np.int64),
        length=shard.length,
        column=np.full(rows, spec.prefix),
    )


def check(shard: ShardIndex, spec: PackSpec, files: Sequence[str]) -> None:
    """Rejects rows whose passages or scores the objective cannot use, and too short sequences.

    Args:
        files: names of the source files that `shard.origin` refers to.

    Raises:
        DataError: names the first row.
        ConfigError: names the length.
    """
    assert spec.parts is not None
    needed = spec.parts.negatives
    # A row with 1 positive and 3 negatives, then one with 2 and 0, have the starts 0 1 4 6 6.
    if len(shard.passage_start) != 2 * len(shard.length) + 1:
        raise DataError("a shard of retrieval has no passages. Build the dataset again.")
    counts = sizes(shard.passage_start)
    scores = np.diff(shard.label_start)
    # A teacher scores all passages of all rows, or there is none.
    if scores.any() and not np.array_equal(scores, counts.sum(axis=1)):
        raise DataError("a shard of retrieval lacks scores of a row. Build the dataset again.")
    wrong = np.flatnonzero((counts[:, 1] < needed) | (counts[:, 0] < 1))
    if wrong.size:
        file, line = shard.origin[wrong[0]].tolist()
        raise DataError(
            f"{files[file]}:{line}: the row has {counts[wrong[0], 1]} negatives and the objective "
            f"reads {needed} (too few in {wrong.size} of the {len(counts)} rows of its shard); "
            "lower objective.negatives, remove such rows, or name all columns of negatives in "
            "source.negatives and build again"
        )
    known = spec.parts.known_positives
    wrong = np.flatnonzero(counts[:, 0] > known)
    if known and wrong.size:
        file, line = shard.origin[wrong[0]].tolist()
        raise DataError(
            f"{files[file]}:{line}: the row has {counts[wrong[0], 0]} positives and "
            f"objective.known_positives is {known} (too few for {wrong.size} of the {len(counts)} "
            f"rows of its shard, of which one has {counts[:, 0].max()}); raise it, or set it to 0"
        )
    if spec.parts.score_range is not None:
        least, most = spec.parts.score_range
        wrong = np.flatnonzero(~((shard.labels >= least) & (shard.labels <= most)))
        if wrong.size:
            # Rows of 4 and 2 scores start at 0 and 4, so that score 5 is of row 1.
            row = np.searchsorted(shard.label_start, wrong[0], side="right") - 1
            file, line = shard.origin[row].tolist()
            raise DataError(
                f"{files[file]}:{line}: the row has the score {shard.labels[wrong[0]]:g}, and this "
                f"loss needs scores from {least:g} to {most:g}; use objective.loss=softmax, or "
                "mse, margin_mse or kl, which take any scores"
            )
    # A cross-encoder reads a query with one passage at a time, an encoder all texts of a row.
    texts = 2 if spec.parts.layout == "choices" else 2 + needed  # in a sequence
    special = spec.prefix + spec.suffix + spec.parts.between * (texts - 1)
    if spec.sequence_length < special + texts:
        raise ConfigError(
            f"data.sequence_length is {spec.sequence_length}, and {texts} texts need {special} "
            f"special tokens and a token each; use at least {special + texts}"
        )


def sizes(passage_start: Int64) -> Int64:
    """Number of positives and negatives of each row: int64 [D, 2]."""
    counts: Int64 = np.diff(passage_start).reshape(-1, 2)
    return counts
