"""Open shards with their packing plans, as buffers from which examples are gathered."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Shard
from data_pipeline.packing import Int64, PackPlan
from samestep.environment import open_files
from samestep.errors import ConfigError
from samestep.examples import Labels

MAX_OPEN_SHARDS = 2048  # per split; 64 lanes with windows of 4 shards need about 320
_FEW_SHARDS = 128  # where the limit of open files is unknown

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class PackedShard:
    """An open shard and its plan.

    These are memoryviews because their elements and slices are cheaper than an array's: a batch
    takes thousands of short slices.

    Attributes:
        tokens: [T], the whole file as tokens.
        start: [N + 1], `example_start` of the `PackPlan`.
        pieces: [3 * M], for each chunk the index of its first token in `tokens`, its length and its
            column.
        random: bool [N], as in `PackPlan`.
        labels: [K], the labels of the shard's documents; empty unless they are rows of a task.
        rows: int64 [N, 6], for rows of a task: for each example the range [first, end) of its
            labels, its document's index in the split, its last chunk's first token in the document,
            the number of examples of the document, and the number of filled positions.
        passages, passage_start: of rows of retrieval, as in `ShardIndex`.
    """

    tokens: memoryview
    start: memoryview
    pieces: memoryview
    random: npt.NDArray[np.bool_]
    labels: memoryview
    rows: Int64
    passages: npt.NDArray[np.uint32]
    passage_start: Int64

    @classmethod
    def of(
        cls, shard: Shard, plan: PackPlan, dtype: np.dtype[np.generic], first_document: int
    ) -> PackedShard:
        """Builds the buffers of a shard.

        Args:
            shard: opened with labels if they are needed.
            dtype: of `start` and `pieces`.
            first_document: index of its first document in the split.
        """
        # The chunk's first token, counted through the whole file.
        address = shard.start[plan.document] + plan.begin
        pieces = np.stack((address, plan.length, plan.column), axis=1).astype(dtype)
        rows = np.zeros((0, 6), dtype=np.int64)
        if len(shard.label_start):
            # A long row of a task may be several examples; labels belong to the whole document.
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
            shard.passages,
            shard.passage_start,
        )

    @property
    def bytes(self) -> int:
        """Bytes of memory, without the memory-mapped tokens."""
        of_rows = self.labels.nbytes + self.rows.nbytes
        of_passages = self.passages.nbytes + self.passage_start.nbytes
        return self.start.nbytes + self.pieces.nbytes + of_rows + of_passages


def gather(
    buffers: Iterable[memoryview], begin: Int64, end: Int64, dtype: np.dtype[Scalar] | type[Scalar]
) -> npt.NDArray[Scalar]:
    """Concatenates the slice [begin:end] of each buffer."""
    # Joining byte slices is several times faster than numpy's concatenation of short arrays.
    places = zip(buffers, begin.tolist(), end.tolist(), strict=True)
    return np.frombuffer(b"".join([buffer[first:last] for buffer, first, last in places]), dtype)


def gather_labels(shards: Sequence[PackedShard], index: Int64) -> Labels:
    """The labels of examples, given the shard of each and its index there."""
    rows = np.array(
        [shard.rows[i] for shard, i in zip(shards, index.tolist(), strict=True)]
    ).reshape(-1, 6)
    first, end, document, begin, examples, _ = rows.T
    values = gather((shard.labels for shard in shards), first, end, np.float32)
    return Labels(values, end - first, document, begin, examples)


@functools.cache
def max_open_shards() -> int:
    """Maximum number of open shards per split: `MAX_OPEN_SHARDS`, or less if the system says so.

    Each needs a file descriptor, and a process may start with as few as 256. The first call raises
    the limit to three times `MAX_OPEN_SHARDS`: for training, for evaluation, and for all else.
    """
    limits = open_files(3 * MAX_OPEN_SHARDS)
    return _FEW_SHARDS if limits is None else int(max(1, min(MAX_OPEN_SHARDS, limits[0] // 3)))


def check_open_shards(needed: int, lanes: int, window: int) -> None:
    """Rejects an order that reads more shards at a time than may be open.

    Raises:
        ConfigError: names the settings of the order.
    """
    if needed > max_open_shards():
        raise ConfigError(
            f"data.lanes {lanes} and data.window {window} need {needed} open shards "
            f"in this process, which can open {max_open_shards()}. Lower one of them (in a new "
            "run), use more devices, or raise the limit of open files (ulimit -n)."
        )
