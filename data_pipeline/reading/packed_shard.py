"""Open shards with their plans, as buffers that examples are gathered from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Shard
from data_pipeline.packing.plan import Int64, PackPlan
from trainer.examples import Labels

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class PackedShard:
    """An open shard and its plan, as buffers, whose elements and slices cost less than those of
    arrays.

    Attributes:
        tokens: [T], the whole file as tokens.
        start: [N + 1], `example_start` of the `PackPlan`.
        pieces: [3 * M], per piece the index of its first token in `tokens`, its length and its
            column.
        random: bool [N], as in `PackPlan`.
        labels: [K], those of the shard's documents where they are rows of a task; else empty.
        rows: int64 [N, 6], where documents are rows of a task: per example the first of its labels
            and the one after its last, its document's number in the split, its last piece's first
            token within that, how many examples there are of the document, and the positions up to
            that piece's end.
    """

    tokens: memoryview
    start: memoryview
    pieces: memoryview
    random: npt.NDArray[np.bool_]
    labels: memoryview
    rows: Int64

    @classmethod
    def of(
        cls, shard: Shard, plan: PackPlan, dtype: np.dtype[np.generic], first_document: int
    ) -> PackedShard:
        """Lays out a shard.

        Args:
            shard: with its labels, if they will be wanted.
            plan: of its examples.
            dtype: of `start` and `pieces`.
            first_document: the number of its first document in the split.
        """
        address = shard.start[plan.document] + plan.begin
        pieces = np.stack((address, plan.length, plan.column), axis=1).astype(dtype)
        rows = np.zeros((0, 6), dtype=np.int64)
        if len(shard.label_start):
            last = plan.example_start[1:] - 1
            document = plan.document[last]
            labels = shard.label_start[document], shard.label_start[document + 1]
            end = plan.column[last] + plan.length[last]
            examples = np.bincount(document)[document]
            rows = np.stack(
                (*labels, first_document + document, plan.begin[last], examples, end), axis=1
            )
        return cls(
            shard.tokens.data,
            plan.example_start.astype(dtype).data,
            pieces.reshape(-1).data,
            plan.random,
            shard.labels.data,
            rows,
        )

    @property
    def bytes(self) -> int:
        """Of memory, tokens not counted."""
        return self.start.nbytes + self.pieces.nbytes + self.labels.nbytes + self.rows.nbytes


def gather(
    buffers: Iterable[memoryview], begin: Int64, end: Int64, dtype: np.dtype[Scalar] | type[Scalar]
) -> npt.NDArray[Scalar]:
    """Puts the slice [begin:end] of each buffer end to end."""
    places = zip(buffers, begin.tolist(), end.tolist(), strict=True)
    return np.frombuffer(b"".join([buffer[first:last] for buffer, first, last in places]), dtype)


def gather_labels(shards: Sequence[PackedShard], index: Int64) -> Labels:
    """What is to be predicted of examples, given the shard of each and its number there."""
    rows = np.array(
        [shard.rows[i] for shard, i in zip(shards, index.tolist(), strict=True)]
    ).reshape(-1, 6)
    first, end, document, begin, examples, _ = rows.T
    values = gather((shard.labels for shard in shards), first, end, np.float32)
    return Labels(values, end - first, document, begin, examples)
