"""Rows of batches: what an objective makes of examples, and the columns that say which examples
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import Location
from data_pipeline.packing import task_rows
from data_pipeline.packing.plan import Int64
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.mixed_dataset import MixedSplit
from trainer.examples import Batch, Examples, PackSpec
from trainer.hashing import U64, combine, mix, name_key

_DROPOUT = name_key("dropout")


class RowMaker:
    """Makes rows; none depends on those that it is made with.

    Args:
        sources: the datasets.
        split: what is read of them.
        pack_spec: the objective's.
        collate: the objective's.
        seed: the run's seed.
    """

    def __init__(
        self,
        sources: Sequence[Dataset],
        split: MixedSplit,
        pack_spec: PackSpec,
        collate: Callable[[Examples, int], Batch],
        seed: int,
    ) -> None:
        # A name of a source that does not depend on which others there are.
        self._key = np.array(
            [int(source.manifest.digest[:16], 16) for source in sources], dtype=np.uint64
        )
        self._split, self._spec, self._collate, self._seed = split, pack_spec, collate, seed

    def make(
        self,
        number: Int64,
        at: Location,
        valid: npt.NDArray[np.bool_],
        read: Location,
        fed: npt.NDArray[np.bool_],
        width: int | None = None,
    ) -> Batch:
        """Makes the rows of global examples.

        Args:
            number: int64 [B], their numbers.
            at: their places.
            valid: bool [B], whether a row does not only pad.
            read: the places to read, which are others where examples are skipped.
            fed: bool [B], whether a row counts.
            width: positions of the rows, if all are shorter than the maximum.

        Raises:
            DataError: a shard is damaged.
        """
        examples = self._split.read(read, fed.astype(np.float32))
        arrays = dict(self._collate(examples, width or self._spec.sequence_length))
        source = self._split.source(at)
        arrays["dropout_key"] = self._dropout_key(number).astype(np.uint32).view(np.int32)
        arrays |= {"number": np.where(valid, number, -1), "source": source, "epoch": at.epoch}
        arrays["example"] = np.where(valid, self._split.ids(at), -1)
        arrays["digest"] = np.where(
            fed, _digest(self._key[source], arrays, self._spec.parts is None), 0
        )
        arrays["filled"] = np.where(fed, _filled(examples, self._spec, arrays), 0)
        if (labels := examples.labels) is not None:
            last = np.searchsorted(examples.row, np.arange(len(number)), side="right") - 1
            arrays |= {"document": np.where(fed, labels.document, -1), "begin": labels.begin}
            arrays["examples"] = labels.examples
            arrays |= {"column": examples.column[last], "length": examples.length[last]}
        return arrays

    def _dropout_key(self, number: Int64) -> U64:
        """A key for each sequence that the model computes.

        Uint64 [B], or [B, choices] of rows that have several.
        """
        if self._spec.parts is None or self._spec.parts.choices == 1:
            return combine(self._seed, _DROPOUT, number)
        return combine(self._seed, _DROPOUT, number[:, None], np.arange(self._spec.parts.choices))


def _digest(source: npt.NDArray[np.uint64], arrays: Batch, padding: bool) -> Int64:
    """Hashes each row's name and input tokens [B, ...].

    Int64 [B], to be summed modulo 2**64 over a batch.

    Each column has an odd factor of its own, so that no change of a single token leaves a row's sum
    as it was. Without `padding` it does not depend on how wide the rows are.
    """
    sums = []
    for name in ("tokens", "target_tokens"):
        if name in arrays:
            tokens = arrays[name].astype(np.uint64).reshape(len(arrays["epoch"]), -1)
            if not padding and "segments" in arrays:
                tokens[arrays["segments"].reshape(tokens.shape) == 0] = 0
            sums.append(tokens @ (mix(np.arange(tokens.shape[1])) | np.uint64(1)))
    return combine(source, arrays["epoch"], arrays["example"], *sums).view(np.int64)


def _filled(examples: Examples, spec: PackSpec, arrays: Batch) -> Int64:
    """The positions of each row that hold a token, special tokens included: int64 [B]."""
    if spec.parts is not None:
        return task_rows.filled(examples, spec)
    if spec.sides is not None:  # what a text takes of them is up to the objective
        names = [name for name in ("segments", "target_segments") if name in arrays]
        filled: Int64 = np.sum([np.count_nonzero(arrays[name], axis=1) for name in names], axis=0)
        return filled
    pieces = np.bincount(examples.row, minlength=examples.key.size)
    tokens = np.bincount(examples.row, weights=examples.length, minlength=examples.key.size).astype(
        np.int64
    )
    return tokens + spec.suffix * pieces + spec.prefix * (pieces if examples.isolated else 1)
