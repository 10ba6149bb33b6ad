"""The micro-batches of a replica: a pure function of the examples at which steps begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import ExampleOrder, Replica, share
from data_pipeline.order.exclusions import Exclusions
from data_pipeline.packing import Int64
from data_pipeline.reading.dataset import CorruptShardError
from data_pipeline.reading.rows import RowMaker
from samestep.errors import ConfigError, DataError
from samestep.examples import Batch

if TYPE_CHECKING:
    from data_pipeline.reading.corruption import CorruptShards
    from data_pipeline.reading.prefetch import Prefetcher

# Positions of a block: enough to hide the overhead of numpy calls; int64 arrays have 2 MB.
_BLOCK_POSITIONS = 2**18


def check_batch(global_batch_size: int, devices: int) -> None:
    """Rejects a global batch with fewer examples than devices."""
    if global_batch_size < devices:
        raise ConfigError(
            f"global_batch_size {global_batch_size} is less than the {devices} data-parallel "
            f"devices. Use at least {devices}, or fewer devices."
        )


@dataclass(frozen=True)
class BatchLayout:
    """Divides a global batch into micro-batches of one shape, the same number on each replica.

    10 examples on 2 devices with a micro-batch size of 4 are 5 examples per device, in 2
    micro-batches of 3 rows; one of these 6 rows is padding.

    With units, the 10 examples are 3 units of 4 rows, the last with 2 padding rows, on any number
    of devices. Of 2 devices, the first computes 2 units, the second 1 and one of padding rows only.

    Attributes:
        global_batch_size: examples per optimizer step, over all replicas.
        micro_batch_size: maximum number of rows per device and forward pass; with units, exactly
            this number.
        replica: the data-parallel rank of this process.
        units: whether micro-batches are the units of exact sums, whose examples depend on the two
            sizes only, not on the devices.

    Raises:
        ConfigError: the batch has fewer examples than devices, or a micro-batch has no rows.
    """

    global_batch_size: int
    micro_batch_size: int
    replica: Replica
    units: bool = False

    def __post_init__(self) -> None:
        if not self.units:
            check_batch(self.global_batch_size, self.replica.count * self.replica.devices)
        if self.micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size is {self.micro_batch_size}. Use 1 or more.")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        if self.units:
            return -(-self.global_batch_size // (self.micro_batch_size * self.replica.count))
        return -(-self._device_examples // self.micro_batch_size)

    @property
    def rows(self) -> int:
        """Rows per micro-batch, over all devices of the replica."""
        if self.units:
            return self.micro_batch_size
        return -(-self._device_examples // self.micro_batches) * self.replica.devices

    @property
    def _device_examples(self) -> int:
        """Maximum number of examples per device and step."""
        return -(-self.global_batch_size // (self.replica.count * self.replica.devices))


class Plan(NamedTuple):
    """A block to make: its number, the first example of each step, and what to skip."""

    number: int
    starts: list[int]
    excluded: Exclusions
    corrupt: CorruptShards | None


class BatchMaker:
    """Makes micro-batches.

    Attributes:
        order: the order of the examples.
        most_steps: number of steps worth making together.

    Args:
        counts: int64 [shards], examples in each shard.
        row_positions: positions of a row.
        prefetcher: downloads shards that will be needed; None if all are local.
    """

    def __init__(
        self,
        order: ExampleOrder,
        counts: Int64,
        row_maker: RowMaker,
        row_positions: int,
        layout: BatchLayout,
        prefetcher: Prefetcher | None,
    ) -> None:
        self.order = order
        self._counts, self._row_maker, self._width = counts, row_maker, row_positions
        self._prefetcher = prefetcher
        self._batch_size, self._replica = layout.global_batch_size, layout.replica
        self._units = layout.units
        self._micro_batches, self._rows = layout.micro_batches, layout.rows
        # Numpy has overhead for small arrays, and large ones need memory. So rows are made in
        # blocks: micro-batches of 16 x 128 positions in blocks of 128.
        together = max(1, _BLOCK_POSITIONS // (self._rows * row_positions))
        self._block_rows = together * self._rows
        self.most_steps = max(1, together // self._micro_batches)

    def make(self, plan: Plan) -> list[list[Batch]]:
        """Makes the replica's micro-batches of the steps of a block.

        A finite order may end before the last step.

        Raises:
            CorruptShardError: a shard turns out to be corrupt.
            DataError: a shard cannot be read.
        """
        _, starts, excluded, corrupt = plan
        # All steps of the block are located and read together.
        shares = [self._share(start, excluded) for start in starts]
        number, valid, first = (np.concatenate(parts) for parts in zip(*shares, strict=True))
        at = self.order.locate(number)
        if self._prefetcher is not None and len(number):
            # Units are not the equal shares that an order knows of: all shards of the batch.
            replica = (0, 1) if self._units else (self._replica.index, self._replica.count)
            # From the next block on: excluded examples in this one shift the batches behind them.
            after = excluded.after(starts[-1], self._batch_size)
            ahead = self.order.shards_ahead(after, self._batch_size, *replica)
            shards = np.concatenate((at.shard, ahead))
            self._prefetcher.expect(shards if corrupt is None else corrupt.without(shards))
        made: list[Batch] = []
        for cut, width in self._blocks(starts, len(number), excluded):
            read, has_weight = at[cut], valid[cut]
            if corrupt is not None:
                # Rows of corrupt shards read another example, and get no weight.
                gone = corrupt.has(number[cut], read.shard)
                read, has_weight = corrupt.stand_in(read, gone, self._counts), has_weight & ~gone
            arrays = self._row_maker.make(
                number[cut], first[cut], at[cut], valid[cut], read, has_weight, width
            )
            begins = range(0, len(has_weight), self._rows)
            made += [
                {name: array[i : i + self._rows] for name, array in arrays.items()} for i in begins
            ]
        step = self._micro_batches
        return [made[first : first + step] for first in range(0, len(made), step)]

    def _blocks(
        self, starts: Sequence[int], rows: int, excluded: Exclusions
    ) -> Iterator[tuple[slice, int | None]]:
        """Yields slices of `rows` rows to make at a time, and their width; None is the maximum."""
        width_of = self.order.width
        if width_of is None:
            for first in range(0, rows, self._block_rows):
                yield slice(first, first + self._block_rows), None
            return
        each = self._micro_batches * self._rows
        # With length groups, every step has its own width: the global batch's, so that all replicas
        # have the same. A finite order may end before the last start.
        for first, start in zip(range(0, rows, each), starts, strict=False):
            width = width_of(self._batch(start, excluded), self._width)
            yield slice(first, first + each), width

    def _batch(self, start: int, excluded: Exclusions) -> Int64:
        """Example numbers of the global batch from example `start`, sorted by lane."""
        # Without exclusions inside, the batch is a plain range of numbers.
        if excluded.after(start, self._batch_size) == start + self._batch_size:
            return self.order.batch(start, self._batch_size)
        return self.order.rows(excluded.take(start, self._batch_size))

    def _share(
        self, start: int, excluded: Exclusions
    ) -> tuple[Int64, npt.NDArray[np.bool_], Int64]:
        """The replica's rows of the global batch from `start`.

        Returns:
            Their example numbers; which are no padding; and the smallest number of the batch, for
            each row. For batch [4, 7, 9, 12, 15], replica 1 of 2 and 2 micro-batches of 2 rows:
            [9, 12, 15, 9], [True, True, True, False] and [4, 4, 4, 4].
        """
        batch = self._batch(start, excluded)
        rows = self._micro_batches * self._rows if len(batch) else 0
        if self._units:
            mine = batch[rows * self._replica.index :][:rows]
            # The first row of a unit pads it, so a unit has the same rows on any replica.
            repeated = mine[len(mine) // self._rows * self._rows :][:1]
        else:
            mine = batch[share(len(batch), self._replica.index, self._replica.count)]
            repeated = mine[:1]
        # Padding rows repeat an example: softmax over a row without tokens would be NaN.
        padding = np.repeat(repeated if len(repeated) else batch[:1], rows - len(mine))
        first = np.full(rows, batch.min() if len(batch) else 0)
        return np.concatenate((mine, padding)), np.arange(rows) < len(mine), first


def error_ahead(made: Iterable[Future[Any]], steps: int) -> DataError | None:
    """The error of a block that is made ahead of need, if the next `steps` need that block.

    Args:
        made: blocks, in order, or shards that will be skipped.
    """
    for future in made:
        if steps <= 0 or not future.done():
            break
        if (error := future.exception()) is not None:
            return error if isinstance(error, DataError) else None
        if isinstance(block := future.result(), CorruptShardError):  # it will be skipped
            break
        steps -= len(block)
    return None
