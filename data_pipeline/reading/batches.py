"""One replica's micro-batches of steps: a pure function of where in the order the steps begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import ExampleOrder, Replica, share
from data_pipeline.order.exclusions import Exclusions
from data_pipeline.packing.plan import Int64
from data_pipeline.reading.corruption import CorruptShards
from data_pipeline.reading.length_groups import LengthGroups
from data_pipeline.reading.prefetch import Prefetcher
from data_pipeline.reading.rows import RowMaker
from trainer.errors import ConfigError
from trainer.examples import Batch

_BLOCK_CELLS = (
    2**18
)  # what numpy takes to begin no longer shows, and the largest arrays are of 2 MB


def check_batch(global_batch_size: int, devices: int) -> None:
    """Refuses a batch that some devices would have no example of.

    Raises:
        ConfigError: naming the smallest batch.
    """
    if global_batch_size < devices:
        raise ConfigError(
            f"global_batch_size {global_batch_size} is less than the {devices} data-parallel "
            "devices, so "
            f"some would have nothing to do; use at least {devices}, or fewer devices"
        )


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch is divided into micro-batches of one shape, equally many on each replica.

    10 examples on 2 devices with a micro-batch size of 4 are 5 examples for each device, in 2
    micro-batches of 3 rows; one of these 6 rows only pads.

    Attributes:
        global_batch_size: examples of one optimizer step, over all replicas.
        micro_batch_size: the most rows of one forward pass on a device.
        replica: the data-parallel rank of this process.

    Raises:
        ConfigError: the batch has fewer examples than devices, or a micro-batch has no rows.
    """

    global_batch_size: int
    micro_batch_size: int
    replica: Replica

    def __post_init__(self) -> None:
        check_batch(self.global_batch_size, self.replica.count * self.replica.devices)
        if self.micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size must be at least 1, not {self.micro_batch_size}")

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return -(-self._device_examples // self.micro_batch_size)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, over all devices of the replica."""
        return -(-self._device_examples // self.micro_batches) * self.replica.devices

    @property
    def _device_examples(self) -> int:
        """The most examples of a step that one device computes."""
        return -(-self.global_batch_size // (self.replica.count * self.replica.devices))


class BatchMaker:
    """Makes micro-batches.

    Attributes:
        order: the order of the examples.
        most_steps: how many steps are worth making together.

    Args:
        order: the order of the examples.
        counts: int64 [shards], examples in each shard.
        rows: makes the rows.
        row_positions: positions of a row.
        layout: of a step.
        prefetcher: receives the shards that will be needed.
    """

    def __init__(
        self,
        order: ExampleOrder,
        counts: Int64,
        rows: RowMaker,
        row_positions: int,
        layout: BatchLayout,
        prefetcher: Prefetcher | None,
    ) -> None:
        self.order = order
        self._counts, self._row_maker, self._prefetcher, self._width = (
            counts,
            rows,
            prefetcher,
            row_positions,
        )
        self._batch_size, self._replica = layout.global_batch_size, layout.replica
        self._micro_batches, self._rows = layout.micro_batches, layout.rows
        # Numpy is slow with small arrays and wants memory for large ones: rows are made in blocks
        # of micro-batches.
        together = max(1, _BLOCK_CELLS // (self._rows * row_positions))
        self._block_rows = together * self._rows
        self.most_steps = max(1, together // self._micro_batches)

    def make(
        self, starts: Sequence[int], excluded: Exclusions, corrupt: CorruptShards
    ) -> list[list[Batch]]:
        """The replica's micro-batches of the steps that begin with these examples.

        There are fewer after the end of a finite order.

        Raises:
            CorruptShardError: a shard turns out to be corrupt.
            DataError: a shard cannot be read.
        """
        shares = [self._share(start, excluded) for start in starts]
        number, valid = (np.concatenate(parts) for parts in zip(*shares, strict=True))
        at = self.order.locate(number)
        if self._prefetcher is not None and len(number):
            replica = self._replica
            ahead = self.order.shards_ahead(
                int(number.min()), self._batch_size, replica.index, replica.count
            )
            self._prefetcher.expect(corrupt.without(np.concatenate((at.shard, ahead))))
        made: list[Batch] = []
        for cut, width in self._blocks(starts, len(number), excluded):
            gone = corrupt.has(number[cut], at.shard[cut])
            read = corrupt.stand_in(at[cut], gone, self._counts)
            # No row depends on those that it is made with.
            arrays = self._row_maker.make(
                number[cut], at[cut], valid[cut], read, valid[cut] & ~gone, width
            )
            begins = range(0, len(gone), self._rows)
            made += [
                {name: array[i : i + self._rows] for name, array in arrays.items()} for i in begins
            ]
        return [
            made[first : first + self._micro_batches]
            for first in range(0, len(made), self._micro_batches)
        ]

    def _blocks(
        self, starts: Sequence[int], rows: int, excluded: Exclusions
    ) -> Iterator[tuple[slice, int | None]]:
        """The parts of so many rows of steps that are made at a time, and how wide.

        None is as wide as rows can be.
        """
        if not isinstance(self.order, LengthGroups):
            for first in range(0, rows, self._block_rows):
                yield slice(first, first + self._block_rows), None
            return
        each = self._micro_batches * self._rows
        for first, start in zip(
            range(0, rows, each), starts, strict=False
        ):  # none after the end of a finite order
            yield (
                slice(first, first + each),
                self.order.width(self._batch(start, excluded), self._width),
            )

    def _batch(self, start: int, excluded: Exclusions) -> Int64:
        """The numbers of all rows of the global batch from example `start`."""
        if excluded.after(start, self._batch_size) == start + self._batch_size:
            return self.order.batch(start, self._batch_size)
        return self.order.rows(excluded.take(start, self._batch_size))

    def _share(self, start: int, excluded: Exclusions) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """The numbers of the replica's rows of the global batch from example `start`, and which do
        not only pad.
        """
        batch = self._batch(start, excluded)
        mine = batch[share(len(batch), self._replica.index, self._replica.count)]
        rows = self._micro_batches * self._rows if len(batch) else 0
        # A padding row is a valid example: softmax over a row without any token would be NaN.
        padding = np.repeat(mine[:1] if len(mine) else batch[:1], rows - len(mine))
        return np.concatenate((mine, padding)), np.arange(rows) < len(mine)
