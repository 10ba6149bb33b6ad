"""Rows of batches: the objective's arrays, and the columns that identify the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import Location
from data_pipeline.packing import Int64
from data_pipeline.reading.concat_dataset import ConcatSplit
from data_pipeline.reading.dataset import Dataset
from samestep.examples import Batch, Examples, PackSpec
from samestep.hashing import U64, combine, hash_rows, name_key

_DROPOUT = name_key("dropout")
_STEP = name_key("step")


class RowMaker:
    """Makes rows. No row depends on the other rows of its batch."""

    def __init__(
        self,
        sources: Sequence[Dataset],
        split: ConcatSplit,
        pack_spec: PackSpec,
        collate: Callable[[Examples, int], Batch],
        seed: int,
    ) -> None:
        # Identifies a source independently of the other sources.
        self._key = np.array(
            [int(source.manifest.digest[:16], 16) for source in sources], dtype=np.uint64
        )
        self._split, self._spec, self._collate, self._seed = split, pack_spec, collate, seed

    def make(
        self,
        number: Int64,
        first: Int64,
        at: Location,
        valid: npt.NDArray[np.bool_],
        read: Location,
        has_weight: npt.NDArray[np.bool_],
        width: int | None = None,
    ) -> Batch:
        """Makes the rows of global examples.

        Args:
            number: int64 [B], global example numbers.
            first: int64 [B], the smallest of these in the step of each row, on all replicas.
            at: their locations.
            valid: bool [B], False for padding rows.
            read: locations to read: other ones for skipped examples.
            has_weight: bool [B], False for padding rows and skipped examples.
            width: positions of a row, if less than the maximum.

        Raises:
            DataError: a shard is damaged.
        """
        examples = self._split.read(read, has_weight.astype(np.float32))
        arrays = dict(self._collate(examples, width or self._spec.sequence_length))
        source = self._split.source(at)
        # Keyed by the global number, so the mask of an example does not depend on its row.
        arrays["dropout_key"] = self._dropout_key(number).astype(np.uint32).view(np.int32)
        # The same in all rows of a step, for masks that the step shares, as masks of weights.
        step_key = combine(self._seed, _STEP, first)
        arrays["step_key"] = step_key.astype(np.uint32).view(np.int32)
        arrays |= {"number": np.where(valid, number, -1), "source": source, "epoch": at.epoch}
        arrays["example"] = np.where(valid, self._split.ids(at), -1)
        arrays["digest"] = np.where(
            has_weight, _digest(self._key[source], arrays, self._spec.parts is None), 0
        )
        arrays["filled"] = np.where(has_weight, _filled(examples, self._spec, arrays), 0)
        if (labels := examples.labels) is not None:
            # The last chunk of each row: tags and answers are counted from its first token.
            last = np.searchsorted(examples.row, np.arange(len(number)), side="right") - 1
            arrays |= {"document": np.where(has_weight, labels.document, -1), "begin": labels.begin}
            arrays["examples"] = labels.examples
            arrays |= {"column": examples.column[last], "length": examples.length[last]}
        return arrays

    def _dropout_key(self, number: Int64) -> U64:
        """Dropout keys: uint64 [B], or [B, choices] if rows hold several sequences."""
        if self._spec.parts is None or self._spec.parts.choices == 1:
            return combine(self._seed, _DROPOUT, number)
        return combine(self._seed, _DROPOUT, number[:, None], np.arange(self._spec.parts.choices))


def _digest(source: npt.NDArray[np.uint64], arrays: Batch, padding: bool) -> Int64:
    """Hashes each row's identity and input tokens: int64 [B], summed modulo 2**64 over a batch.

    Without `padding` the hash does not depend on the rows' width.
    """
    sums = []
    for name in ("tokens", "target_tokens"):
        if name in arrays:
            tokens = arrays[name].astype(np.uint64).reshape(len(arrays["epoch"]), -1)
            if not padding and "segments" in arrays:
                tokens[arrays["segments"].reshape(tokens.shape) == 0] = 0
            sums.append(hash_rows(tokens))
    return combine(source, arrays["epoch"], arrays["example"], *sums).view(np.int64)


def _filled(examples: Examples, spec: PackSpec, arrays: Batch) -> Int64:
    """Number of positions with a token in each row, special tokens included: int64 [B]."""
    if spec.parts is not None:
        from data_pipeline.packing import task_rows

        return task_rows.filled(examples, spec)
    if spec.sides is not None:  # only the objective knows what a text takes of each side
        names = [name for name in ("segments", "target_segments") if name in arrays]
        filled: Int64 = np.sum([np.count_nonzero(arrays[name], axis=1) for name in names], axis=0)
        return filled
    # If attention is isolated each chunk has its own prefix; otherwise the row has one.
    pieces = np.bincount(examples.row, minlength=examples.key.size)
    tokens = np.bincount(examples.row, weights=examples.length, minlength=examples.key.size).astype(
        np.int64
    )
    return tokens + spec.suffix * pieces + spec.prefix * (pieces if examples.isolated else 1)
