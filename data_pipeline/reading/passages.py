"""The passages of a dataset of retrieval, mapped whole: rows may name any of them at any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Shard, ShardIndex
from data_pipeline.packing import Int64
from data_pipeline.reading.packed_shard import gather
from samestep.errors import CorruptError


@dataclass(frozen=True, eq=False)
class Passages:
    """All passages by number. The tokens stay in the files; the index takes 12 bytes a passage.

    Attributes:
        tokens: each shard's file as tokens.
        first: int64 [shards], number of each shard's first passage.
        start: int64 [P], index of each passage's first token in its file.
        length: int32 [P], number of its tokens.
        dtype: of tokens.
    """

    tokens: tuple[memoryview, ...]
    first: Int64
    start: Int64
    length: npt.NDArray[np.int32]
    dtype: np.dtype[np.unsignedinteger]

    @classmethod
    def of(cls, shards: Sequence[Shard], dtype: np.dtype[np.unsignedinteger]) -> Passages:
        """The passages of open shards, in order."""
        sizes = np.array([len(shard.length) for shard in shards])
        return cls(
            tuple(shard.tokens.data for shard in shards),
            np.cumsum(sizes) - sizes,
            np.concatenate([shard.start for shard in shards]),
            np.concatenate([shard.length for shard in shards]).astype(np.int32),
            dtype,
        )

    def check(self, rows: ShardIndex, name: str) -> None:
        """Rejects a shard of rows that names a passage beyond the last one.

        Raises:
            CorruptError: it does; a stranger's may.
        """
        largest = int(rows.passages.max(initial=0))
        if largest >= len(self.length):
            raise CorruptError(
                f"{name} names passage {largest} of {len(self.length)}. Build the dataset again."
            )

    def read(self, number: Int64, length: Int64) -> npt.NDArray[np.int32]:
        """The first tokens of passages, end to end: int32 [sum of `length`]."""
        # Shards with 3, 2 and 4 passages begin at 0, 3 and 5; passage 4 is in the second one.
        shard = np.searchsorted(self.first, number, side="right") - 1
        begin = self.start[number]
        files = (self.tokens[each] for each in shard.tolist())
        return gather(files, begin, begin + length, self.dtype).astype(np.int32)
