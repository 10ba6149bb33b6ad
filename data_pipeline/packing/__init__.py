"""Packing: which tokens of which documents make up each example of a shard.

Reading order for newcomers: `PackPlan` (the result, below), `documents` (the packings of plain
text), `bins` (the algorithm behind best_fit), `full_sentences` (RoBERTa's packing), `policy`
(chooses a packing). `segment_pairs`, `text_pairs` and `task_rows` are packings for next-sentence
prediction, translation and labeled data.

Packing is the first of four steps from documents to the batch of a rank:

    documents  --packing-->  examples of a shard       (this package)
    examples   --order---->  a global sequence 0, 1, 2, ... over all shards and epochs  (`order`)
    sequence   --order---->  global batches, and the rows of each rank                  (`order`)
    rows       --reading-->  arrays                                                     (`reading`)

Vocabulary: a *chunk* is a run of tokens of one document; a *bin* is an example being filled with
chunks; a *plan* lists the chunks of every example of a shard; a *policy* is the setting
`data.packing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64: TypeAlias = npt.NDArray[np.int64]

# Part of every digest of a packing. Raise it when a plan has other examples for the same input.
PACKING_VERSION = 2


@dataclass(frozen=True)
class PackPlan:
    """The N examples of a shard and their M chunks, ordered by example, then position.

    For example, documents A, B and C of 5, 1 and 4 tokens, packed by best_fit into examples of 6
    positions with a special token on either side of each chunk: [AAAA] [CCCC] [A][B]. This is

        example_start  0  1  2     4      example 2 has the chunks 2 and 3
        document       0  2  0  1         one column for each chunk
        begin          0  0  4  0         chunk 2 is the fifth token of A
        length         4  4  1  1
        column         1  1  1  4

    Attributes:
        example_start: int64 [N + 1]; example n has chunks example_start[n] to example_start[n + 1].
        document: int64 [M], index of the chunk's document in the shard.
        begin: int64 [M], the chunk's first token, counted within its document.
        length: int64 [M], tokens of the chunk; at least 1.
        column: int64 [M], position in the example of the chunk's first token.
        random: bool [N], whether segment B comes from another document; empty unless the policy is
            `pairs`.
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
    # One arange numbers the elements of all runs: 0 1 2 3 4. Run i begins at element
    # end[i] - count[i] (0 and 2), where it should have the value first[i], so first[i] minus that
    # is added to each of its elements: 10 10 18 18 18.
    end = np.cumsum(count)
    total = end[-1] if len(end) else 0
    return np.repeat(first - (end - count), count) + np.arange(total)


def starts(example: Int64) -> Int64:
    """Returns `example_start`, given the sorted example of each chunk.

    For example, [0, 1, 2, 2] gives [0, 1, 2, 4].
    """
    chunks = np.bincount(example)
    return np.concatenate(([0], np.cumsum(chunks))).astype(np.int64)
